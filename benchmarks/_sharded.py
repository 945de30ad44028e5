"""A learner in each rank, for ``sharded.py``."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from stretto.config import AlgorithmConfig, Config
from stretto.models.heads import critic_from_actor
from stretto.models.pieces import Layout
from stretto.schedules.rollout import Rollout, RolloutState, train_batch
from stretto.training.grid import Grid
from stretto.training.learner import PolicyLearner
from stretto.training.passes import LocalPasses
from stretto.training.sharded import Sharded, ShardedModel
from stretto.training.sharded_passes import ShardedPasses
from stretto.training.trained import TrainedModel
from stretto.types import FinishReason, Prompt, Score, TrainBatch

UPDATES = 100


def batch_of(
    algorithm: str, lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int = 0
) -> TrainBatch:
    """Two responses of random tokens to each prompt, with scores of all kinds it has use for."""
    rng = np.random.default_rng(seed)
    config = AlgorithmConfig.model_validate({"name": algorithm})
    made = []
    for i, (prompt, response) in enumerate(lengths):
        tokens = tuple(int(t) for t in rng.integers(vocabulary, size=prompt))
        rollout = Rollout(i, Prompt(i // 2, tokens, ""), i // 2)
        rollout.tokens = [int(t) for t in rng.integers(vocabulary, size=response)]
        rollout.logprobs = [float(x) for x in -5 + 0.1 * rng.normal(size=response)]
        rollout.versions, rollout.finish = [-1] * response, FinishReason.STOP
        numbers: dict[str, Any] = {"task": ("reward", 1)}
        if config.has_reference:
            numbers["reference"] = ("logprobs", response)
        if config.definition.critic:
            numbers["critic"] = ("values", response)
        for name, (kind, count) in numbers.items():
            values = rng.normal(size=count).astype(np.float32)
            rollout.scores[name] = Score(i, name, kind, values)
        rollout.state = RolloutState.SCORED
        made.append(rollout)
    return train_batch(made)


class Side:
    """A rank; with others it holds shards.

    Args:
        rank: its number.
        folder: of the model.
        tp: slices that linear layers are cut into.
    """

    def __init__(self, rank: int, folder: Path, tp: int = 1) -> None:
        self._folder, self._ranks = folder, dist.get_world_size()
        layout = Layout(self._ranks // tp, tp)
        self._grid = Grid("cpu", layout) if self._ranks > 1 else None

    def learn(
        self, given: Mapping[str, Any], batch: TrainBatch, steps: int, compare: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
        """Return the first gradients, the last weights, seconds a step, and bytes held.

        Gradients and weights only to be compared: their copies take memory.
        """
        config = Config.model_validate(given)
        learner = self._learner(config)
        gradients: dict[str, Tensor] = {}

        def keeping(name: str, trained: Any) -> None:
            called = "_norm" if self._grid else "update"  # once they are added up
            method = getattr(trained, called)

            def first() -> float:
                found = {key: gradient.clone() for key, gradient in trained.gradients().items()}
                found = trained.gathered(found)
                gradients.update({f"{name}.{key}": whole for key, whole in found.items()})
                setattr(trained, called, method)
                return float(method())

            setattr(trained, called, first)

        for name, trained in learner._trained.items() if compare else ():
            keeping(name, trained)
        seconds = []
        for _ in range(steps):
            start_s = time.perf_counter()
            learner.train(batch)
            seconds.append(time.perf_counter() - start_s)
        held = psutil.Process().memory_info().rss
        if not compare:
            return {}, {}, min(seconds), held
        weights = {
            f"{model}.{name}": tensor
            for model, tensors in learner.weights().items()
            for name, tensor in tensors.items()
        }
        return gradients, weights, min(seconds), held

    def peak_bytes(self) -> int:
        """Return the most memory that this process has held."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _learner(self, config: Config) -> PolicyLearner:
        torch.manual_seed(0)
        actor: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        actor.eval()
        critic: Any = critic_from_actor(actor) if config.algorithm.definition.critic else None
        if critic:  # a head of zeros lets no gradient through
            torch.nn.init.normal_(critic.score.weight, std=0.2)
        t: Any = config.training
        schedule: dict[str, Any] = {"updates": UPDATES, "warmup": 0}
        parts: tuple[Any, Any, Any]
        if self._grid is None:
            parts = (
                TrainedModel(actor, t.lr, t, **schedule),
                TrainedModel(critic, t.critic_lr, t, **schedule) if critic else None,
                LocalPasses(actor, critic, config),
            )
        else:
            shards = Sharded(actor, self._grid)
            others = Sharded(critic, self._grid) if critic else None
            parts = (
                ShardedModel(shards, t.lr, t, **schedule),
                ShardedModel(others, t.critic_lr, t, **schedule) if others else None,
                ShardedPasses(shards, others, config),
            )
        return PolicyLearner(*parts, config, {"task": 1.0})
