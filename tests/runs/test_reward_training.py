"""Reward models: pairs, the loss, what is saved, and that scorers read what was trained on."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from helpers import critic_of, llama, told
from learner_helpers import assert_close
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from run_helpers import lines, supervised, write_rows
from scorer_helpers import plain_score
from stretto.cli import evaluate
from stretto.cli.main import main
from stretto.config import PairsConfig, RewardModelConfig, TaskConfig, recipes
from stretto.errors import ModelError, TaskError
from stretto.models.heads import reward_model_from, scalar_head, set_padding
from stretto.models.load import load_sequence_classifier, load_tokenizer
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.runs.finetuning import train_reward_model
from stretto.schedules.rollout import Rollout
from stretto.scoring.model_scorers import RewardModelScorer
from stretto.tasks.prompts import render
from stretto.tasks.responses import PromptLayout
from stretto.tasks.supervised_rows import Pair, PairTokens, read_pairs, tokens_of
from stretto.tasks.task import TaskRow
from stretto.testing import make_chunk
from stretto.training.supervised import BradleyTerry, Preferences, hold_out, train
from stretto.types import FinishReason, Message

EOS = 258  # of the byte tokenizer
HH = Path(__file__).parents[3] / "shared" / "data" / "preferences_hh.jsonl"
CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def says(role: str, content: str) -> Message:
    return Message(role=role, content=content)


ASKED = says("user", "2+2?")


def read_one(folder: Path, row: Mapping[str, Any], **data: Any) -> Pair:
    ((pair,), _) = read_pairs(PairsConfig(name=write_rows(folder, [row]), **data))
    return pair


# -- what a pair is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", "4", "5"),
        (
            {"prompt": [ASKED], "chosen": "4", "rejected": "5"},
            (ASKED,),
            "4",
            "5",
        ),
        (  # a transcript: up to the last turn mark in common, not to the last common letter
            {
                "chosen": "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: more\n\nAssistant: Sure",
                "rejected": "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: more\n\nAssistant: Sorry",
            },
            "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: more\n\nAssistant:",
            " Sure",
            " Sorry",
        ),
        (
            {
                "chosen": [ASKED, says("assistant", "4")],
                "rejected": [ASKED, says("assistant", "5")],
            },
            (ASKED,),
            "4",
            "5",
        ),
        (  # whole conversations bring their prompt along
            {
                "prompt": "2+2?",
                "chosen": [ASKED, says("assistant", "4")],
                "rejected": [ASKED, says("assistant", "5")],
            },
            (ASKED,),
            "4",
            "5",
        ),
        (
            {
                "prompt": "2+2?",
                "chosen": [says("assistant", "4")],
                "rejected": [says("assistant", "5")],
            },
            "2+2?",
            "4",
            "5",
        ),
    ],
)
def test_prompt_and_responses_of_a_row(
    tmp_path: Path, row: dict[str, Any], prompt: Any, chosen: str, rejected: str
) -> None:
    pair = read_one(tmp_path, row)
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, chosen, rejected)
    assert pair.transcript == ("prompt" not in row and isinstance(prompt, str))
    assert pair.data == row


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("What is it? It is four", "What is it? It is five", "What is it? It is"),
        ("Is it? no", "Is it? no way", "Is it?"),
        ("a\n\nAssistant: b c", "a\n\nAssistant: b d", "a\n\nAssistant:"),
    ],
)
def test_texts_that_begin_alike_are_asked_for(
    tmp_path: Path, chosen: str, rejected: str, prompt: str
) -> None:
    """Up to the last turn mark in common, or without one to the last white space."""
    row = {"chosen": chosen, "rejected": rejected}
    pair = read_one(tmp_path, row, prompt_column="")
    assert (pair.prompt, pair.transcript) == (prompt, True)
    assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (chosen, rejected)


@pytest.mark.parametrize("on_error", ["stop", "drop"])
def test_a_prompt_column_that_is_not_there_is_never_made_up(tmp_path: Path, on_error: str) -> None:
    row = {
        "instruction": "What is 2+2?",
        "chosen": "The answer is 4",
        "rejected": "The answer is 5",
    }
    named = ("data.prompt_column = 'question'", "'chosen', 'instruction', 'rejected'")
    with raises(TaskError, "missing-column", *named):
        read_one(tmp_path, row, prompt_column="question", on_error=on_error)
    transcript = {"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}
    with raises(TaskError, "missing-column", "set it to ''"):
        read_one(tmp_path, transcript, prompt_column="question", on_error=on_error)
    by_default = ("'chosen', 'instruction'", "data.prompt_column", "set it to ''")
    with raises(TaskError, "no-shared-turn", *by_default):
        read_one(tmp_path, row, on_error=on_error)
    assert read_one(tmp_path, row, prompt_column="instruction").prompt == "What is 2+2?"


def test_columns_go_by_the_names_given(tmp_path: Path) -> None:
    row = {"q": "2+2=", "prompt": "unused", "good": "4", "bad": "5"}
    columns = {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"}
    assert read_one(tmp_path, row, **columns).prompt == "2+2="
    row = {"prompt": "unused", "chosen": "a b", "rejected": "a c"}
    assert read_one(tmp_path, row, prompt_column="").prompt == "a"


@pytest.mark.parametrize(
    ("row", "code", "facts"),
    [
        ({"chosen": "a", "worse": "b"}, "missing-column", ["'rejected'", "'chosen', 'worse'"]),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "equal-sides", ["row 0"]),
        ({"prompt": "q", "chosen": " ", "rejected": "a"}, "empty-response", ["row 0", "chosen"]),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "no-side", ["row 0", "rejected"]),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "no-side", ["row 0", "None"]),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt-not-text", ["row 0"]),
        ({"chosen": "What?", "rejected": "Why?"}, "no-shared-prompt", []),
        (
            {"chosen": [says("assistant", "4")], "rejected": [says("assistant", "5")]},
            "no-shared-prompt",
            [],
        ),
        (
            {"chosen": [ASKED, says("assistant", "4")], "rejected": [ASKED]},
            "sides-differ-in-turns",
            ["after 1 messages", "assistant and nothing"],
        ),
        ({"chosen": [ASKED, says("assistant", "4")], "rejected": "5"}, "mixed-sides", []),
    ],
)
def test_bad_pairs_are_refused_with_their_place(
    tmp_path: Path, row: dict[str, Any], code: str, facts: list[str]
) -> None:
    with raises(TaskError, code, *facts):
        read_one(tmp_path, row)


def test_texts_share_a_prompt_to_the_last_word_that_they_share(tmp_path: Path) -> None:
    row = {"chosen": "The sky is blue.", "rejected": "The sky is black."}
    pair = read_one(tmp_path, row)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("The sky is", " blue.", " black.")


def test_sides_may_be_single_messages_and_sharegpts(tmp_path: Path) -> None:
    row = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    pair = read_one(tmp_path, row, prompt_column="conversations")
    assert pair.prompt == ({"role": "user", "content": "q"},)
    assert (pair.chosen, pair.rejected) == ("a", "b")


def test_a_rows_tools_and_system_message_are_in_a_pairs_prompt(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "tools": [{"name": "f"}], "system": "s"}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + CHATML
    layout = PromptLayout(tokenizer, frozenset({EOS}), PairsConfig())
    tokens = tokens_of(read_one(tmp_path, row), layout)
    shown = "".join("$" if token == EOS else chr(token) for token in tokens.prompt)
    assert shown == '[{"name": "f"}]<system>s$\n<user>q$\n<assistant>'
    assert (tokens.chosen, tokens.rejected) == ((ord("a"), EOS), (ord("b"), EOS))


def test_calls_and_reasoning_of_a_side_reach_the_template(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    sides = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    sides.append({"role": "assistant", "content": "b", "reasoning_content": "so"})
    pair = read_one(tmp_path, {"prompt": "q", "chosen": sides[0], "rejected": sides[1]})
    tokenizer = byte_tokenizer()
    plain = PromptLayout(tokenizer, frozenset({EOS}), PairsConfig())
    with raises(TaskError, "no-chat-template", "tool_calls"):
        tokens_of(pair, plain)
    extra = "(m.reasoning_content or '') + (m.tool_calls | tojson if m.tool_calls else '') + m['c"
    tokenizer.chat_template = CHATML.replace("m['c", extra)
    tokens = tokens_of(pair, PromptLayout(tokenizer, frozenset({EOS}), PairsConfig()))
    written = '[{"function": {"name": "f", "arguments": {"a": 1}}}]'
    assert tokens.chosen == (*written.encode(), EOS)
    assert tokens.rejected == (*b"sob", EOS)


def test_texts_with_nothing_in_common_have_no_prompt(tmp_path: Path) -> None:
    with raises(TaskError, "no-shared-prompt"):
        read_one(tmp_path, {"chosen": "What?", "rejected": "Why?"}, prompt_column="")


def test_bad_pairs_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": c, "rejected": "b"} for c in "abc"]
    pairs, reasons = read_pairs(PairsConfig(name=write_rows(tmp_path, rows), on_error="drop"))
    assert [p.index for p in pairs] == [0, 2]
    assert "row 1: chosen and rejected are equal" in reasons[0]


# -- tokens: what is trained on is what scorers read -----------------------------------------------


def rewards_of(model: Any, pair: PairTokens) -> tuple[float, float]:
    """The rewards of both sides as the training objective measures them."""
    measured = BradleyTerry(model, 1024, 0.0).measure([pair])
    half = measured.margin / 2
    return measured.reward_mean + half, measured.reward_mean - half


def rollout_of(prompt: Any, response: Sequence[int]) -> Rollout:
    rollout = Rollout(0, prompt, 0, tokens=array("i", response))
    rollout.finish = FinishReason.STOP
    return rollout


@pytest.mark.parametrize(
    ("template", "prompt"), [(None, "2+2="), (CHATML, "2+2="), (CHATML, (ASKED,))]
)
def test_scorers_read_and_score_the_very_tokens_that_were_trained_on(
    template: str | None, prompt: str | tuple[Message, ...]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    pair = tokens_of(
        Pair(prompt, "four", "5"), PromptLayout(tokenizer, frozenset({EOS}), PairsConfig())
    )
    model = critic_of(llama(vocabulary=259))
    scorer = RewardModelScorer("model:x", model, tokenizer, tokenizer, 1024)
    # As a run makes prompts, and as an engine leaves a response that ended by itself.
    asked = render(TaskRow(prompt), TaskConfig(), tokenizer)
    sampled = [*tokenizer("four")["input_ids"], EOS]
    rollout = rollout_of(asked, sampled)
    scorer.admit(told([rollout]))
    (score,) = scorer.finish([0])
    chosen, rejected = rewards_of(model, pair)
    assert score.scalar == pytest.approx(chosen, rel=rounding(GRADIENT_TERMS))
    assert score.scalar == pytest.approx(plain_score(model, [*pair.prompt, *pair.chosen]), rel=1e-4)
    assert score.scalar != pytest.approx(rejected, rel=1e-3)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("template", "prompt"), [(None, "2+2="), (None, "what t"), (CHATML, "2+2="), (CHATML, (ASKED,))]
)
def test_so_they_do_with_another_tokenizer_than_the_actors(
    template: str | None, prompt: str | tuple[Message, ...], streamed: bool
) -> None:
    """'the' is one token here, but across the end of a prompt; the actor's template is another."""
    tokenizer, actor = byte_tokenizer(), byte_tokenizer()
    tokenizer.add_tokens(["the"])
    tokenizer.chat_template = template
    actor.chat_template = template and "[{{ messages[0]['content'] }}]"
    answers = ("he four of the rest", "5")
    layout = PromptLayout(tokenizer, frozenset({EOS}), PairsConfig())
    pair = tokens_of(Pair(prompt, *answers), layout)
    model = critic_of(llama(vocabulary=260))
    scorer = RewardModelScorer("model:x", model, tokenizer, actor, 1024, slots=2 * streamed)
    asked = render(TaskRow(prompt), TaskConfig(), actor)
    made = [rollout_of(asked, [*actor(text)["input_ids"], EOS]) for text in answers]
    made[1].id = 1
    cut_off = rollout_of(asked, actor("he four")["input_ids"])
    cut_off.finish = FinishReason.LENGTH
    cut_off.id = 2
    assert pair.chosen[-1] == EOS != pair.chosen[-2]
    assert tokenizer.convert_tokens_to_ids("the") in pair.chosen
    scorer.admit(told([Rollout(r.id, r.prompt, 0) for r in made] if streamed else made))
    for r in made if streamed else ():
        for start in range(0, len(r), 4):
            part = tuple(r.tokens[start : start + 4])
            finish = r.finish if start + 4 >= len(r) else None
            scorer.extend([make_chunk(r.id, start, part, (0.0,) * len(part), 0, finish)])
    sides = (*pair.prompt, *pair.chosen), (*pair.prompt, *pair.rejected)
    read = zip(scorer.finish([0, 1]), rewards_of(model, pair), sides, strict=True)
    for score, trained_on, tokens in read:
        assert score.scalar == pytest.approx(trained_on, rel=1e-4)
        assert score.scalar == pytest.approx(plain_score(model, tokens), rel=1e-4)
    scorer.admit(told([cut_off]))  # its end is not made up
    (score,) = scorer.finish([2])
    tokens = (*pair.prompt, *tokenizer("he four")["input_ids"])
    assert score.scalar == pytest.approx(plain_score(model, tokens), rel=1e-4)


def test_a_transcript_is_read_as_it_stands(tmp_path: Path) -> None:
    """Its turns are in the text already; with chat = on it becomes a message like any text."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    rows = {"chosen": "\n\nHuman: hi\n\nAssistant: a", "rejected": "\n\nHuman: hi\n\nAssistant: b"}
    prompt = "\n\nHuman: hi\n\nAssistant:"
    for chat, expected in (("auto", prompt), ("on", f"<user>{prompt}<eos>\n<assistant>")):
        config = PairsConfig(chat=chat)
        tokens = tokens_of(
            read_one(tmp_path, rows), PromptLayout(tokenizer, frozenset({EOS}), config)
        )
        assert tokenizer.decode(tokens.prompt) == expected
        assert tokens.chosen == (ord(" "), ord("a"), EOS)


def test_sides_that_become_the_same_tokens_are_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML.replace("m['content']", "m['content'].strip()")
    layout = PromptLayout(tokenizer, frozenset({EOS}), PairsConfig())
    with raises(TaskError, "equal-sides", "row 7"):
        tokens_of(Pair("q", "yes", "yes ", index=7), layout)


# -- the loss ------------------------------------------------------------------------------------


def random_pairs(shapes: Sequence[tuple[int, int, int]]) -> list[PairTokens]:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 61, (n,), generator=generator).tolist())

    return [PairTokens(draw(a), draw(b), draw(c)) for a, b, c in shapes]


PAIRS = random_pairs([(3, 7, 2), (20, 5, 9), (5, 1, 4), (2, 9, 9), (8, 6, 1)])


def naive_rewards(model: Any, pairs: Sequence[PairTokens]) -> tuple[Tensor, Tensor]:
    """By the classifier's own forward pass, one sequence at a time."""

    def reward(response: Sequence[int], p: PairTokens) -> Tensor:
        return model(torch.tensor([[*p.prompt, *response]])).logits[0, 0]

    return (
        torch.stack([reward(p.chosen, p) for p in pairs]),
        torch.stack([reward(p.rejected, p) for p in pairs]),
    )


@pytest.mark.parametrize("budget", [1, 50, 100_000])
@pytest.mark.parametrize("center", [0.0, 0.3])
def test_loss_and_gradients_are_the_naive_ones_however_split(budget: int, center: float) -> None:
    model = critic_of(llama())
    chosen, rejected = naive_rewards(model, PAIRS)
    terms = -torch.log(torch.sigmoid(chosen - rejected)) + center * (chosen + rejected) ** 2
    terms.mean().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    stats = BradleyTerry(model, budget, center).learn(PAIRS)
    assert_close({n: p.grad for n, p in model.named_parameters()}, want, 1e-4)
    assert stats["train/loss"] == pytest.approx(
        -F.logsigmoid(chosen - rejected).mean().item(), 1e-5
    )
    assert stats["train/accuracy"] == (chosen > rejected).double().mean().item()
    assert stats["train/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4)
    assert stats["data/tokens"] == sum(
        2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in PAIRS
    )


def test_figures_by_hand() -> None:
    """Margins 2, 0 and -1: one right, one tie, one wrong."""
    p = Preferences.of(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([-1.0, 3.0, 1.0]))
    assert p.accuracy == pytest.approx(0.5)
    assert p.margin == pytest.approx(1 / 3)
    assert p.reward_mean == pytest.approx(7 / 6)
    assert p.reward_std == pytest.approx((21 / 6 - (7 / 6) ** 2) ** 0.5)
    assert p.loss == pytest.approx((0.126928 + 0.693147 + 1.313262) / 3, abs=1e-5)
    assert p.pairs == 3


def test_a_fresh_head_on_the_models_own_backbone() -> None:
    lm = llama(vocabulary=61)
    weights = {n: p.clone() for n, p in lm.model.named_parameters()}
    model: Any = reward_model_from(lm, seed=5)
    assert all(torch.equal(p, weights[n]) for n, p in model.model.named_parameters())
    head = scalar_head(model).weight
    expected = torch.randn((1, 16), generator=torch.Generator().manual_seed(5)) / 17**0.5
    assert isinstance(head, Tensor)
    assert torch.equal(head, expected)
    assert model.config.num_labels == 1


def test_a_model_of_its_own_code_without_a_classifier_is_refused() -> None:
    from transformers import LlamaConfig

    class Own(LlamaConfig):
        model_type = "own"

    lm = llama(vocabulary=61)
    lm.config = Own(**lm.config.to_diff_dict())
    with raises(ModelError, "no-classifier", "LlamaForCausalLM"):
        reward_model_from(lm, seed=0)


def test_what_pads_never_ends_a_response() -> None:
    model = critic_of(llama(vocabulary=259))
    tokenizer = byte_tokenizer()
    assert set_padding(model, tokenizer, {EOS})
    assert (model.config.pad_token_id, tokenizer.pad_token) == (256, "<pad>")
    tokenizer.pad_token = "<eos>"
    assert set_padding(model, tokenizer, {EOS})
    assert (model.config.pad_token_id, tokenizer.pad_token) == (256, "<pad>")
    assert not set_padding(model, byte_tokenizer(), {256, EOS})  # the rest begins texts
    assert model.config.pad_token_id is None


# -- whole runs ----------------------------------------------------------------------------------


def digits_win(count: int) -> list[dict[str, str]]:
    """Of two equally long responses the one made of digits is preferred."""
    rows = []
    for n in range(count):
        digits = f"{(n * 37) % 1000:03d}"
        letters = "".join(chr(ord("a") + (n * k) % 26) for k in (3, 5, 7))
        rows.append({"prompt": f"q{n % (count // 2)}:", "chosen": digits, "rejected": letters})
    return rows


@pytest.mark.parametrize("lora", [0, 4])
def test_a_run_learns_and_what_it_saves_scores_alike_everywhere(
    tiny_folder: Path, tmp_path: Path, lora: int
) -> None:
    sections: dict[str, Any] = {"model": {"lora_rank": lora}, "data": {"held_out": 0.2}}
    sections["training"] = {"lr": 3e-3, "epochs": 4}
    name = write_rows(tmp_path, digits_win(60))
    config = supervised(RewardModelConfig, tiny_folder, name, **sections)
    run = RunDirectory.create(tmp_path, "rm", config)
    result = train_reward_model(config, run_dir=run, progress=Progress())
    assert result.held_out is not None
    assert result.held_out.accuracy == 1.0
    assert result.held_out.margin > 1.0
    assert result.held_out.pairs == 12
    rows = lines(run.metrics_file)
    assert [r["step"] for r in rows] == list(range(25))
    assert rows[0]["held_out/loss"] == pytest.approx(0.69, abs=0.4)
    assert rows[-1]["held_out/margin"] == result.held_out.margin

    # Our own loading and scoring, and transformers' with its padding.
    tokenizer = load_tokenizer(run.model)
    layout = PromptLayout(tokenizer, frozenset({EOS}), config.data)
    pairs = [tokens_of(p, layout) for p in read_pairs(config.data)[0]]
    held = hold_out(pairs, lambda p: p.prompt, 0.2, 0)[1]
    ours = load_sequence_classifier(run.model, torch.float32, torch.device("cpu"))
    measured = BradleyTerry(ours, 100, 0.0).measure(held)
    assert measured.margin == pytest.approx(result.held_out.margin, rel=1e-4)
    assert measured.reward_mean == pytest.approx(result.held_out.reward_mean, abs=1e-4)
    theirs = AutoModelForSequenceClassification.from_pretrained(run.model)
    rows_ = [[*p.prompt, *p.chosen] for p in held] + [[*held[0].prompt, EOS]]
    padded = AutoTokenizer.from_pretrained(run.model).pad({"input_ids": rows_}, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**padded).logits[:, 0]
        alone = torch.stack([theirs(torch.tensor([row])).logits[0, 0] for row in rows_])
    assert (padded["input_ids"] == theirs.config.pad_token_id).any()
    assert torch.allclose(logits, alone, atol=1e-5)
    scorer = RewardModelScorer("model:x", ours, tokenizer, tokenizer, 100)
    rollouts = []
    for n, p in enumerate(held):
        prompt = render(TaskRow(bytes(p.prompt).decode()), TaskConfig(), tokenizer)
        rollouts.append(rollout_of(prompt, p.chosen))
        rollouts[-1].id = n
    scorer.admit(told(rollouts))
    scores = torch.tensor([s.scalar for s in scorer.finish(range(len(held)))])
    assert torch.allclose(scores, alone[:-1], atol=1e-5)


def test_rewards_are_centred_by_the_coefficient() -> None:
    """The loss on differences leaves rewards where they are; the second term brings them to 0."""
    means = {}
    for coefficient in (0.0, 0.5):
        model = critic_of(llama(), seed=2)
        settings = {"training": {"lr": 3e-3}, "steps": 60, "batch": 5, "center_coef": coefficient}
        config = RewardModelConfig.model_validate(settings)
        objective = BradleyTerry(model, 1000, 0.0)
        train(model, PAIRS, BradleyTerry.of(model, config).learn, config, lambda step, stats: None)
        after = objective.measure(PAIRS)
        assert after.accuracy == 1.0
        means[coefficient] = after.reward_mean
    assert abs(means[0.0]) > 0.3
    assert abs(means[0.5]) < 0.05


def test_the_command_line(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [*digits_win(20), {"prompt": "q", "chosen": "same", "rejected": "same"}]
    common = ("--data.name", write_rows(tmp_path, rows), "--model.name", str(tiny_folder))
    assert main(["reward", *common]) == 2
    assert "row 20: chosen and rejected are equal" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["reward", *common, "--data.on-error", "drop", "--steps", "1"]) == 0
    text = capsys.readouterr().out
    assert "a reward model from" in text
    assert "1 of 21 rows cannot be used and are left out" in text
    assert "training on 18 rows, 1 updates; 2 rows are held out" in text
    assert "held out (2 pairs): accuracy" in text
    assert recipes.load("runs/reward-001", RewardModelConfig).steps == 1
    assert main(["reward", *common, "--data.on-error", "drop", "--dry-run"]) == 0
    assert "pairs, at most" in capsys.readouterr().out
    monkeypatch.setattr(evaluate, "run_label", lambda arguments: 70 + len(arguments))
    assert main(["reward", "label", "x"]) == 71


@pytest.mark.slow
@pytest.mark.skipif(not HH.is_file(), reason=f"{HH} is not there")
def test_real_preferences_train_the_real_model(tmp_path: Path) -> None:
    config = RewardModelConfig.model_validate(
        {
            "steps": 4,
            "batch": 4,
            "data": {"name": str(HH), "on_error": "drop", "size": 60, "held_out": 0.2},
            "training": {"lr": 3e-5},
        }
    )
    run = RunDirectory.create(tmp_path, "hh", config)
    result = train_reward_model(config, run_dir=run, progress=Progress())
    assert result.held_out is not None
    assert result.held_out.pairs == 12
    assert result.held_out.loss < 0.9
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(run.model)
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
