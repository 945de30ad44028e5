"""Part 4, data flow: who sends what to whom in a step, in bytes.

The messages are the very objects that roles exchange, made again with the lengths that a run has
recorded; their arrays are counted, and token ids of prompts as arrays of them would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from stretto.config import Config
from stretto.models.heads import critic_from_actor
from stretto.models.load import load_causal_lm, pick_device, pick_dtype
from stretto.observe import RunDirectory
from stretto.observe.run_directory import RolloutRecord
from stretto.schedules.rollout import Rollout, train_batch
from stretto.types import Chunk, FinishReason, Prompt, Score, ScoreKind, short_name

TOKEN_BYTES = np.dtype(np.int32).itemsize
"""Bytes of a token's id, as all arrays of them have it."""

DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Flow:
    """All that one role is sent by another in a step.

    Attributes:
        what: in words.
        size_bytes: of a step.
    """

    sender: str
    receiver: str
    what: str
    size_bytes: int


def payload(message: Any) -> int:
    """Return the bytes of all arrays, tensors and token ids in a message.

    Single numbers and texts count nothing.
    """
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, Tensor):
        return message.numel() * message.element_size()
    if isinstance(message, tuple) and message and all(isinstance(m, int) for m in message):
        return len(message) * TOKEN_BYTES
    if isinstance(message, Mapping):
        return sum(map(payload, message.values()))
    if isinstance(message, list | tuple):
        return sum(map(payload, message))
    if is_dataclass(message):
        return sum(payload(getattr(message, f.name)) for f in fields(message))
    return 0


def flows(
    records: Sequence[RolloutRecord], config: Config, models: Mapping[str, nn.Module]
) -> list[Flow]:
    """Count what is sent in a step.

    Args:
        models: those that are trained, by name.
    """
    scorers = list(_scorers(config))
    rollouts = [_rollout(record, scorers) for record in records]
    asked = [Rollout(r.id, r.prompt, r.group).response() for r in rollouts]
    whole = [r.response() for r in rollouts]
    found = [
        Flow(DRIVER, "generator", "prompts", payload(asked)),
        Flow("generator", DRIVER, "tokens, log-probs", payload([_chunk(r) for r in rollouts])),
    ]
    for source, kind in scorers:
        name = short_name(source)
        answers = [r.scores[source] for r in rollouts]
        what = {"reward": "rewards", "logprobs": "log-probs", "values": "values"}[kind]
        found.append(Flow(DRIVER, name, "prompts, responses", payload(whole)))
        found.append(Flow(name, DRIVER, what, payload(answers)))
    found.append(Flow(DRIVER, "learner", "the batch", payload(train_batch(rollouts))))
    followers = {"actor": "generator", "critic": "critic"}
    for name, model in models.items():
        weights = payload(list(model.parameters()))
        found.append(Flow("learner", followers[name], f"weights: {name}", weights))
    return found


def trained_models(run: RunDirectory, config: Config) -> dict[str, nn.Module]:
    """Return the actor that a run has trained, and a critic as large as its own, by name."""
    device = pick_device("cpu")
    actor = load_causal_lm(run.model, pick_dtype(config.model.dtype, device), device)
    models: dict[str, nn.Module] = {"actor": actor}
    if config.algorithm.definition.critic:
        models["critic"] = critic_from_actor(actor)
    return models


def _scorers(config: Config) -> Iterator[tuple[str, ScoreKind]]:
    """Yield the name and kind of each scorer of a run."""
    for source in config.reward.sources:
        yield source, "reward"
    if config.algorithm.has_reference:
        yield "reference", "logprobs"
    if config.algorithm.definition.critic:
        yield "critic", "values"


def _chunk(rollout: Rollout) -> Chunk:
    tokens, logprobs = np.array(rollout.tokens, np.int32), np.array(rollout.logprobs, np.float32)
    return Chunk(rollout.id, 0, tokens, logprobs, rollout.versions[0], rollout.finish)


def _rollout(record: RolloutRecord, scorers: Sequence[tuple[str, ScoreKind]]) -> Rollout:
    """Make a rollout of the recorded lengths; what stands in it is made up."""
    n = record.tokens
    rollout = Rollout(
        record.id,
        Prompt(record.prompt, (0,) * record.prompt_tokens, ""),
        record.group,
        tokens=[0] * n,
        logprobs=[0.0] * n,
        versions=[0] * n,
        finish=FinishReason(record.finish or FinishReason.LENGTH),
    )
    for source, kind in scorers:
        values = np.zeros(1 if kind == "reward" else n, np.float32)
        rollout.scores[source] = Score(record.id, source, kind, values)
    return rollout
