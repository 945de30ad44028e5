"""Ranks that divide a model from its files, for tests."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.assembly.run_models import NO_OVERRIDES
from stretto.config import Config, ModelConfig, OptimizerConfig
from stretto.layout import Layout
from stretto.models import layer_shards
from stretto.models.heads import critic_from_actor
from stretto.models.layer_shards import Grid
from stretto.models.load import load_causal_lm
from stretto.models.lora import add_lora
from stretto.models.mapped import convert, take
from stretto.models.tensor_parallel import Slices, cut_linears, plan_cuts
from stretto.models.weights import fingerprint_of
from stretto.runtime import learner_service, role_services, scorer_roles
from stretto.runtime.process_messages import RoleSetup, probe_of
from stretto.training import sharded
from stretto.training.sharded import ShardedModel
from stretto.training.trained import LearningRate
from stretto.types import Prompt

LOOKS = 3


def held_bytes() -> int:
    """Bytes of all tensors of this process that are not pages of a file. The least of some looks,
    as threads of collectives let go of their tensors a little after these have ended.
    """

    def look() -> int:
        gc.collect()
        found = [t for t in gc.get_objects() if isinstance(t, Tensor) and not t.is_meta]
        locals_ = [sharded._local(t.detach()) for t in found if t.layout == torch.strided]
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in locals_)}
        return sum(s.nbytes() for s in storages.values() if s.resizable())

    return min(look() for _ in range(LOOKS))


class MappedRank:
    """A rank that divides one model after the other."""

    def __init__(self, rank: int, tp: int = 1) -> None:
        self._grid = Grid("cpu", Layout(fsdp=dist.get_world_size() // tp, tp=tp))

    def shards(self, folder: Path, dtype: torch.dtype, kind: str) -> tuple[str, int, int, int]:
        """Return a learner's fingerprint, its shards' bytes, bytes held then, and the most."""
        before = held_bytes()
        model = load(folder, dtype, kind, in_files=True)
        seen = [held_bytes() - before]
        with pytest.MonkeyPatch.context() as patch:
            share_out = layer_shards.fully_shard

            def watched(*args: Any, **kwargs: Any) -> None:
                seen.append(held_bytes() - before)
                share_out(*args, **kwargs)
                seen.append(held_bytes() - before)

            patch.setattr(layer_shards, "fully_shard", watched)
            shards = ShardedModel(model, self._grid, LearningRate(1e-3, 1), OptimizerConfig())
        own = sum(shards.shard(name).nbytes for name in shards.wholes)
        held = held_bytes() - before
        return shards.fingerprint(), own, held, max(*seen, held)

    def served(self, config: Config, role: str) -> int:
        """Return bytes held when a role's service, as a run makes it, begins to divide a model."""
        before, seen = held_bytes(), list[int]()
        ranks = range(dist.get_world_size())
        setup = RoleSetup(config, NO_OVERRIDES, 1, ["cpu"] * len(ranks), ranks=ranks)
        probe = probe_of([Prompt(0, (1, 2, 3), "")])
        make: Callable[[], object] = {
            "learner": lambda: learner_service.learner(setup, probe),
            "generator": lambda: role_services.generator(setup, role, probe),
            "reference": lambda: scorer_roles.reference(setup),
            "critic": lambda: scorer_roles.critic(setup),
        }[role]

        def look(*args: Any, **kwargs: Any) -> None:
            seen.append(held_bytes() - before)
            raise InterruptedError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_shards, "fully_shard", look)
            patch.setattr(role_services, "slice_model", look)
            with pytest.raises(InterruptedError):
                make()
        return seen[0]

    def slice(self, folder: Path, dtype: torch.dtype, kind: str) -> tuple[str, int, int]:
        """Return the fingerprint of a model in slices, its slice's bytes, and bytes held."""
        before = held_bytes()
        model = load(folder, dtype, kind, in_files=True)
        cut_linears(model, plan_cuts(model, dist.get_world_size()), Slices())
        take(model, torch.device("cpu"))
        own = sum(p.nbytes for p in model.parameters())
        return fingerprint_of(model), own, held_bytes() - before


def load(folder: Path, dtype: torch.dtype, kind: str, *, in_files: bool) -> nn.Module:
    """Load an actor, or the critic that starts from it, as the processes of a run do."""
    torch.manual_seed(0)
    model: nn.Module = load_causal_lm(folder, dtype, torch.device("cpu"), in_files=in_files)
    if kind == "critic":
        return critic_from_actor(model)
    if kind == "lora":
        convert(model)
        return add_lora(model, ModelConfig(lora_rank=2), "CAUSAL_LM")
    return model
