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
        matches_learner: can compute log-probs equal to the learner's to the bit.
    """

    title: str  # in messages
    help: str  # of ``rollout.engine``
    arguments: str  # help of ``rollout.engine_args``
    library: str = ""  # name of the extra to install, and of its module
    checks_arguments: bool = False  # its library refuses wrong ``rollout.engine_args``
    own_weights: bool = False
    needs_processes: bool = False  # cannot run on a thread of the trainer's process
    share_argument: str = ""
    default_share: float = 0.0
    sleep_argument: str = ""  # lets it free memory between rounds
    moves_cache: bool = False
    matches_learner: bool = False

    @property
    def sizes_cache(self) -> bool:
        return self.share_argument != ""


EngineName = Literal["torch", "vllm"]
ENGINES: Mapping[EngineName, Capabilities] = {
    "torch": Capabilities(
        title="Stretto's own engine",
        help="Stretto's own.",
        arguments=(
            "cuda_graphs (false runs decode steps without CUDA graphs); speculative_tokens (0: "
            "maximum of tokens proposed per row and step when few rows are left; a step keeps "
            "those that it would have sampled anyway, and their share sets the number), "
            "speculative_rows (8: up to how many rows) and speculative_model (a smaller model with "
            "the same tokenizer, by folder or hub name, that proposes them; without one they come "
            "from texts of the same prompt)."
        ),
        moves_cache=True,
        matches_learner=True,
    ),
    "vllm": Capabilities(
        title="vLLM",
        help=(
            "vLLM, in separate processes (runtime = 'local' or 'ray'). auto: vllm if there are "
            "GPUs, such processes and vLLM, else torch."
        ),
        arguments=(
            "vLLM's own engine arguments, for example gpu_memory_utilization (default on a GPU "
            "with other roles: the memory that these leave by the memory plan)."
        ),
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

    help: str  # of ``runtime``
    has_processes: bool = True  # otherwise roles run on threads of this process
    several_machines: bool = False  # which share the run's folder
    assigns_gpus: str = ""  # title of a scheduler that gives each rank its GPU
    library: str = ""  # name of the extra to install, and of its module


RuntimeName = Literal["inline", "local", "ray"]
RUNTIMES: Mapping[RuntimeName, RuntimeKind] = {
    "inline": RuntimeKind(help="threads of this process.", has_processes=False),
    "local": RuntimeKind(help="processes on this machine."),
    "ray": RuntimeKind(
        help="processes on a Ray cluster.",
        several_machines=True,
        assigns_gpus="Ray",
        library="ray",
    ),
}


def runtime_for(machines: int) -> RuntimeName:
    """Return the first runtime with processes on so many machines."""
    names = [name for name, kind in RUNTIMES.items() if kind.has_processes]
    return next(name for name in names if machines == 1 or RUNTIMES[name].several_machines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """Facts about a kind of reward source."""

    is_model: bool = False  # a reward model gives the scores
    is_code: bool = True  # code gives the scores, which a run opens itself
    verifies: bool = False  # that code is the task's verifier, which needs answers
    streams: bool = False  # that code is a class that scores chunk by chunk
    place: Literal["", "path", "url"] = ""  # of a function that the name finds, or of a server
    named: bool = True  # found by its name. Otherwise only the caller of a run has it
    examples: tuple[str, ...] = ()  # sources of this kind, in messages


ENVIRONMENT = "environment"
"""The reward source of environments' rewards."""
SOURCES: Mapping[str, SourceKind] = {
    "task": SourceKind(verifies=True, examples=("task",)),
    ENVIRONMENT: SourceKind(is_code=False),
    "model:": SourceKind(is_model=True, is_code=False, examples=("model:NAME",)),
    "scorer:": SourceKind(streams=True, examples=("scorer:file.py:name",)),
    "http://": SourceKind(place="url", examples=("http://127.0.0.1:PORT/...",)),
    "https://": SourceKind(place="url"),
}
"""Kinds of reward sources by their name, or by its beginning if that has a colon."""
FUNCTION = SourceKind(place="path", examples=("file.py:name", "package.module:name"))
OBJECT = SourceKind(named=False)
