"""The messages between a run's processes at its start and at weight syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.assembly.run_models import Overrides, prepare_torch
from stretto.config import Config
from stretto.layout import Layout
from stretto.models.backend import pick_device, with_dtype
from stretto.models.layer_shards import Grid
from stretto.models.offload import CopyStream, OffloadedTensors
from stretto.models.weights import fingerprint
from stretto.saying import silent
from stretto.types import FloatArray, IntArray, Prompt, WeightsRef

SENDER = "sender"
TRAINED = "trained"
COPY_STREAM = "copy stream"
"""Keys of ``RoleSetup.shared``: the learner's sender of weights, its models by name, and the stream
that copies offloaded tensors."""

PROBE_ROWS, PROBE_TOKENS = 8, 9
"""Shape of the probe. Each sequence gives log-probs of all tokens but the first, 64 in total."""


@dataclass(frozen=True, slots=True)
class RoleSetup:
    """Arguments from which a process builds the service of a role."""

    run_config: Config
    overrides: Overrides
    threads: int  # torch's threads in this process
    devices: Sequence[str]  # of the group's ranks
    shares_weights: bool = False  # followers are in the learner's process and use its weights
    offload: bool = False  # idle roles keep their tensors in host memory
    alone: bool = False  # in its process
    shares_gpus: bool = False  # with other processes
    shared: dict[str, Any] = field(default_factory=dict)  # objects shared by the process's services
    ranks: Sequence[int] = (0,)  # of the group, that hold the role
    layout: Layout | None = None  # in these ranks (None: a scorer's, by what divides its heads)

    @property
    def config(self) -> Config:
        """The settings, with this process's device as ``model.device``."""
        device = self.devices[dist.get_rank()]
        return self.run_config.changed_in("model", device=device)

    @property
    def rank(self) -> int:
        """This rank's number among those of the role."""
        return dist.get_rank() - self.ranks[0]

    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of the role's ranks. ``None`` is the default group, of all."""
        if len(self.ranks) == dist.get_world_size():
            return None
        key = f"group {self.ranks}"
        if key not in self.shared:
            self.shared[key] = dist.new_group(list(self.ranks), use_local_synchronization=True)
        group: dist.ProcessGroup = self.shared[key]
        return group

    def prepare(self) -> None:
        prepare_torch(self.run_config.seed, self.threads)

    def for_loading(self) -> Self:
        """Return the setup for loading models: on the CPU if several ranks shard them."""
        return self if len(self.ranks) == 1 else self.on_host()

    def on_host(self) -> Self:
        """Return the setup that loads models on the CPU, mapped from files if not warmed up."""
        config = self.run_config
        dtype = with_dtype(self.config.model, silent).dtype
        return replace(
            self,
            run_config=config.changed_in("model", dtype=dtype),
            overrides=replace(self.overrides, in_files=not config.warmup_examples),
            devices=["cpu"] * len(self.devices),
        )

    def grid(self, layout: Layout) -> Grid:
        """Return the ranks as a grid. Roles of the same layout share its groups. A collective."""
        key = f"grid {layout}"
        if key not in self.shared:
            self.shared[key] = Grid(pick_device(self.config.model.device).type, layout)
        grid: Grid = self.shared[key]
        return grid

    def give_back(self) -> None:
        if self.shares_gpus:
            torch.cuda.empty_cache()

    def offloaded(
        self, owner: str, find: Callable[[], Iterable[Tensor]]
    ) -> OffloadedTensors | None:
        """Offload a role's tensors between calls. Returns None if ``offload`` is off."""
        if not self.offload:
            return None
        if COPY_STREAM not in self.shared:
            self.shared[COPY_STREAM] = CopyStream(pick_device(self.config.model.device))
        return OffloadedTensors(owner, find, self.shared[COPY_STREAM])


@dataclass(frozen=True, slots=True)
class Ready:
    """The learner's message to the other processes once its models are loaded."""

    refs: Mapping[str, WeightsRef]  # tickets for the initial trained weights
    frozen: str  # fingerprint of the actor's frozen parameters
    notes: Sequence[str]  # lines for the log
    dtype: torch.dtype  # of the learner's computation


@dataclass(frozen=True, slots=True)
class Offer:
    """The learner's message before it sends weights."""

    mark: str  # of the transfer plan
    size: int  # bytes of all ranks
    probe: FloatArray | None  # the learner's log-probs of the probe, [n, t]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A follower's message after it has loaded weights."""

    mark: str  # of the received data
    probe: FloatArray | None = None  # an engine's log-probs of the probe, [n, t]
    moved: int = 0  # bytes sent between ranks of one group


@dataclass(frozen=True, slots=True)
class MoveRates:
    """A generator's measured costs of moving rollouts."""

    prefill_tokens_per_s: float
    kv_bytes: int  # KV cache per token (0: caches cannot be moved)
    host_bytes_per_s: float = 0.0  # between device and host (0: one memory)


def probe_of(prompts: Sequence[Prompt]) -> IntArray:
    tokens = [token for prompt in prompts for token in prompt.tokens]
    return np.resize(np.array(tokens, np.int32), (PROBE_ROWS, PROBE_TOKENS))


def frozen_mark(model: nn.Module) -> str:
    return fingerprint((n, p) for n, p in model.named_parameters() if not p.requires_grad)
