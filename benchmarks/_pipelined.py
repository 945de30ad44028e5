"""A learner in stages in each rank, for ``pipeline_training.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stretto.config import Config
from stretto.models.heads import critic_from_actor
from stretto.pipelines.executor.instructions import Timings
from stretto.pipelines.executor.stages import Name
from stretto.training import pipelined
from stretto.training.losses import MicroBatch
from stretto.training.pipelined import PipelinePlan
from stretto.training.trained import LearningRate


class StageRank:
    """A rank with a stage of a random actor and one of a critic."""

    def __init__(self, rank: int, architecture: Any, config: Config) -> None:
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        actor: Any = LlamaForCausalLM(architecture)
        actor.eval()
        rate = LearningRate(1e-5, 1)
        rates: dict[Name, LearningRate] = {"actor": rate, "critic": rate}
        critic = critic_from_actor(actor)
        self._passes = pipelined.make(actor, critic, config, rates, torch.device("cpu"))

    def run(self, plan: PipelinePlan, batches: Sequence[MicroBatch]) -> Timings:
        timings, _ = self._passes.passes(plan, batches, 0.05)
        return timings
