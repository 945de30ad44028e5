"""Part 2: one rollout phase, from two prompts to a batch that is ready to be trained on.

Shapes: B responses, T tokens of the longest, N tokens of them all, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stretto.algorithms.advantages import gae
from stretto.algorithms.experience import Scored
from stretto.algorithms.kl import kl_estimate
from stretto.algorithms.registry import prepare
from stretto.algorithms.rewards import make_rewards
from stretto.api import changed
from stretto.assembly.engines import make_engine
from stretto.assembly.models import (
    NO_OVERRIDES,
    frozen_copy,
    load_actor,
    make_critic,
    prepare_torch,
)
from stretto.assembly.scorers import model_scorers, reward_scorer
from stretto.config import Config
from stretto.models.heads import reward_model_from, scalar_head
from stretto.models.load import load_tokenizer, quiet_transformers
from stretto.models.tiny import make_tiny
from stretto.rollout.base import Engine
from stretto.schedules.rollout import Rollout, train_batch
from stretto.scoring.base import ModelScorer
from stretto.tour.page import heading, onward, paragraph, table
from stretto.training.collate import collate
from stretto.types import Chunk, Prompt, TrainBatch

PROMPTS = ("Spell backward: tea\n", "Spell backward: stream\n")
SAMPLES = 2
"""Responses to each prompt."""
TOKENS = 12
"""Token limit of a response."""
CHUNK = 4
"""Tokens that a response gets in one call of the engine."""
SEED = 135
"""Seed of sampling; with this one the first response ends early, so that masks have something to
mask."""
REWARD = "model:reward"
MOVED = 0.05
"""How far the actor is moved from the reference, as a share of the spread of each weight matrix."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A tensor, array or list of token ids: its name, and what it says of itself."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: str

    @classmethod
    def of(cls, name: str, value: Any) -> Shown:
        """Look at a value; of several rows the first is written."""
        if isinstance(value, tuple):
            return cls(name, (len(value),), "int", _values(value))
        dtype = str(value.dtype).removeprefix("torch.")
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        first = array if array.ndim == 1 else array.reshape(-1, array.shape[-1])[0]
        return cls(name, tuple(value.shape), dtype, _values(first.tolist()))


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of the walk: what happens in it, in words, and what comes out of it."""

    text: str
    shown: Sequence[Shown]


@dataclass(frozen=True)
class Cast:
    """Everyone who takes part, made on the spot."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    actor: nn.Module
    critic: nn.Module
    engine: Engine
    scorers: Sequence[ModelScorer]


def settings(folder: Path) -> Config:
    """Return the settings of the walk: PPO's defaults, few and short responses, no rule for cuts.

    Scorers read along while responses are decoded.
    """
    changes = {
        "threads": 1,
        "seed": SEED,
        "model": {"name": str(folder), "dtype": "float32", "device": "cpu"},
        "critic": {"init": "reward"},
        "reward": {"sources": (REWARD,), "missing_eos": "off"},
        "rollout": {
            "batch": len(PROMPTS) * SAMPLES,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": TOKENS,
        },
        "schedule": {"preset": "oppo"},
    }
    return changed(Config(), changes)


def make_cast(folder: Path, say: Callable[[str], None] = print) -> Cast:
    """Make the four models out of one tiny model from scratch, and those who work with them.

    Args:
        folder: for the tiny model; need not be there.
        say: told where a scorer cannot read along.
    """
    with quiet_transformers():
        make_tiny(folder)
    config = settings(folder)
    prepare_torch(config.seed, config.threads)
    tokenizer = load_tokenizer(folder)
    actor = load_actor(config.model, say)
    reference = frozen_copy(actor)
    _move(actor)
    judge = reward_model_from(frozen_copy(reference), seed=1), tokenizer
    slots = config.rollout.batch
    reward = reward_scorer(REWARD, config, tokenizer, say, judge, slots=slots)
    init = config.critic.init
    critic = make_critic(config.model, init, actor, tokenizer, [reward], NO_OVERRIDES, say)
    scorers = [reward, *model_scorers(config, reference, critic, None, say)]
    engine = make_engine(config, actor, tokenizer, config.rollout.batch)
    return Cast(config, tokenizer, actor, critic, engine, scorers)


def walk(cast: Cast) -> Iterator[Stage]:
    """Take one rollout phase, stage by stage."""
    yield _models(cast)
    prompts = _prompts(cast.tokenizer)
    yield Stage(
        f"Prompts x become tokens: {len(prompts)} of them, each to be answered {SAMPLES} times.",
        [Shown.of(f"x of prompt {p.id}", p.tokens) for p in prompts],
    )
    asked = [prompt for prompt in prompts for _ in range(SAMPLES)]
    rollouts = [Rollout(i, prompt, prompt.id) for i, prompt in enumerate(asked)]
    early = yield from _generation(cast, rollouts)
    yield _scoring(cast, rollouts, early)
    batch = train_batch(rollouts)
    yield _columns(batch)
    yield from _learning(cast.config, collate(batch, cast.config.reward.factors))


def page(folder: Path) -> Iterator[str]:
    """Yield the text of the part.

    Args:
        folder: where the tiny model may be written.
    """
    yield heading("2. One rollout phase, with shapes")
    yield paragraph(
        "B responses, T tokens of the longest, N tokens of them all, V vocabulary, H hidden size. "
        "Of several rows the first is shown."
    )
    notes: list[str] = []
    for number, stage in enumerate(walk(make_cast(folder, notes.append)), 1):
        yield "\n" + paragraph(f"({number}) {stage.text}")
        rows = [[s.name, _shape(s.shape), s.dtype, s.values] for s in stage.shown]
        yield table(rows, left=4)
    yield from notes
    yield "\n" + onward("ppo", "stretto train tiny --steps 10")


def _move(actor: nn.Module) -> None:
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in actor.parameters():
            if weight.dim() > 1:
                weight.add_(MOVED * weight.std() * torch.randn(weight.shape, generator=random))


def _prompts(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    ids = [tuple(tokenizer(text)["input_ids"]) for text in PROMPTS]
    return [
        Prompt(i, tokens, text) for i, (text, tokens) in enumerate(zip(PROMPTS, ids, strict=True))
    ]


def _models(cast: Cast) -> Stage:
    actor: Any = cast.actor
    parameters = sum(p.numel() for p in actor.parameters())
    return Stage(
        f"Four models of {parameters:,} parameters from scratch. The reference is the actor as it "
        f"was; the actor has been moved from it by {MOVED:.0%} of each matrix's spread, as "
        "training would. It ends in a head over V tokens; reward model and critic end in one "
        "number, and the critic starts as a copy of the reward model.",
        [
            Shown.of("actor: embeddings, head", actor.get_output_embeddings().weight),
            Shown.of("critic: head", scalar_head(cast.critic).weight),
        ],
    )


def _generation(cast: Cast, rollouts: Sequence[Rollout]) -> Generator[Stage, None, int]:
    """Decode all rollouts, a chunk at a time, while the scorers read along.

    Returns:
        The tokens that the scorers had read when the last chunks came.
    """
    engine, scorers = cast.engine, cast.scorers
    responses = [rollout.response() for rollout in rollouts]
    engine.admit(responses)
    for scorer in scorers:
        scorer.admit(responses)
    calls = read = 0
    while chunks := engine.decode(CHUNK).chunks:
        calls += 1
        read = _read_by(cast)
        for chunk in chunks:
            rollouts[chunk.rollout_id].append(chunk)
        for scorer in scorers:
            scorer.extend(chunks)
        yield Stage(_said_of(calls, chunks, engine.prefilled_tokens), _shown_of(chunks))
    return read


def _said_of(call: int, chunks: Sequence[Chunk], prefilled: int) -> str:
    """Describe a call of the engine."""
    tokens, ended = sum(len(c.tokens) for c in chunks), sum(c.finish is not None for c in chunks)
    text = f"{tokens} tokens for {len(chunks)} responses, of which {ended} ended"
    if call > 1:
        return f"Call {call} of the engine: {text}."
    return (
        f"Generation y_t ~ pi(. | x, y_<t). A call of the engine gives each response up to {CHUNK} "
        f"tokens. The first: {prefilled} prompt tokens read, each prompt once for all its "
        f"responses; then {text}. The scorers get the chunks at once; in a run they read them "
        "while the next are decoded."
    )


def _shown_of(chunks: Sequence[Chunk]) -> list[Shown]:
    """Show the chunk of the first response among those that have one, and that of the last."""
    ordered = sorted(chunks, key=lambda chunk: chunk.rollout_id)
    shown = []
    for c in (ordered[0], *ordered[1:][-1:]):
        shown.append(Shown.of(f"response {c.rollout_id}: y_t", c.tokens))
        shown.append(Shown.of(f"response {c.rollout_id}: log pi(y_t)", c.logprobs))
    return shown


def _read_by(cast: Cast) -> int:
    return sum(scorer.read_tokens for scorer in cast.scorers)


def _scoring(cast: Cast, rollouts: Sequence[Rollout], early: int) -> Stage:
    """Ask all scorers for the scores of all rollouts.

    Args:
        early: tokens that had been read when the last chunks came.
    """
    for scorer in cast.scorers:
        for score in scorer.finish([rollout.id for rollout in rollouts]):
            rollouts[score.rollout_id].scores[score.source] = score
    names = {"reward": "r(x, y)", "logprobs": "log pi_ref(y_t)", "values": "V(s_t)"}
    return Stage(
        f"Scoring by three models, of which {early} of the {_read_by(cast)} tokens to read were "
        "read before the last chunks came: one reward a response, one log-probability by the "
        "reference and one value by the critic a token.",
        [
            Shown.of(f"response 0: {names[score.kind]}", score.values)
            for score in rollouts[0].scores.values()
        ],
    )


def _columns(batch: TrainBatch) -> Stage:
    kept = {"lengths": batch.lengths, "ended": batch.ended, "tokens": batch.tokens}
    shown = [Shown.of(name, column) for name, column in kept.items()]
    shown += [Shown.of("log pi", batch.logprobs), Shown.of("versions", batch.versions)]
    shown += [Shown.of("log pi_ref", batch.per_token["logprobs"])]
    shown += [Shown.of("V", batch.per_token["values"])]
    shown += [Shown.of("r(x, y)", column) for column in batch.rewards.values()]
    return Stage(
        f"What the learner is sent: B = {len(batch)} responses in columns, those of one after "
        f"those of another, N = {len(batch.tokens)} tokens; nothing is padded.",
        shown,
    )


def _learning(config: Config, data: Scored) -> Iterator[Stage]:
    """Take scores to advantages, as the learner does, a term at a time."""
    a = config.algorithm
    assert data.ref_logprobs is not None
    assert data.values is not None
    rows, columns = data.mask.shape
    yield Stage(
        f"The learner pads them to [B, T] = [{rows}, {columns}]; the mask says what is a token.",
        [
            Shown.of("mask", data.mask),
            Shown.of("log pi", data.logprobs),
            Shown.of("V", data.values),
        ],
    )
    kl = torch.where(data.mask, kl_estimate(data.logprobs, data.ref_logprobs, a.estimator), 0.0)
    rewards = make_rewards(data, config.reward, a, a.kl_coef)
    yield Stage(
        f"Rewards: KL_t = log pi - log pi_ref; r_t = -beta KL_t with beta = {a.kl_coef:g}, and at "
        "the last token of a response its score r(x, y) on top.",
        [
            Shown.of("KL_t", kl),
            Shown.of("score r(x, y)", rewards.scores),
            Shown.of("r_t", rewards.tokens),
        ],
    )
    advantages, returns = gae(rewards.tokens, data.values, data.mask, a.gamma, a.lam)
    yield Stage(
        "Generalised advantage estimation: delta_t = r_t + gamma V(s_t+1) - V(s_t); A_t = sum_l "
        f"(gamma lambda)^l delta_t+l with gamma = {a.gamma:g}, lambda = {a.lam:g}; returns "
        "R_t = A_t + V(s_t).",
        [Shown.of("A_t", advantages), Shown.of("R_t", returns)],
    )
    ready = prepare(data, a, config.reward, a.kl_coef)
    yield Stage(
        "The training batch: A_t whitened over all tokens (mean 0, variance 1), for the policy "
        "loss -min(rho A, clip(rho, 1 - eps, 1 + eps) A) with rho = pi / pi_old and "
        f"eps = {a.clip:g}; R_t for the value loss.",
        [
            Shown.of("A_t, whitened", ready.advantages),
            Shown.of("log pi_old", ready.old_logprobs),
            *(Shown.of(name, tensor) for name, tensor in ready.tensors.items()),
        ],
    )


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _values(values: Sequence[Any], most: int = 5) -> str:
    shown = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in values[:most]]
    return " ".join(shown) + (" ..." if len(values) > most else "")
