"""A learner in stages in each rank, and the bytes of its tensors, for ``held_bytes.py``."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import Tensor, nn

from stretto.config import Config
from stretto.models.heads import critic_from_actor
from stretto.models.load import load_causal_lm
from stretto.pipelines.executor.stages import Name
from stretto.training import pipelined
from stretto.training.trained import LearningRate

CPU = torch.device("cpu")
LOOKS = 3


class HoldingRank:
    """A rank with a stage of the actor and one of the critic, from files of both."""

    def __init__(self, rank: int) -> None:
        self._before = held_bytes()

    def load(self, actor: Path, critic: Path, config: Config) -> tuple[dict[Name, int], int]:
        """Return the bytes of the stages' weights, and of all tensors of this process."""
        models = [
            load_causal_lm(path, torch.float32, CPU, in_files=True) for path in (actor, critic)
        ]
        rate = LearningRate(1e-5, 1)
        rates: dict[Name, LearningRate] = {"actor": rate, "critic": rate}
        self._backprop = pipelined.make(models[0], critic_from_actor(models[1]), config, rates, CPU)
        models.clear()
        stages = {name: trained.model for name, trained in self._backprop.models.items()}
        return {n: weight_bytes(stage) for n, stage in stages.items()}, held_bytes() - self._before


def weight_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def held_bytes() -> int:
    """Bytes of all tensors of this process that are not pages of a file. The least of some looks,
    as threads of collectives let go of their tensors a little after these have ended.
    """

    def look() -> int:
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, Tensor) and not t.is_meta]
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors)}
        return sum(s.nbytes() for s in storages.values() if s.resizable())

    return min(look() for _ in range(LOOKS))
