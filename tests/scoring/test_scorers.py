"""Model scorers against plain forward passes of transformers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import (
    critic_of,
    left_padded_logprobs,
    llama,
    make_rollouts,
    naive_values,
    told,
)
from raising import raises
from run_helpers import worker_of
from scorer_helpers import EOS, bert, byte_rollout, plain_score, reward_model
from stretto.config import Config, ModelConfig, recipes
from stretto.errors import ModelError
from stretto.models.heads import critic_from_actor
from stretto.models.lora import add_lora
from stretto.models.tiny import byte_tokenizer
from stretto.runtime.run import Run
from stretto.runtime.run import start as start_run
from stretto.schedules.rollout import Rollout
from stretto.scoring.model_scorers import (
    RewardModelScorer,
    critic_scorer,
    reads_last_token,
    reference_scorer,
)
from stretto.testing.contracts import scores_of
from stretto.types import FinishReason, Prompt

SHAPES = [(3, 7), (40, 5), (5, 1), (2, 9), (8, 6)]


BYTE_ROLLOUTS = [
    byte_rollout(3, "1 + 2 = ?", "3"),
    byte_rollout(1, "a rather long prompt, longer than the others", "yes, it is", stop=False),
    byte_rollout(2, "é", "ü and the rest"),
]


# -- log-probabilities and values ----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_reference_equals_a_plain_forward_pass(temperature: float, budget: int) -> None:
    model = llama()
    rollouts = make_rollouts(model, critic_of(model), SHAPES, first_id=10)
    scores = scores_of(reference_scorer(model, temperature, budget), rollouts)
    with torch.no_grad():
        expected = left_padded_logprobs(model, rollouts, temperature)
    for r, score, want in zip(rollouts, scores, expected, strict=True):
        assert (score.rollout_id, score.source, score.kind) == (r.id, "reference", "logprobs")
        assert score.values.dtype == np.float32
        np.testing.assert_allclose(score.values, want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_critic_gives_the_value_before_each_token(budget: int) -> None:
    actor = llama()
    critic = critic_of(actor)
    rollouts = make_rollouts(actor, critic, SHAPES)
    for r, score in zip(rollouts, scores_of(critic_scorer(critic, budget), rollouts), strict=True):
        with torch.no_grad():
            expected = naive_values(critic, r).numpy()
        assert score.kind == "values"
        np.testing.assert_allclose(score.values, expected, rtol=1e-4, atol=1e-5)


# -- reward models -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_a_reward_model_with_the_actors_tokenizer_reads_its_tokens(budget: int) -> None:
    model, tokenizer = reward_model(), byte_tokenizer()
    scorer = RewardModelScorer("model:x", model, tokenizer, byte_tokenizer(), budget)
    for r, score in zip(BYTE_ROLLOUTS, scores_of(scorer, BYTE_ROLLOUTS), strict=True):
        assert (score.rollout_id, score.source, score.kind) == (r.id, "model:x", "reward")
        expected = plain_score(model, [*r.prompt.tokens, *r.tokens])
        assert score.scalar == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_final_token_that_is_the_padding_token_is_read_too() -> None:
    """Many models pad with <eos>; what a response ended in is no padding for that."""
    model = reward_model()
    model.config.pad_token_id = EOS
    scorer = RewardModelScorer("model:x", model, byte_tokenizer(), byte_tokenizer(), 1000)
    (score,) = scores_of(scorer, BYTE_ROLLOUTS[:1])
    model.config.pad_token_id = 256
    tokens = [*BYTE_ROLLOUTS[0].prompt.tokens, *BYTE_ROLLOUTS[0].tokens]
    assert score.scalar == pytest.approx(plain_score(model, tokens), rel=1e-4)


def other_tokenizer(chat: bool) -> Any:
    """Other ids for the same text: every 'the' is one token, and a <bos> comes first."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["the", "[U]", "[A]"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<sep>"]})
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ '[U]' if m['role'] == 'user' else '[A]' }}"
            "{{ m['content'] + '<sep>\\n' }}{% endfor %}"
        )
    return tokenizer


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_reward_model_with_a_tokenizer_of_its_own_reads_the_text(
    chat: bool, listed: bool
) -> None:
    """Whole turns end as the model's config says, or with the tokenizer's own end token."""
    model, tokenizer = reward_model(vocabulary=263), other_tokenizer(chat)
    if listed:
        model.config.eos_token_id = [tokenizer.convert_tokens_to_ids("<sep>"), 3]
    scorer = RewardModelScorer("model:x", model, tokenizer, byte_tokenizer(), 60, stop=["#"])
    rollouts = [*BYTE_ROLLOUTS, byte_rollout(9, "x", "cut before here# and no more")]
    texts = ["3", "yes, it is", "ü and the rest", "cut before here"]
    closing = "<sep>" if listed else "<sep>\n<eos>"
    for r, text, score in zip(rollouts, texts, scores_of(scorer, rollouts), strict=True):
        # Turns without a template are read with an empty line between.
        read = f"[U]{r.prompt.text}<sep>\n[A]{text}" if chat else f"{r.prompt.text}\n\n{text}"
        if r.finish is FinishReason.STOP:
            read += closing if chat else "<eos>"
        tokens = tokenizer(read)["input_ids"]
        if "the" in read:
            assert 259 in tokens
        assert scorer._tokens(*told([r])) == tokens
        assert score.scalar == pytest.approx(plain_score(model, tokens), rel=1e-4, abs=1e-5)


def test_plain_prompts_have_no_chat_form() -> None:
    model, tokenizer = reward_model(vocabulary=263), other_tokenizer(chat=True)
    rollout = byte_rollout(1, "the question ", "the answer")
    plain = Rollout(1, Prompt(1, rollout.prompt.tokens, "the question "), 1, rollout.tokens)
    plain.finish = FinishReason.STOP
    scorer = RewardModelScorer("model:x", model, tokenizer, byte_tokenizer(), 60)
    expected = plain_score(model, tokenizer("the question the answer<eos>")["input_ids"])
    assert scores_of(scorer, [plain])[0].scalar == pytest.approx(expected, rel=1e-4)


def test_a_template_that_changes_the_prompt_ends_as_others_do() -> None:
    """Once it is answered, the prompt is shown without what came before it."""
    model, tokenizer = reward_model(vocabulary=263), other_tokenizer(chat=True)
    template = tokenizer.chat_template
    tokenizer.chat_template = "{% if messages | length == 1 %}the{% endif %}" + template
    r = byte_rollout(1, "x", "<sep> yes")
    for ends, closing in (([260], "<eos>"), ([tokenizer.convert_tokens_to_ids("<sep>")], "")):
        model.config.eos_token_id = ends
        scorer = RewardModelScorer("model:x", model, tokenizer, byte_tokenizer(), 60)
        read = [tokenizer(part)["input_ids"] for part in ("[U]x<sep>\n[A]", "<sep>")]
        closed = tokenizer("\n<eos>" if closing else "")["input_ids"]
        assert scorer._tokens(*told([r])) == [*read[0], *b"<sep> yes", *read[1], *closed]


def test_given_responses_end_with_the_actors_end_token() -> None:
    """Their finish does not say so, as a stop string in them is no end."""
    model, tokenizer = reward_model(vocabulary=263), other_tokenizer(chat=False)
    rollout = byte_rollout(1, "the ", "end# of it")
    given = Rollout(1, Prompt(1, rollout.prompt.tokens, "the "), 1, rollout.tokens)
    given.finish = FinishReason.LENGTH
    for ends, closing in ((frozenset({EOS}), "<eos>"), (frozenset[int](), "")):
        scorer = RewardModelScorer(
            "model:x", model, tokenizer, byte_tokenizer(), 60, ["#"], given_ends=ends
        )
        assert scorer._tokens(*told([given])) == tokenizer("the end# of it" + closing)["input_ids"]


def test_a_reward_model_that_is_an_encoder_is_run_whole() -> None:
    """It looks both ways, so padding is masked, and it pools its states in its own way."""
    model = bert()
    scorer = RewardModelScorer("model:x", model, byte_tokenizer(), byte_tokenizer(), 1000)
    for r, score in zip(BYTE_ROLLOUTS, scores_of(scorer, BYTE_ROLLOUTS), strict=True):
        expected = plain_score(model, [*r.prompt.tokens, *r.tokens])
        assert score.scalar == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_an_encoder_reads_the_template_as_it_is() -> None:
    model, tokenizer = bert(vocabulary=263), other_tokenizer(chat=True)
    scorer = RewardModelScorer("model:x", model, tokenizer, byte_tokenizer(), 1000)
    for r, text in zip(BYTE_ROLLOUTS, ["3", "yes, it is", "ü and the rest"], strict=True):
        read = f"[U]{r.prompt.text}<sep>\n[A]{text}<sep>\n"
        assert scorer._tokens(*told([r])) == tokenizer(read)["input_ids"]


def test_an_encoder_is_no_critic() -> None:
    assert reads_last_token(reward_model())
    assert reads_last_token(critic_of(llama()))
    assert reads_last_token(critic_of(llama(dtype=torch.bfloat16)))
    assert not reads_last_token(bert())
    with raises(ModelError, "no-values", "BertForSequenceClassification", "critic.init"):
        critic_scorer(bert(), 1000)


# -- in a run ------------------------------------------------------------------------------------


def assemble(stack: ExitStack, tiny_folder: Path, **sections: Any) -> Run:
    """The parts of a run of the tiny model."""
    data = recipes.load("tiny").model_dump() | {"warmup_examples": 0, "steps": 2, "threads": 1}
    sections |= {"model": {"name": str(tiny_folder)}, "task": {"max_prompt_tokens": 64}}
    for name, values in sections.items():
        data[name] = data[name] | values
    return start_run(Config.model_validate(data), stack, lambda _: None)


@pytest.fixture
def reward_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "reward"
    reward_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_critic_from_the_reward_model_starts_with_its_values(
    tiny_folder: Path, reward_folder: Path
) -> None:
    with ExitStack() as stack:
        parts = assemble(
            stack,
            tiny_folder,
            critic={"init": "reward"},
            reward={"sources": (f"model:{reward_folder}",)},
        )
        critic = worker_of(parts, "critic").model
    model = reward_model()
    assert critic is not model
    assert all(p.requires_grad for p in critic.parameters())
    for score, r in zip(
        scores_of(critic_scorer(critic, 1000), BYTE_ROLLOUTS),
        BYTE_ROLLOUTS,
        strict=True,
    ):
        row = [*r.prompt.tokens, *r.tokens]
        first = len(r.prompt.tokens)
        expected = [plain_score(model, row[:stop]) for stop in range(first, len(row))]
        np.testing.assert_allclose(score.values, expected, rtol=1e-4, atol=1e-5)


def test_a_critic_by_name_starts_from_that_model(tiny_folder: Path, reward_folder: Path) -> None:
    with ExitStack() as stack:
        parts = assemble(stack, tiny_folder, critic={"init": str(reward_folder)})
        got = worker_of(parts, "critic").model.state_dict()
    expected = reward_model().state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_critic_from_the_actor_starts_at_zero(tiny_folder: Path) -> None:
    with ExitStack() as stack:
        parts = assemble(stack, tiny_folder)
        critic = worker_of(parts, "critic").model
        own = worker_of(parts, "learner").trained["actor"].model.state_dict()
    for score, r in zip(
        scores_of(critic_scorer(critic, 1000), BYTE_ROLLOUTS),
        BYTE_ROLLOUTS,
        strict=True,
    ):
        assert score.values.tolist() == [0.0] * len(r)
    copied = critic.state_dict()
    assert torch.equal(own["model.norm.weight"], copied["model.norm.weight"])
    assert own["model.norm.weight"].data_ptr() != copied["model.norm.weight"].data_ptr()


def test_a_language_model_is_refused_as_reward_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Whether its config says nothing of labels, or claims that there is one."""
    for labels, code, fact in (
        (2, "several-scores", "num_labels = 2"),
        (1, "missing-weights", "score"),
    ):
        folder = tmp_path / str(labels)
        model = llama(vocabulary=259)
        model.config.num_labels = labels
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        with ExitStack() as stack, raises(ModelError, code, fact):
            assemble(stack, tiny_folder, reward={"sources": (f"model:{folder}",)})


def test_critic_from_actor_shares_nothing() -> None:
    actor = llama()
    critic = critic_from_actor(actor)
    with torch.no_grad():
        for p in critic.parameters():
            p.zero_()
    assert all(p.abs().sum() > 0 for p in actor.parameters())


@pytest.mark.parametrize("kind", ["CAUSAL_LM", "SEQ_CLS"])
def test_fresh_adapters_change_nothing_and_are_float32(kind: Any) -> None:
    actor = llama(dtype=torch.bfloat16)
    model = actor if kind == "CAUSAL_LM" else critic_of(actor)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits.clone()
        wrapped = add_lora(model, ModelConfig(lora_rank=4), kind)
        assert torch.equal(wrapped(input_ids=ids).logits.to(before.dtype), before)
    types = {p.dtype for n, p in wrapped.named_parameters() if "lora_" in n}
    assert types == {torch.float32}
