"""A learner in each rank, for ``sharded.py``."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.config import AlgorithmConfig, Config
from stretto.layout import Layout
from stretto.models.heads import critic_from_actor
from stretto.models.layer_shards import Grid
from stretto.models.load import load_causal_lm
from stretto.schedules.rollout import Rollout, RolloutState, train_batch
from stretto.training.backprop import LocalBackprop
from stretto.training.learner import PolicyLearner
from stretto.training.losses import Losses
from stretto.training.sharded import ShardedBackprop, ShardedModel
from stretto.training.trained import LearningRate, TrainedModel
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
        rollout.tokens = array("i", map(int, rng.integers(vocabulary, size=response)))
        rollout.logprobs = array("f", map(float, -5 + 0.1 * rng.normal(size=response)))
        rollout.versions, rollout.finish = array("i", [-1] * response), FinishReason.STOP
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


class Watch:
    """Looks at this process's own memory, without the pages of files, every few milliseconds.

    Attributes:
        most: bytes that it has seen.
    """

    def __enter__(self) -> Watch:
        self.most, self._ended = 0, Event()
        self._thread = Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, own_bytes())


def own_bytes() -> int:
    """Return the memory of this process, without the pages of files, which the kernel may drop."""
    used = psutil.Process().memory_info()
    return int(used.rss - used.shared)


class Side:
    """A rank; with others it holds shards.

    Args:
        rank: its number.
        folder: of the model.
        tp: slices that linear layers are cut into.
    """

    def __init__(self, rank: int, folder: Path, tp: int = 1) -> None:
        self._folder, self._ranks = folder, dist.get_world_size()
        layout = Layout(fsdp=self._ranks // tp, tp=tp)
        self._grid = Grid("cpu", layout) if self._ranks > 1 else None

    def learn(
        self, given: Mapping[str, Any], batch: TrainBatch, steps: int, compare: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], float, Sequence[int]]:
        """Return the first gradients, the last weights, seconds a step, and bytes.

        Bytes: the most while models are loaded and divided, then held, and held after the steps;
        before there is any model, there are none. Gradients and weights only to be compared: their
        copies take memory.
        """
        config, before = Config.model_validate(given), own_bytes()
        with Watch() as watch:
            learner = self._learner(config)
        used = [watch.most - before, own_bytes() - before]
        gradients: dict[str, Tensor] = {}

        def keeping(name: str, trained: Any) -> None:
            called = "_norm" if self._grid else "update"  # once they are added up
            method = getattr(trained, called)

            def first(**options: float) -> float:
                found = {key: gradient.clone() for key, gradient in trained.gradients().items()}
                found = trained.gathered(found)
                gradients.update({f"{name}.{key}": whole for key, whole in found.items()})
                setattr(trained, called, method)
                return float(method(**options))

            setattr(trained, called, first)

        for name, trained in learner.trained.items() if compare else ():
            keeping(name, trained)
        seconds = []
        for _ in range(steps):
            start_s = time.perf_counter()
            learner.train(batch)
            seconds.append(time.perf_counter() - start_s)
        used.append(own_bytes() - before)
        if not compare:
            return {}, {}, min(seconds, default=math.nan), used
        weights = {
            f"{model}.{name}": tensor
            for model, tensors in learner.weights().items()
            for name, tensor in tensors.items()
        }
        return gradients, weights, min(seconds, default=math.nan), used

    def _learner(self, config: Config) -> PolicyLearner:
        torch.manual_seed(0)
        cpu, shared_out = torch.device("cpu"), self._grid is not None
        actor = load_causal_lm(self._folder, torch.float32, cpu, in_files=shared_out)
        critic: Any = critic_from_actor(actor) if config.algorithm.definition.critic else None
        if critic:  # a head of zeros lets no gradient through
            torch.nn.init.normal_(critic.score.weight, std=0.2)
        t: Any = config.training
        losses = Losses(config.algorithm, config.rollout.temperature)
        rate, critic_rate = LearningRate(t.lr, UPDATES), LearningRate(t.critic_lr, UPDATES)
        parts: tuple[Any, Any, Any]
        if self._grid is None:
            whole = TrainedModel(actor, rate, t)
            other = TrainedModel(critic, critic_rate, t) if critic else None
            parts = whole, other, LocalBackprop(whole, other, losses, t.microbatch_tokens)
        else:
            first = ShardedModel(actor, self._grid, rate, t)
            second = ShardedModel(critic, self._grid, critic_rate, t) if critic else None
            parts = first, second, ShardedBackprop(first, second, losses, t.microbatch_tokens)
        return PolicyLearner(*parts, config, {"task": 1.0})
