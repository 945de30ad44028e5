"""Batches for every algorithm and of the engine, and what a learner makes of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import (
    VOCABULARY,
    critic_of,
    left_padded_logprobs,
    make_learner,
    make_rollouts,
    train_on,
)
from rounding import GRADIENT_TERMS, rounding
from stretto.config import AlgorithmConfig, RolloutConfig
from stretto.config.algorithm import ALGORITHMS
from stretto.evaluation.generation import completed
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.training.learner import PolicyLearner
from stretto.training.losses import MicroBatch
from stretto.training.shard_files import Stored
from stretto.types import Prompt, Score

Grads = dict[str, Tensor]

SHAPES = [(3, 7), (40, 5), (5, 1), (2, 9), (8, 6), (3, 4), (6, 2), (4, 8)]
PROMPTS = [5, 2, 5, 2, 5, 8, 2, 8]
"""Three responses to 5 and to 2, two to 8, in no order."""


def learned_gradients(
    learner: PolicyLearner, batch: Sequence[Rollout]
) -> tuple[Grads, dict[str, Any]]:
    """Gradients of actor and critic in the learner's first update, which is not taken."""
    grads: Grads = {}

    def keep(trained: Any, name: str) -> None:
        def update(**_: float) -> float:
            for key, p in trained.model.named_parameters():
                if p.grad is not None:
                    grads[f"{name}.{key}"] = p.grad.clone()
                    p.grad.zero_()
            return 0.0

        trained.update = update

    for name, trained in learner.trained.items():
        keep(trained, name)
    stats = train_on(learner, batch)
    return grads, dict(stats)


def assert_close(got: Grads, expected: Grads, rtol: float = rounding(GRADIENT_TERMS)) -> None:
    """Each tensor, relative to its own largest entry; models in float64 have parts in float32."""
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        scale = want.abs().max().item()
        assert scale > 0, name
        assert (got[name] - want).abs().max().item() <= rtol * scale, name


def engine_rollouts(
    model: Any, critic: Any, *, temperature: float, version: int = 0
) -> list[Rollout]:
    """Rollouts that the engine decoded, with values and rewards."""
    config = RolloutConfig(batch=8, max_new_tokens=12, temperature=temperature, slots=3)
    ends = frozenset(range(5, 11))
    engine = TorchEngine(model, EngineSettings(rollout=config, end_tokens=ends, seed=3))
    engine.version = version
    rng = torch.Generator().manual_seed(0)
    rollouts = []
    for i in range(8):
        ids = torch.randint(VOCABULARY, (2 + 3 * i,), generator=rng).tolist()
        rollouts.append(Rollout(i, Prompt(i, tuple(ids), ""), i))
    list(completed(engine, rollouts, 5))
    for r in rollouts:
        zeros = torch.zeros(len(r)).numpy()
        reward = torch.randn(1, generator=rng).numpy()
        r.scores["task"] = Score(r.id, "task", "reward", reward)
        r.scores["critic"] = Score(r.id, "critic", "values", zeros)
        r.scores["reference"] = Score(
            r.id, "reference", "logprobs", torch.tensor(r.logprobs).numpy()
        )
    return rollouts


def algorithm_settings(algorithm: dict[str, Any], **sections: Any) -> dict[str, Any]:
    training = {"ratio_tolerance": 100.0, "lr": 1e-3, **sections.pop("training", {})}
    rollout = {"batch": 8, "samples_per_prompt": 2, "max_new_tokens": 16}
    return {"algorithm": algorithm, "training": training, "rollout": rollout, **sections}


def make_batch(
    actor: Any, algorithm: dict[str, Any], shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[Rollout]:
    """Scored responses, of the critic and the reference only where the algorithm has them."""
    a = AlgorithmConfig.model_validate(algorithm)
    filled = [(prompt, response or 1) for prompt, response in shapes]
    batch = make_rollouts(actor, critic_of(actor), filled)
    for rollout, prompt, (_, length) in zip(batch, PROMPTS, shapes, strict=True):
        rollout.prompt = replace(rollout.prompt, id=prompt)
        if not length:
            rollout.tokens, rollout.logprobs = array("i"), array("f")
            rollout.versions = array("i")
            for name in ("critic", "reference"):
                rollout.scores[name] = replace(
                    rollout.scores[name], values=rollout.scores[name].values[:0]
                )
        if not a.definition.critic:
            del rollout.scores["critic"]
        if not a.beta:
            del rollout.scores["reference"]
    return batch


def rows_in(batch: MicroBatch, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of a micro-batch's rows."""
    read = {(*r.prompt.tokens, *r.tokens[:-1]): r for r in rollouts}
    found = []
    for row, mask in zip(batch.tokens.tolist(), batch.inputs.mask, strict=True):
        ids = next(i for i, r in read.items() if row[: len(i)] == [*i] and len(r) == mask.sum())
        assert not any(row[len(ids) :])
        found.append(read[ids])
    return found


def now(actor: Any, batch: Sequence[Rollout]) -> Tensor:
    """Log-probs [B, T] of the present policy by a naive pass for each response."""
    rows = [left_padded_logprobs(actor, [r])[0] if len(r) else torch.zeros(0) for r in batch]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class NoHostSync(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU: results whose shape or value it needs, and
    tensors that are made of Python's numbers.
    """

    REFUSED = ("nonzero", "masked_select", "_local_scalar_dense", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.REFUSED), name
        assert name != "lift_fresh", "a tensor is made of numbers"
        if name.startswith(("index", "_index_put", "_unsafe_index")):
            indices = [i for i in args[1] if i is not None] if isinstance(args[1], list) else []
            assert not any(i.dtype == torch.bool for i in indices), name
        return func(*args, **(kwargs or {}))


CORRECTED = {"old_policy": "proximal", "correction": "truncate", "correction_level": "sequence"}


def learner_of(algorithm: dict[str, Any], actor: Any, **sections: Any) -> PolicyLearner:
    critic = None
    if ALGORITHMS[algorithm["name"]].critic:
        critic = critic_of(actor).to(next(actor.parameters()).dtype)
    return make_learner(actor, critic, algorithm_settings(algorithm, **sections))


def in_memory(state: Any) -> Any:
    """Return a state with all tensors on the CPU, reading those that are in files."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, Stored):
        return state.read()
    if isinstance(state, Mapping):
        return {key: in_memory(value) for key, value in state.items()}
    return state
