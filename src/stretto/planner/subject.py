"""A model to measure with: a run's shape, or one that is known here, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stretto.config import Config
from stretto.errors import ModelError
from stretto.models.backend import backend_of, pick_device, pick_dtype
from stretto.models.info import described
from stretto.models.load import architecture
from stretto.models.resolve import is_known
from stretto.models.shapes import Shape, known_config
from stretto.planner.memory import activation_bytes, logits_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STAND_INS = (
    "Qwen/Qwen2.5-3B-Instruct",
    "microsoft/rho-math-1b-v0.1",
    "EleutherAI/pythia-410m-deduped",
    "smollm2-135m",
    "tiny",
)
"""Models in place of one that is too large or not at hand, the largest first; no shape of them has
to be fetched."""
CPU_PARAMETERS = 2e8
"""Parameters that a CPU is measured with, at most: more take minutes."""
BYTES = 20
"""Bytes of a parameter in training: weight, gradient, and 16 of their float32 states."""
FREE_SHARE = 0.7
"""Share of the free memory that a measurement may take."""


@dataclass(frozen=True)
class Subject:
    """What is measured with.

    Attributes:
        name: of the model whose shape it has.
        config: of the run.
        device, dtype: as a run would take them.
    """

    name: str
    config: Config
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def shape(self) -> Shape:
        """The shape, for the formulas."""
        return described(self.name).shape

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, as one that is loaded; torch's random state is left as it was."""
        from transformers import AutoModelForCausalLM

        auto_class: Any = AutoModelForCausalLM
        trust = self.config.model.trust_remote_code
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self.device:
            torch.manual_seed(0)
            model: Any = auto_class.from_config(
                architecture(self.name, trust), dtype=self.dtype, trust_remote_code=trust
            )
        model.eval()
        backend_of(self.device).use_fastest_attention(model)
        made: PreTrainedModel = model
        return made


def subject_of(config: Config, tokens: int, say: Callable[[str], None]) -> Subject:
    """Return what to measure with: the run's shape if it fits here, else the largest that does.

    Nothing is fetched.

    Args:
        say: told when another model stands in, and why.

    Raises:
        ModelError: none fits.
    """
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    reason = ""
    for name in _candidates(config.model.name):
        subject = Subject(name, config, device, dtype)
        if fault := _fault(subject, tokens):
            reason = reason or fault
            continue
        if reason:
            say(
                f"'{config.model.name}' {reason}; '{name}' stands in for it. Rates carry over "
                "better than seconds beside them, which grow with the number of layers"
            )
        return subject
    raise ModelError(f"no model fits here to measure with: '{config.model.name}' {reason}")


def _candidates(name: str) -> Iterator[str]:
    yield name
    yield from (other for other in STAND_INS if other != name)


def _fault(subject: Subject, tokens: int) -> str:
    """Say why a model cannot be measured here; empty if it can."""
    name = subject.name
    if known_config(name) is None and not is_known(name) and not Path(name).expanduser().is_dir():
        return "would have to be fetched"
    try:
        shape = subject.shape
    except ModelError as error:
        return f"has no shape that plans know ({error})"
    if subject.device.type == "cpu" and shape.parameters > CPU_PARAMETERS:
        return f"has {shape.parameters / 1e9:.1f} billion parameters, too many for a CPU"
    needed = BYTES * shape.parameters + logits_bytes(shape, tokens, gradients=True)
    needed += activation_bytes(shape, tokens, 1, checkpointing=False)
    free = FREE_SHARE * free_bytes(subject.device)
    if needed > free:
        return f"needs {needed / 1e9:.0f} GB to be trained, of {free / 1e9:.0f} that may be taken"
    return ""


def free_bytes(device: torch.device) -> float:
    """Return the memory that is free."""
    return float(backend_of(device).free_bytes())
