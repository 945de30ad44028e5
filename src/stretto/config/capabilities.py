"""Facts about engines, runtimes and reward sources, which code reads instead of testing names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities and needs of a generation engine.

    Attributes:
        own_weights: has a separate copy of the weights, filled by the first weight sync. The model
            then stays on the CPU and determines which weights are sent.
        share_argument: argument with the engine's share of a GPU's memory, if it sizes its KV cache
            by that. It then measures free memory when it starts. Otherwise it caches the tokens of
            its slots.
        moves_cache: can pass a rollout's KV cache to another engine of its kind.
        interruptible: can stop after any token, and continue later.
        logprobs: ``sampled``: of the distribution that tokens are sampled from, with temperature
            and truncation; ``raw``: of the model's own.
    """

    title: str  # in messages
    library: str = ""  # name of the extra to install, and of its module
    checks_arguments: bool = False  # its library refuses wrong ``rollout.engine_args``
    own_weights: bool = False
    needs_processes: bool = False  # cannot run on a thread of the trainer's process
    share_argument: str = ""
    default_share: float = 0.0
    sleep_argument: str = ""  # lets it free memory between rounds
    moves_cache: bool = False
    interruptible: bool = True
    logprobs: Literal["sampled", "raw"] = "sampled"

    @property
    def sizes_cache(self) -> bool:
        return self.share_argument != ""


EngineName = Literal["torch", "vllm"]
ENGINES: Mapping[EngineName, Capabilities] = {
    "torch": Capabilities(title="Stretto's own engine", moves_cache=True),
    "vllm": Capabilities(
        title="vLLM",
        library="vllm",
        checks_arguments=True,
        own_weights=True,
        needs_processes=True,
        share_argument="gpu_memory_utilization",
        default_share=0.92,
        sleep_argument="enable_sleep_mode",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeKind:
    """Facts about a runtime."""

    has_processes: bool = True  # otherwise roles run on threads of this process
    several_machines: bool = False  # which share the run's folder
    assigns_gpus: str = ""  # title of a scheduler that gives each rank its GPU
    library: str = ""  # name of the extra to install, and of its module


RUNTIMES: Mapping[str, RuntimeKind] = {
    "inline": RuntimeKind(has_processes=False),
    "local": RuntimeKind(),
    "ray": RuntimeKind(several_machines=True, assigns_gpus="Ray", library="ray"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """Facts about a kind of reward source."""

    is_model: bool = False  # a reward model gives the scores
    is_code: bool = True  # code gives the scores, which a run opens itself
    verifies: bool = False  # that code is the task's verifier, which needs answers
    streams: bool = False  # that code is a class that scores chunk by chunk
    place: Literal["", "path", "url"] = ""  # of a function that the name finds, or of a server
    named: bool = True  # found by its name. Otherwise only the caller of a run has it


ENVIRONMENT = "environment"
"""The reward source of environments' rewards."""
SOURCES: Mapping[str, SourceKind] = {
    "task": SourceKind(verifies=True),
    ENVIRONMENT: SourceKind(is_code=False),
    "model:": SourceKind(is_model=True, is_code=False),
    "scorer:": SourceKind(streams=True),
    "http://": SourceKind(place="url"),
    "https://": SourceKind(place="url"),
}
"""Kinds of reward sources by their name, or by its beginning if that has a colon."""
FUNCTION = SourceKind(place="path")
OBJECT = SourceKind(named=False)
