"""Part 2: one rollout phase, from two prompts to a batch that is ready to be trained on.

Shapes: B responses, T tokens of the longest, N tokens of them all, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.tour import heading, onward, paragraph
from stretto.algorithms.advantages import gae
from stretto.algorithms.kl import kl_estimate
from stretto.algorithms.registry import prepare
from stretto.algorithms.rewards import make_rewards
from stretto.api import changed
from stretto.assembly import run_models
from stretto.assembly.roles import RoleFactory
from stretto.config import AlgorithmConfig, Config, RewardConfig
from stretto.models.heads import reward_model_from, scalar_head
from stretto.models.load import load_tokenizer
from stretto.models.resolve import quiet_transformers
from stretto.models.tiny import make_tiny
from stretto.rollout.base import Engine
from stretto.saying import aligned
from stretto.schedules.rollout import Rollout, train_batch
from stretto.scoring.base_scorer import ModelScorer
from stretto.training.collate import collate
from stretto.types import Prompt, TrainBatch

PROMPTS = ("Spell backward: tea\n", "Spell backward: stream\n")
SAMPLES, TOKENS = 2, 12
"""Responses to each prompt, and the token limit of each."""
CHUNK = 4
"""Tokens that a response gets in one call of the engine."""
SEED = 135
"""Seed of sampling; with this one the first response ends early, so that masks mask something."""
REWARD = "model:reward"
MOVED = 0.05
"""How far the actor is moved from the reference, as a share of the spread of each weight matrix."""

# PPO's defaults, few and short responses, no rule for cuts; scorers read along.
_CHANGES: Mapping[str, Any] = {
    "threads": 1,
    "seed": SEED,
    "model": {"dtype": "float32", "device": "cpu"},
    "critic": {"init": "reward"},
    "reward": {"sources": (REWARD,), "missing_eos": "off"},
    "rollout": {"samples_per_prompt": SAMPLES, "max_new_tokens": TOKENS},
    "schedule": {"preset": "oppo"},
}


class WalkStep(NamedTuple):
    """A step of the walk: what happens in it, and the tensors that it makes, by name."""

    text: str
    tensors: Mapping[str, Any]


def page(folder: Path) -> Iterator[str]:
    """Yield the text of the part; the tiny model is written into ``folder``."""
    yield heading("2. One rollout phase, with shapes")
    yield paragraph(
        "B responses, T tokens of the longest, N tokens of them all, V vocabulary, H hidden size. "
        "Of several rows the first is shown."
    )
    notes: list[str] = []
    for number, step in enumerate(walk(folder, notes.append), 1):
        yield "\n" + paragraph(f"({number}) {step.text}")
        yield aligned([_row(name, value) for name, value in step.tensors.items()], left=4)
    yield from notes
    yield onward("ppo", "stretto train tiny --steps 10")


def _row(name: str, value: Any) -> list[str]:
    """Write a tensor, an array or token ids: name, shape, type and first values."""
    array = torch.as_tensor(value).detach()
    dtype = "int" if isinstance(value, tuple) else str(value.dtype).removeprefix("torch.")
    first = array.reshape(-1, array.shape[-1])[0].tolist()
    shown = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in first[:5]]
    dots = ["..."] if len(first) > len(shown) else []
    return [name, str(list(array.shape)), dtype, " ".join(shown + dots)]


def walk(folder: Path, say: Callable[[str], None] = print) -> Iterator[WalkStep]:
    """Take one rollout phase, step by step, with four models made out of one tiny model, which is
    written into ``folder``; ``say`` shows why a scorer cannot read along."""
    with quiet_transformers():
        make_tiny(folder)
    slots = len(PROMPTS) * SAMPLES
    config = changed(Config(), _CHANGES, {"model__name": str(folder), "rollout__batch": slots})
    run_models.prepare_torch(config.seed, config.threads)
    tokenizer, m, given = load_tokenizer(folder), config.model, run_models.NO_OVERRIDES
    actor: Any = run_models.load_actor(m, say)
    reference = run_models.frozen_copy(actor)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (w for w in actor.parameters() if w.dim() > 1):
            weight.add_(MOVED * weight.std() * torch.randn(weight.shape, generator=random))
    judge = reward_model_from(run_models.frozen_copy(reference), seed=1), tokenizer
    factory = RoleFactory(config, say)
    reward = factory.reward_scorer(REWARD, tokenizer, judge, slots=slots)
    critic = run_models.make_critic(m, config.critic.init, actor, tokenizer, [reward], given, say)
    scorers = [reward, *factory.model_scorers(reference, critic, None)]
    engine = factory.make_engine(actor, tokenizer, slots)
    yield WalkStep(
        f"Four models of {sum(p.numel() for p in actor.parameters()):,} parameters from scratch. "
        f"The actor has been moved from the reference by {MOVED:.0%} of each matrix's spread, as "
        "by training. It ends in a head over V tokens; reward model and critic, a copy of it, end "
        "in one number.",
        {
            "actor: embeddings, head": actor.get_output_embeddings().weight,
            "critic: head": scalar_head(critic).weight,
        },
    )
    ids = [tuple(tokenizer(text)["input_ids"]) for text in PROMPTS]
    prompts = [Prompt(i, ids[i], text) for i, text in enumerate(PROMPTS)]
    yield WalkStep(
        f"Prompts x become tokens: {len(prompts)} of them, each to be answered {SAMPLES} times.",
        {f"x of prompt {p.id}": p.tokens for p in prompts},
    )
    asked = [prompt for prompt in prompts for _ in range(SAMPLES)]
    rollouts = [Rollout(i, prompt, prompt.id) for i, prompt in enumerate(asked)]
    yield from _generation_and_scoring(engine, scorers, rollouts)
    yield from _learning(config.algorithm, config.reward, train_batch(rollouts))


def _generation_and_scoring(
    engine: Engine, scorers: Sequence[ModelScorer], rollouts: Sequence[Rollout]
) -> Iterator[WalkStep]:
    """Decode all rollouts, a chunk at a time, while the scorers read along; then ask for scores."""
    responses = [rollout.response() for rollout in rollouts]
    engine.admit(responses)
    for scorer in scorers:
        scorer.admit(responses)
    calls = early = 0
    while chunks := sorted(engine.decode(CHUNK).chunks, key=lambda chunk: chunk.rollout_id):
        calls += 1
        early = sum(scorer.read_tokens for scorer in scorers)
        for chunk in chunks:
            rollouts[chunk.rollout_id].append(chunk)
        for scorer in scorers:
            scorer.extend(chunks)
        tokens, ended = sum(len(c.tokens) for c in chunks), [c for c in chunks if c.finish]
        first = (
            "Generation y_t ~ pi(. | x, y_<t). A call of the engine gives each response up to "
            f"{CHUNK} tokens, which the scorers read at once. {engine.prefilled_tokens} prompt "
            "tokens are read, each prompt once for all its responses. "
        )
        shown: dict[str, Any] = {}
        for c in (chunks[0], *chunks[1:][-1:]):
            shown[f"response {c.rollout_id}: y_t"] = c.tokens
            shown[f"response {c.rollout_id}: log pi(y_t)"] = c.logprobs
        made = f"{tokens} tokens for {len(chunks)} responses, of which {len(ended)} ended."
        yield WalkStep(f"{first if calls == 1 else ''}Call {calls}: {made}", shown)
    for score in (s for scorer in scorers for s in scorer.finish(range(len(rollouts)))):
        rollouts[score.rollout_id].scores[score.source] = score
    names = {"reward": "r(x, y)", "logprobs": "log pi_ref(y_t)", "values": "V(s_t)"}
    yield WalkStep(
        f"Three models score: {early} of the {sum(s.read_tokens for s in scorers)} tokens to read "
        "were read before the last chunks came. One reward a response; a log-probability and a "
        "value a token.",
        {f"response 0: {names[s.kind]}": s.values for s in rollouts[0].scores.values()},
    )


def _learning(a: AlgorithmConfig, reward: RewardConfig, batch: TrainBatch) -> Iterator[WalkStep]:
    """Take scores to advantages, as the learner does, a term at a time."""
    columns: dict[str, Any] = {"lengths": batch.lengths, "ended": batch.ended}
    columns |= {"tokens": batch.tokens, "log pi": batch.logprobs, "versions": batch.versions}
    columns |= {"log pi_ref": batch.per_token["logprobs"], "V": batch.per_token["values"]}
    yield WalkStep(
        f"The learner is sent: B = {len(batch)} responses in columns, one after the other, "
        f"N = {len(batch.tokens)} tokens; nothing is padded.",
        {**columns, "r(x, y)": batch.rewards[REWARD]},
    )
    data = collate(batch, reward.factors)
    assert data.ref_logprobs is not None
    assert data.values is not None
    yield WalkStep(
        f"The learner pads them to [B, T] = {list(data.mask.shape)}; the mask says what is a "
        "token.",
        {"mask": data.mask, "log pi": data.logprobs, "V": data.values},
    )
    kl = torch.where(data.mask, kl_estimate(data.logprobs, data.ref_logprobs, a.estimator), 0.0)
    rewards = make_rewards(data, reward, a, a.kl_coef)
    yield WalkStep(
        f"Rewards: KL_t = log pi - log pi_ref; r_t = -beta KL_t with beta = {a.kl_coef:g}, and at "
        "the last token of a response its score r(x, y) on top.",
        {"KL_t": kl, "score r(x, y)": rewards.scores, "r_t": rewards.tokens},
    )
    advantages, returns = gae(rewards.tokens, data.values, data.mask, a.gamma, a.lam)
    yield WalkStep(
        "Generalised advantage estimation: delta_t = r_t + gamma V(s_t+1) - V(s_t); A_t = sum_l "
        f"(gamma lambda)^l delta_t+l with gamma = {a.gamma:g}, lambda = {a.lam:g}; returns "
        "R_t = A_t + V(s_t).",
        {"A_t": advantages, "R_t": returns},
    )
    ready = prepare(data, a, reward, a.kl_coef)
    yield WalkStep(
        "The training batch: A_t whitened over all tokens (mean 0, variance 1), for the policy "
        "loss -min(rho A, clip(rho, 1 - eps, 1 + eps) A) with rho = pi / pi_old and "
        f"eps = {a.clip:g}; R_t for the value loss.",
        {"A_t, whitened": ready.advantages, "log pi_old": ready.old_logprobs, **ready.tensors},
    )
