"""Part 2: one rollout phase, from two prompts to a batch that is ready to be trained on.

Shapes: B responses, T tokens of the longest, N tokens of them all, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.algorithms.advantages import gae
from stretto.algorithms.experience import Scored
from stretto.algorithms.kl import kl_estimate
from stretto.algorithms.registry import prepare
from stretto.algorithms.rewards import make_rewards
from stretto.api import changed
from stretto.assembly.models import (
    NO_OVERRIDES,
    frozen_copy,
    load_actor,
    make_critic,
    prepare_torch,
)
from stretto.assembly.roles import make_engine, model_scorers, reward_scorer
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
SAMPLES, TOKENS = 2, 12
"""Responses to each prompt, and the token limit of each."""
CHUNK = 4
"""Tokens that a response gets in one call of the engine."""
SEED = 135
"""Seed of sampling; with this one the first response ends early, so that masks have something to
mask."""
REWARD = "model:reward"
MOVED = 0.05
"""How far the actor is moved from the reference, as a share of the spread of each weight matrix."""

# PPO's defaults, few and short responses, no rule for cuts; scorers read along.
_CHANGES = {
    "threads": 1,
    "seed": SEED,
    "model": {"dtype": "float32", "device": "cpu"},
    "critic": {"init": "reward"},
    "reward": {"sources": (REWARD,), "missing_eos": "off"},
    "rollout": {
        "batch": len(PROMPTS) * SAMPLES,
        "samples_per_prompt": SAMPLES,
        "max_new_tokens": TOKENS,
    },
    "schedule": {"preset": "oppo"},
}


class Shown(NamedTuple):
    """A tensor, array or list of token ids: its name, and what it says of itself."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: str


class Stage(NamedTuple):
    """A step of the walk: what happens in it, in words, and what comes out of it."""

    text: str
    shown: Sequence[Shown]


def page(folder: Path) -> Iterator[str]:
    """Yield the text of the part; the tiny model is written into ``folder``."""
    yield heading("2. One rollout phase, with shapes")
    yield paragraph(
        "B responses, T tokens of the longest, N tokens of them all, V vocabulary, H hidden size. "
        "Of several rows the first is shown."
    )
    notes: list[str] = []
    for number, stage in enumerate(walk(folder, notes.append), 1):
        yield "\n" + paragraph(f"({number}) {stage.text}")
        rows = [[s.name, f"[{', '.join(map(str, s.shape))}]", *s[2:]] for s in stage.shown]
        yield table(rows, left=4)
    yield from notes
    yield "\n" + onward("ppo", "stretto train tiny --steps 10")


def walk(folder: Path, say: Callable[[str], None] = print) -> Iterator[Stage]:
    """Take one rollout phase, stage by stage, with four models made out of one tiny model.

    Args:
        folder: for the tiny model; need not be there.
        say: told where a scorer cannot read along.
    """
    with quiet_transformers():
        make_tiny(folder)
    config = changed(Config(), _CHANGES, {"model__name": str(folder)})
    prepare_torch(config.seed, config.threads)
    tokenizer = load_tokenizer(folder)
    actor: Any = load_actor(config.model, say)
    reference = frozen_copy(actor)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in actor.parameters():
            if weight.dim() > 1:
                weight.add_(MOVED * weight.std() * torch.randn(weight.shape, generator=random))
    judge = reward_model_from(frozen_copy(reference), seed=1), tokenizer
    slots = config.rollout.batch
    reward = reward_scorer(REWARD, config, tokenizer, say, judge, slots=slots)
    init = config.critic.init
    critic = make_critic(config.model, init, actor, tokenizer, [reward], NO_OVERRIDES, say)
    scorers = [reward, *model_scorers(config, reference, critic, None, say)]
    engine = make_engine(config, actor, tokenizer, slots)
    yield Stage(
        f"Four models of {sum(p.numel() for p in actor.parameters()):,} parameters from scratch. "
        "The reference is the actor as it "
        f"was; the actor has been moved from it by {MOVED:.0%} of each matrix's spread, as "
        "training would. It ends in a head over V tokens; reward model and critic end in one "
        "number, and the critic starts as a copy of the reward model.",
        [
            _shown("actor: embeddings, head", actor.get_output_embeddings().weight),
            _shown("critic: head", scalar_head(critic).weight),
        ],
    )
    prompts = [
        Prompt(i, tuple(tokenizer(text)["input_ids"]), text) for i, text in enumerate(PROMPTS)
    ]
    yield Stage(
        f"Prompts x become tokens: {len(prompts)} of them, each to be answered {SAMPLES} times.",
        [_shown(f"x of prompt {p.id}", p.tokens) for p in prompts],
    )
    asked = [prompt for prompt in prompts for _ in range(SAMPLES)]
    rollouts = [Rollout(i, prompt, prompt.id) for i, prompt in enumerate(asked)]
    yield from _generation_and_scoring(engine, scorers, rollouts)
    batch = train_batch(rollouts)
    yield _columns(batch)
    yield from _learning(config, collate(batch, config.reward.factors))


def _generation_and_scoring(
    engine: Engine, scorers: Sequence[ModelScorer], rollouts: Sequence[Rollout]
) -> Iterator[Stage]:
    """Decode all rollouts, a chunk at a time, while the scorers read along; then ask for scores."""
    responses = [rollout.response() for rollout in rollouts]
    engine.admit(responses)
    for scorer in scorers:
        scorer.admit(responses)
    calls = early = 0
    while chunks := engine.decode(CHUNK).chunks:
        calls += 1
        early = sum(scorer.read_tokens for scorer in scorers)
        for chunk in chunks:
            rollouts[chunk.rollout_id].append(chunk)
        for scorer in scorers:
            scorer.extend(chunks)
        yield _decoded(calls, chunks, engine.prefilled_tokens)
    for scorer in scorers:
        for score in scorer.finish([rollout.id for rollout in rollouts]):
            rollouts[score.rollout_id].scores[score.source] = score
    names = {"reward": "r(x, y)", "logprobs": "log pi_ref(y_t)", "values": "V(s_t)"}
    read = sum(scorer.read_tokens for scorer in scorers)
    yield Stage(
        f"Scoring by three models, of which {early} of the {read} tokens to read were "
        "read before the last chunks came: one reward a response, one log-probability by the "
        "reference and one value by the critic a token.",
        [
            _shown(f"response 0: {names[score.kind]}", score.values)
            for score in rollouts[0].scores.values()
        ],
    )


def _decoded(call: int, chunks: Sequence[Chunk], prefilled: int) -> Stage:
    """Describe a call of the engine; the first and the last response's chunks are shown."""
    tokens, ended = sum(len(c.tokens) for c in chunks), sum(c.finish is not None for c in chunks)
    said = f"{tokens} tokens for {len(chunks)} responses, of which {ended} ended"
    first = (
        f"Generation y_t ~ pi(. | x, y_<t). A call of the engine gives each response up to {CHUNK} "
        f"tokens. The first: {prefilled} prompt tokens read, each prompt once for all its "
        f"responses; then {said}. The scorers get the chunks at once; in a run they read them "
        "while the next are decoded."
    )
    ordered = sorted(chunks, key=lambda chunk: chunk.rollout_id)
    shown = []
    for c in (ordered[0], *ordered[1:][-1:]):
        shown.append(_shown(f"response {c.rollout_id}: y_t", c.tokens))
        shown.append(_shown(f"response {c.rollout_id}: log pi(y_t)", c.logprobs))
    return Stage(first if call == 1 else f"Call {call} of the engine: {said}.", shown)


def _columns(batch: TrainBatch) -> Stage:
    columns: dict[str, Any] = {
        "lengths": batch.lengths,
        "ended": batch.ended,
        "tokens": batch.tokens,
    }
    columns |= {"log pi": batch.logprobs, "versions": batch.versions}
    columns |= {"log pi_ref": batch.per_token["logprobs"], "V": batch.per_token["values"]}
    shown = [_shown(name, column) for name, column in columns.items()]
    shown += [_shown("r(x, y)", column) for column in batch.rewards.values()]
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
        [_shown("mask", data.mask), _shown("log pi", data.logprobs), _shown("V", data.values)],
    )
    kl = torch.where(data.mask, kl_estimate(data.logprobs, data.ref_logprobs, a.estimator), 0.0)
    rewards = make_rewards(data, config.reward, a, a.kl_coef)
    yield Stage(
        f"Rewards: KL_t = log pi - log pi_ref; r_t = -beta KL_t with beta = {a.kl_coef:g}, and at "
        "the last token of a response its score r(x, y) on top.",
        [
            _shown("KL_t", kl),
            _shown("score r(x, y)", rewards.scores),
            _shown("r_t", rewards.tokens),
        ],
    )
    advantages, returns = gae(rewards.tokens, data.values, data.mask, a.gamma, a.lam)
    yield Stage(
        "Generalised advantage estimation: delta_t = r_t + gamma V(s_t+1) - V(s_t); A_t = sum_l "
        f"(gamma lambda)^l delta_t+l with gamma = {a.gamma:g}, lambda = {a.lam:g}; returns "
        "R_t = A_t + V(s_t).",
        [_shown("A_t", advantages), _shown("R_t", returns)],
    )
    ready = prepare(data, a, config.reward, a.kl_coef)
    yield Stage(
        "The training batch: A_t whitened over all tokens (mean 0, variance 1), for the policy "
        "loss -min(rho A, clip(rho, 1 - eps, 1 + eps) A) with rho = pi / pi_old and "
        f"eps = {a.clip:g}; R_t for the value loss.",
        [
            _shown("A_t, whitened", ready.advantages),
            _shown("log pi_old", ready.old_logprobs),
            *(_shown(name, tensor) for name, tensor in ready.tensors.items()),
        ],
    )


def _shown(name: str, value: Any, most: int = 5) -> Shown:
    """Look at a value; of several rows the first is written."""
    if isinstance(value, tuple):
        shape, dtype, first = (len(value),), "int", list(value)
    else:
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        first = (array if array.ndim == 1 else array.reshape(-1, array.shape[-1])[0]).tolist()
    shown = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in first[:most]]
    return Shown(name, shape, dtype, " ".join(shown) + (" ..." if len(first) > most else ""))
