"""The messages between a run's processes at its start and at weight syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.assembly.models import Overrides, prepare_torch
from stretto.config import Config
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.offload import CopyStream, OffloadedTensors
from stretto.models.weights import fingerprint
from stretto.types import FloatArray, IntArray, Prompt, WeightsRef

SENDER, ADAPTED, COPY_STREAM = "sender", "adapted", "copy stream"
"""What services of a process share: the learner's weights, its actor where only adapters of it are
trained, and the stream of offloaded tensors."""

PROBE_ROWS, PROBE_TOKENS = 8, 9
"""Sequences of the probe, and tokens of each; all but the first are looked at: 64."""


@dataclass(frozen=True, slots=True)
class RoleSetup:
    """What a role's service is made from in its process."""

    run_config: Config
    overrides: Overrides
    threads: int  # of torch in this process
    devices: Sequence[str]  # of the group's ranks
    shares_weights: bool = False  # all that follow the learner are in its process, never behind it
    offload: bool = False  # roles leave tensors in the host's memory while others work
    alone: bool = False  # the process has one role
    shares_gpus: bool = False  # other processes work on the same GPUs
    shared: dict[str, Any] = field(default_factory=dict)  # what services leave for each other

    @property
    def config(self) -> Config:
        """The settings of this process: ``model.device`` is its own."""
        device = self.devices[dist.get_rank()]
        return self.run_config.changed_in("model", device=device)

    def prepare(self) -> None:
        prepare_torch(self.run_config.seed, self.threads)

    def for_loading(self) -> Self:
        """Return the setup by which models are loaded: by ranks that divide them, on the CPU."""
        return self if dist.get_world_size() == 1 else self.on_host()

    def on_host(self) -> Self:
        """Return the setup by which models are loaded on the CPU, and left in their files."""
        m, config = self.config.model, self.run_config
        dtype = str(pick_dtype(m.dtype, pick_device(m.device))).removeprefix("torch.")
        return replace(
            self,
            run_config=config.changed_in("model", dtype=dtype),
            overrides=replace(self.overrides, in_files=not config.warmup_examples),
            devices=["cpu"] * len(self.devices),
        )

    def give_back(self) -> None:
        if self.shares_gpus:
            torch.cuda.empty_cache()

    def offloaded(
        self, owner: str, find: Callable[[], Iterable[Tensor]]
    ) -> OffloadedTensors | None:
        """Offload a role's tensors between its calls; ``None`` where all roles keep theirs."""
        if not self.offload:
            return None
        if COPY_STREAM not in self.shared:
            self.shared[COPY_STREAM] = CopyStream(pick_device(self.config.model.device))
        return OffloadedTensors(owner, find, self.shared[COPY_STREAM])


@dataclass(frozen=True, slots=True)
class Ready:
    """The message of the learner's process to the others, once its models are loaded."""

    refs: Mapping[str, WeightsRef]  # tickets for the trained weights, as training starts
    frozen: str  # fingerprint of the actor's parameters that are not trained
    notes: Sequence[str]  # lines for people
    dtype: torch.dtype  # in which the learner computes


@dataclass(frozen=True, slots=True)
class Offer:
    """The message of the learner before its weights travel."""

    mark: str  # of the plan by which they do
    size: int  # bytes, of all ranks
    probe: FloatArray | None  # log-probs of the probe under the actor's, [n, t]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The message of a follower that has loaded weights."""

    mark: str  # of what was received
    probe: FloatArray | None = None  # an engine's log-probs of the probe under them, [n, t]
    moved: int = 0  # bytes that went between ranks of one group


@dataclass(frozen=True, slots=True)
class MoveRates:
    """The message of a generator about what moving rollouts costs."""

    prefill_tokens_per_s: float
    kv_bytes: int  # of keys and values of one token; 0 where they do not move
    host_bytes_per_s: float = 0.0  # to the host, or back; 0 where that is the same memory


def probe_of(prompts: Sequence[Prompt]) -> IntArray:
    tokens = [token for prompt in prompts for token in prompt.tokens]
    return np.resize(np.array(tokens, np.int32), (PROBE_ROWS, PROBE_TOKENS))


def frozen_mark(model: nn.Module) -> str:
    return fingerprint((n, p) for n, p in model.named_parameters() if not p.requires_grad)
