"""Rollouts of several turns, and their losses token by token in plain loops."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import left_padded_logprobs
from loss_helpers import naive_gae
from stretto.config import ENVIRONMENT, AlgorithmConfig
from stretto.schedules.rollout import Rollout
from stretto.types import CONTEXT, FORKS, FinishReason, Score, episode_of

SPANS = {0: [(2, 4)], 1: [(3, 5)], 3: [(3, 4), (6, 8)], 5: [(1, 2)], 7: [(0, 1), (3, 6)]}
"""Context of each row of ``learner_helpers.SHAPES``; the second row ends with it, the last begins
with it."""
SAMPLES = {2: 0, 6: 1}
"""Rows that are further samples, and the rows whose episodes they belong to."""
WEIGHTS = {"task": 1.0, ENVIRONMENT: 0.5}


def as_episodes(batch: Sequence[Rollout], *, forks: bool = True) -> list[Rollout]:
    """Make context of some tokens of eight rollouts, forks of two, and reward their turns."""
    rng = np.random.default_rng(7)
    for i, r in enumerate(batch):
        if i in SAMPLES and forks:
            first = batch[SAMPLES[i]]
            r.id, r.prompt = first.id + FORKS, replace(r.prompt, id=first.prompt.id)
            r.scores["task"] = first.scores["task"]
        r.context = [span for span in SPANS.get(i, ()) if span[1] <= len(r)]
        drawn = r.sampled
        logprobs, versions = np.array(r.logprobs), np.array(r.versions)
        logprobs[~drawn], versions[~drawn] = 0.0, CONTEXT
        r.logprobs, r.versions = array("f", logprobs.tolist()), array("i", versions.tolist())
        for source in ("reference", "critic"):
            if source in r.scores:
                r.scores[source] = replace(r.scores[source], values=r.scores[source].values[drawn])
        ends = [t + 1 for t in range(len(r)) if drawn[t] and not drawn[t + 1 : t + 2].any()]
        r.turns, r.turn_rewards = ends, [round(float(x), 2) for x in rng.normal(size=len(ends))]
    for r in batch:
        own = [sum(s.turn_rewards) for s in batch if episode_of(s.id) == episode_of(r.id)]
        total = np.array([sum(own)], np.float32)
        r.scores[ENVIRONMENT] = Score(r.id, ENVIRONMENT, "reward", total)
    return list(batch)


@dataclass
class Token:
    """A token that the policy drew."""

    now: Tensor  # [], with a gradient, as the others that depend on the policy
    entropy: Tensor
    old: float
    behaviour: float
    ref: float = 0.0
    value: float = 0.0
    reward: float = 0.0  # for the turn that it ends
    advantage: Any = 0.0
    returns: float = 0.0
    new_value: Any = 0.0


@dataclass
class Episode:
    group: int
    score: float
    ended: bool = True
    samples: list[list[Token]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of the samples, in the batch

    @property
    def tokens(self) -> list[Token]:
        return [token for sample in self.samples for token in sample]


def episodes_of(
    batch: Sequence[Rollout],
    now: Sequence[Tensor],
    entropy: Sequence[Tensor] | None = None,
    *,
    proximal: bool = False,
    penalty: Callable[[float], float],
) -> list[Episode]:
    """Walk through rollouts token by token; ``now`` [T] of each response counts context, too."""
    found: dict[int, Episode] = {}
    for row, r in enumerate(batch):
        score = sum(float(r.scores[source].values[0]) * w for source, w in WEIGHTS.items())
        e = found.setdefault(episode_of(r.id), Episode(r.prompt.id, score))
        e.ended = e.ended and r.finish is FinishReason.STOP
        sample: list[Token] = []
        for t in range(len(r)):
            if any(start <= t < end for start, end in r.context):
                continue
            k = len(sample)
            of_policy = now[row][t]
            token = Token(
                now=of_policy,
                entropy=torch.zeros(()) if entropy is None else entropy[row][t],
                old=of_policy.item() if proximal else r.logprobs[t],
                behaviour=r.logprobs[t],
            )
            if "reference" in r.scores:
                token.ref = float(r.scores["reference"].values[k])
            if "critic" in r.scores:
                token.value = float(r.scores["critic"].values[k])
            if t + 1 in r.turns:
                token.reward = WEIGHTS[ENVIRONMENT] * r.turn_rewards[r.turns.index(t + 1)]
            sample.append(token)
        e.samples.append(sample)
        e.rows.append(row)
    for e in found.values():
        e.score = e.score if e.ended else penalty(e.score)
    return list(found.values())


def naive_loss(
    a: AlgorithmConfig, episodes: Sequence[Episode], *, beta: float, longest: int
) -> Tensor:
    """The loss of one mini-batch of all episodes, the entropy bonus with it."""
    _advantages(a, episodes, beta)
    if a.name == "online-dpo":
        return _dpo(a, episodes)
    trained = [e for e in episodes if e.tokens]
    if a.name == "best-of-n":
        trained = [
            e for e in trained if e is _best(episodes, e.group, lambda e: _total(a, e, beta))
        ]
    if a.mask_truncated_completions:
        trained = [e for e in trained if e.ended]
    loss = torch.zeros((), dtype=torch.float64)
    for e in trained:
        n, weight = len(e.tokens), _weight_of_token(a, e, trained, longest)
        log_ratio = torch.stack([t.now - t.old for t in e.tokens]).sum()
        behind = sum(t.old - t.behaviour for t in e.tokens)
        if a.name == "proximal-rloo":
            value = e.tokens[0].advantage * _weight(a, behind)
            loss = loss + _clipped(a, torch.exp(log_ratio), value) / len(trained)
        for t in e.tokens:
            value = t.advantage
            if a.correction != "off":
                whole = a.correction_level == "sequence"
                value = value * _weight(a, behind if whole else t.old - t.behaviour)
            of_sequence = a.importance_sampling_level == "sequence"
            ratio = (log_ratio / n if of_sequence else t.now - t.old).exp()
            if a.name != "proximal-rloo":
                loss = loss + weight * _of_token(a, ratio, value, t)
            if a.kl_place == "loss" and beta:
                factor = ratio if a.use_bias_correction_kl else 1.0
                loss = loss + weight * beta * factor * _kl(a.estimator, t.now - t.ref)
            loss = loss - weight * a.entropy_coef * t.entropy
    return loss


def _weight_of_token(
    a: AlgorithmConfig, e: Episode, trained: Sequence[Episode], longest: int
) -> float:
    count = sum(bool(o.tokens) for o in trained)
    denominators = {
        "token_mean": sum(len(o.tokens) for o in trained),
        "sequence_mean": len(e.tokens) * count,
        "sequence_sum": count,
        "fixed_length": longest * count,
    }
    return 1 / denominators[a.averaging]


def naive_value_loss(a: AlgorithmConfig, episodes: Sequence[Episode]) -> Tensor:
    """Of the critic; the advantages have been made."""
    loss = torch.zeros((), dtype=torch.float64)
    for e in episodes:
        for t in e.tokens:
            near = t.value + (t.new_value - t.value).clamp(-a.value_clip, a.value_clip)
            squares = (t.new_value - t.returns) ** 2
            larger = torch.maximum(squares, (near - t.returns) ** 2)
            loss = loss + _weight_of_token(a, e, episodes, 1) * larger / 2
    return loss


def naive_now(model: Any, batch: Sequence[Rollout]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies [T] of each response, of its context too, by a pass for each."""
    logprobs, entropies = [], []
    for r in batch:
        if not len(r):
            logprobs.append(torch.zeros(0))
            entropies.append(torch.zeros(0))
            continue
        logprobs.append(left_padded_logprobs(model, [r])[0])
        ids = torch.tensor([[*r.prompt.tokens, *r.tokens[:-1]]])
        table = torch.log_softmax(model(input_ids=ids).logits[0, -len(r) :], -1)
        entropies.append(-(table.exp() * table).sum(-1))
    return logprobs, entropies


def _kl(kind: str, d: Any) -> Any:
    exp = torch.exp(-d) if isinstance(d, Tensor) else math.exp(-d)
    return {"k1": d, "k2": d * d / 2, "k3": exp - 1 + d}[kind]


def _cost(a: AlgorithmConfig, t: Token, beta: float) -> float:
    in_reward = a.kl_place == "reward" and beta
    return beta * float(_kl(a.estimator, t.behaviour - t.ref)) if in_reward else 0.0


def _total(a: AlgorithmConfig, e: Episode, beta: float) -> float:
    return e.score - sum(_cost(a, t, beta) for t in e.tokens)


def _best(
    episodes: Sequence[Episode], group: int, by: Callable[[Episode], float], sign: int = 1
) -> Episode:
    return max((e for e in episodes if e.group == group), key=lambda e: sign * by(e))


def _advantages(a: AlgorithmConfig, episodes: Sequence[Episode], beta: float) -> None:
    if a.name == "ppo":
        for e in episodes:
            for sample in e.samples:
                rewards = [t.reward - _cost(a, t, beta) for t in sample]
                if sample:
                    rewards[-1] += e.score - sum(t.reward for t in sample)
                found, returns = naive_gae(rewards, [t.value for t in sample], a.gamma, a.lam)
                for t, advantage, to_come in zip(sample, found, returns, strict=True):
                    t.advantage, t.returns = advantage, to_come
        if a.whiten_advantages:
            tokens = [t for e in episodes for t in e.tokens]
            mean = sum(t.advantage for t in tokens) / len(tokens)
            square = sum((t.advantage - mean) ** 2 for t in tokens) / (len(tokens) - 1)
            for t in tokens:
                t.advantage = (t.advantage - mean) / math.sqrt(square + 1e-8)
        return
    totals = [_total(a, e, beta) for e in episodes]
    for e, own in zip(episodes, totals, strict=True):
        same = [x for o, x in zip(episodes, totals, strict=True) if o.group == e.group]
        others = [
            x for o, x in zip(episodes, totals, strict=True) if o.group == e.group and o is not e
        ]
        value = own - sum(others) / len(others)
        if a.name in ("grpo", "cispo", "distill"):
            value = own - sum(same) / len(same)
            over = same if a.scale_rewards == "group" else totals
            if a.scale_rewards != "none":
                value /= _std(over) + 1e-6
        for t in e.tokens:
            t.advantage = _beside_teacher(a, t, value)


def _beside_teacher(a: AlgorithmConfig, t: Token, value: float) -> float:
    return t.ref - t.behaviour + a.reward_coef * value if a.name == "distill" else value


def _std(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def _weight(a: AlgorithmConfig, log_ratio: float) -> float:
    if a.correction == "off":
        return 1.0
    w = math.exp(log_ratio)
    if a.correction == "truncate":
        return min(w, a.correction_cap)
    return w if 1 / a.correction_cap <= w <= a.correction_cap else 0.0


def _clipped(a: AlgorithmConfig, ratio: Tensor, value: float) -> Tensor:
    low, high = 1 - a.clip, 1 + (a.clip_high or a.clip)
    first = ratio.clamp(max=a.dual_clip) if a.dual_clip else ratio
    return -torch.minimum(first * value, ratio.clamp(low, high) * value)


def _of_token(a: AlgorithmConfig, ratio: Tensor, value: float, t: Token) -> Tensor:
    if a.name in ("ppo", "grpo", "distill"):
        return _clipped(a, ratio, value)
    if a.name == "cispo":
        return -ratio.detach().clamp(max=1 + (a.clip_high or a.clip)) * value * t.now
    if a.name == "copg":
        return -value * (t.now - t.old)
    return -(1.0 if a.name == "best-of-n" else value) * t.now


def _dpo(a: AlgorithmConfig, episodes: Sequence[Episode]) -> Tensor:
    losses, sides = [], []
    for group in dict.fromkeys(e.group for e in episodes):
        best = _best(episodes, group, lambda e: e.score)
        worst = _best(episodes, group, lambda e: e.score, -1)
        if best.score == worst.score or not best.tokens or not worst.tokens:
            continue
        ratios = [torch.stack([t.now - t.ref for t in e.tokens]).sum() for e in (best, worst)]
        losses.append(-torch.nn.functional.logsigmoid(a.kl_coef * (ratios[0] - ratios[1])))
        sides += [best, worst]
    entropies = [t.entropy * _weight_of_token(a, e, sides, 1) for e in sides for t in e.tokens]
    return torch.stack(losses).mean() - a.entropy_coef * sum(entropies)
