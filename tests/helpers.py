"""Small models and batches, the naive forward pass that others are compared with, a full disk."""

from __future__ import annotations

import os
import resource
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from stretto.config import Config
from stretto.models.heads import critic_from_actor
from stretto.observe.run_directory import RolloutRecord
from stretto.runtime.sim.cluster import Workload
from stretto.runtime.sim.lengths import Lengths
from stretto.schedules.rollout import Rollout, RolloutState, train_batch
from stretto.training.backprop import LocalBackprop
from stretto.training.learner import PolicyLearner
from stretto.training.losses import Losses
from stretto.training.trained import LearningRate, TrainedModel
from stretto.types import FinishReason, Prompt, Response, Score, WeightsRef
from stretto.weights.channel import SharedChannel

VOCABULARY = 61


def llama(
    *,
    vocabulary: int = VOCABULARY,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tied: bool = True,
    hidden: int = 16,
) -> Any:
    """A Llama of two layers with random weights, large enough to give clear preferences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def critic_of(actor: Any, seed: int = 1) -> Any:
    """A critic whose head is not zero, so that gradients reach its backbone."""
    critic: Any = critic_from_actor(actor)
    torch.manual_seed(seed)
    nn.init.normal_(critic.score.weight, std=0.2)
    return critic


def left_padded_logprobs(
    model: Any, rollouts: Sequence[Rollout | Response], temperature: float = 1.0
) -> list[Tensor]:
    """Log-probabilities [T] of each response: left padding, mask, positions, all logits at once."""
    rows = [[*r.prompt.tokens, *r.tokens] for r in rollouts]
    width = max(map(len, rows))
    ids = torch.tensor([[7] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    table = torch.log_softmax(logits / temperature, -1)
    out = []
    for b, r in enumerate(rollouts):
        first = width - len(r)
        out.append(torch.stack([table[b, first + t - 1, r.tokens[t]] for t in range(len(r))]))
    return out


def make_rollouts(
    actor: Any,
    critic: Any,
    shapes: Sequence[tuple[int, int]],
    *,
    noise: float = 0.1,
    seed: int = 0,
    temperature: float = 1.0,
    first_id: int = 0,
) -> list[Rollout]:
    """Scored rollouts of (prompt, response) lengths, with old policies ``noise`` off the present.

    Behaviour and reference log-probabilities and old values are the models' own, plus noise: what
    makes ratios, clipping and KL penalties differ from nothing.
    """
    rng = np.random.default_rng(seed)
    vocabulary = actor.config.vocab_size
    made = []
    for i, (prompt, response) in enumerate(shapes):
        tokens = tuple(int(t) for t in rng.integers(vocabulary, size=prompt))
        rollout = Rollout(first_id + i, Prompt(i, tokens, ""), first_id + i)
        rollout.tokens = array("i", rng.integers(vocabulary, size=response).tolist())
        rollout.versions = array("i", [0] * response)
        rollout.finish = FinishReason.STOP if i % 3 else FinishReason.LENGTH
        with torch.no_grad():
            new = left_padded_logprobs(actor, [rollout], temperature)[0].double().numpy()
            values = naive_values(critic, rollout).double().numpy()
        rollout.logprobs = array("f", (new + noise * rng.normal(size=response)).tolist())
        reference = (new + noise * rng.normal(size=response)).astype(np.float32)
        old_values = (values + noise * rng.normal(size=response)).astype(np.float32)
        reward = np.array([rng.normal()], np.float32)
        for source, kind, numbers in (
            ("task", "reward", reward),
            ("reference", "logprobs", reference),
            ("critic", "values", old_values),
        ):
            rollout.scores[source] = Score(rollout.id, source, kind, numbers)  # type: ignore[arg-type]
        rollout.state = RolloutState.SCORED
        made.append(rollout)
    return made


def naive_values(critic: Any, rollout: Rollout) -> Tensor:
    """V(s_t) [T] by the classifier's own forward pass over each prefix by itself."""
    values = []
    for t in range(len(rollout)):
        row = torch.tensor([[*rollout.prompt.tokens, *rollout.tokens[:t]]])
        values.append(critic(input_ids=row).logits[0, 0])
    return torch.stack(values)


def make_learner(
    actor: nn.Module,
    critic: nn.Module | None,
    settings: Mapping[str, Any] | None = None,
    *,
    updates: int = 10,
    warmup: int = 0,
) -> PolicyLearner:
    """A learner on one or two models; ``settings`` as a recipe has them."""
    config = Config.model_validate(settings or {})
    t = config.training
    losses = Losses(config.algorithm, config.rollout.temperature)
    first = TrainedModel(actor, LearningRate(t.lr, updates, warmup), t)
    rate = LearningRate(t.critic_lr, updates, warmup)
    second = TrainedModel(critic, rate, t) if critic else None
    backprop = LocalBackprop(first, second, losses, t.microbatch_tokens)
    return PolicyLearner(first, second, backprop, config, {"task": 1.0, "environment": 0.5})


def told(rollouts: Iterable[Rollout]) -> list[Response]:
    """What a role is told of rollouts."""
    return [r.response(text=True) for r in rollouts]


def train_on(learner: Any, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """Take a step on scored rollouts; its figures."""
    return learner.train(train_batch(rollouts)).stats


CHANNEL = SharedChannel()
"""Connects what tests make."""


def ticket(
    version: int, fingerprint: str, tensors: Mapping[str, Tensor] | None = None
) -> WeightsRef:
    """Of weights that lie in :data:`CHANNEL`, or in shared memory where there are no tensors."""
    if tensors is None:
        return WeightsRef("actor", version, fingerprint)
    ref = WeightsRef("actor", version, fingerprint, CHANNEL.name)
    CHANNEL.put(ref, tensors)
    return ref


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """Files take no more than ``size`` bytes: a write takes what still fits, the next one fails.
    Python would cut off the bytecode of modules imported meanwhile, here or in a child, without an
    error, so none is written.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    here = patch.object(sys, "dont_write_bytecode", True)
    children = patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    with here, children:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def ended_records(workload: Workload, steps: int) -> list[RolloutRecord]:
    """What a run's folder would have of the rollouts of so many steps, as far as replays look."""
    w = workload
    prompts, responses = Lengths(w.prompt_tokens, w.seed + 1), Lengths(w.response_tokens, w.seed)
    made = []
    for i in range(w.batch * steps):
        rollout = Rollout(i, Prompt(i, (0,) * prompts(i), ""), i, finish=FinishReason.STOP)
        rollout.tokens = array("i", [0] * responses(i))
        made.append(RolloutRecord.of(0, rollout, 0.5))
    return made


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return bytes of the memory that tensors lie in, what several share counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class ManualClock:
    """A clock that stands still until it is told otherwise; for tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the seconds, as last set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds`` (never negative)."""
        if seconds < 0:
            raise ValueError(f"time only moves forward; got {seconds} s")
        self._now_s += seconds


NUMBER = (int, float)


def check_nesting(slices: Iterable[tuple[float, float]]) -> None:
    """Assert that slices [µs] of a track nest or are disjoint, to the nanosecond."""
    around: list[tuple[float, float]] = []
    for start, end in sorted(slices, key=lambda part: (part[0], -part[1])):
        while around and around[-1][1] <= start + 1e-3:
            around.pop()
        assert not around or end <= around[-1][1] + 1e-3, (around[-1], (start, end))
        around.append((start, end))


def check_trace_events(events: Sequence[dict[str, Any]]) -> None:
    """Assert what the Trace Event Format asks for of the phases M, X, C, s, t and f."""
    needed: dict[str, dict[str, Any]] = {
        "M": {"args": dict},
        "X": {"ts": NUMBER, "dur": NUMBER, "cat": str, "args": dict},
        "C": {"ts": NUMBER, "args": dict},
        **{ph: {"ts": NUMBER, "cat": str, "id": str, "args": dict} for ph in "stf"},
    }
    named = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
    tracks: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for event in events:
        for field, kind in {"pid": int, "tid": int, "name": str, **needed[event["ph"]]}.items():
            assert isinstance(event[field], kind), (field, event)
        assert event.get("ts", 0) >= 0, event
        if event["ph"] == "M":
            assert event["name"] in named
            (key,) = event["args"]
            assert (key == "sort_index") == event["name"].endswith("sort_index")
            tracks.setdefault(event["name"], set()).add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert (event["pid"], event["tid"]) in tracks["thread_name"], event
            end = event["ts"] + event["dur"]
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], end))
        elif event["ph"] == "C":
            assert all(isinstance(v, NUMBER) for v in event["args"].values()), event
        else:
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    for own in slices.values():
        check_nesting(own)
    for event in events:  # a process has a name, and a track is of one process
        assert event["pid"] in {pid for pid, _ in tracks["process_name"]}
    assert len({tid for _, tid in tracks["thread_name"]}) == len(tracks["thread_name"])
    for flow in flows.values():
        phases = [event["ph"] for event in flow]
        assert phases == ["s", *["t"] * (len(flow) - 2), "f"]
        assert [e["ts"] for e in flow] == sorted(e["ts"] for e in flow)
        assert flow[-1]["bp"] == "e"
        for event in flow:  # lies in a slice of its track
            own = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in own), event
