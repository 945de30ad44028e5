"""Supervised fine-tuning: what is learned of a row, the loss, packing, and whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import stretto
from helpers import llama
from learner_helpers import assert_close
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from run_helpers import lines, supervised, write_rows
from stretto.cli.main import main
from stretto.config import DemonstrationsConfig, SftConfig, recipes
from stretto.errors import ConfigError, LearnerError, ModelError, TaskError
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.runs.finetuning import sft
from stretto.tasks.responses import Example, PromptLayout
from stretto.tasks.supervised_rows import example_of, read_demonstrations
from stretto.training.supervised import CrossEntropy, batches, hold_out, pack, train, updates
from stretto.training.trained import TrainedModel

EOS = 258  # of the byte tokenizer

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}<eos>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def examples_of(
    folder: Path, rows: Sequence[Mapping[str, Any]], template: str | None = None, **data: Any
) -> list[Example]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    config = DemonstrationsConfig(name=write_rows(folder, rows), **data)
    layout = PromptLayout(tokenizer, frozenset({EOS}), config)
    return [example_of(row, layout) for row in read_demonstrations(config)[0]]


def parts(example: Example) -> list[tuple[str, bool]]:
    """Stretches of text that are learned or not; the end token as '$'."""
    found: list[tuple[str, bool]] = []
    for token, learned in zip(example.tokens, example.trained, strict=True):
        text = "$" if token == EOS else chr(token)
        if found and found[-1][1] == learned:
            found[-1] = (found[-1][0] + text, learned)
        else:
            found.append((text, learned))
    return found


# -- what is learned -----------------------------------------------------------------------------


def test_a_plain_completion_is_learned_with_its_end(tmp_path: Path) -> None:
    (example,) = examples_of(tmp_path, [{"prompt": "1+1=", "completion": "2"}])
    assert parts(example) == [("1+1=", False), ("2$", True)]
    assert bytes(example.prompt).decode() == "1+1="


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_every_turn_of_the_assistant_is_learned_and_nothing_else(
    tmp_path: Path, template: str
) -> None:
    (example,) = examples_of(tmp_path, [{"messages": TALK}], template)
    assert parts(example) == [
        ("[user]hi$\n[assistant]", False),
        ("hello$", True),
        ("\n[user]more$\n[assistant]", False),
        ("no$", True),
    ]


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_a_turn_of_weight_0_is_read_and_not_learned(tmp_path: Path, template: str) -> None:
    first = [TALK[0], {**TALK[1], "weight": 0}]
    rows = [{"messages": first + TALK[2:]}, {"messages": [*TALK[:3], {**TALK[3], "weight": 1}]}]
    weighted, everything = examples_of(tmp_path, rows, template)
    history = "[user]hi$\n[assistant]hello$\n[user]more$\n[assistant]"
    assert parts(weighted) == [(history, False), ("no$", True)]
    assert sum(everything.trained) == len("hello$no$")
    with raises(TaskError, "nothing-to-learn"):
        examples_of(tmp_path, [{"messages": first}], template)


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_of_a_prompt_with_history_only_the_completion_is_learned(
    tmp_path: Path, template: str
) -> None:
    row = {"prompt": TALK[:3], "completion": TALK[3:]}
    (example,) = examples_of(tmp_path, [row], template)
    history = "[user]hi$\n[assistant]hello$\n[user]more$\n[assistant]"
    assert parts(example) == [(history, False), ("no$", True)]


WITH_TOOLS = "{{ tools | tojson if tools }}"


@pytest.mark.parametrize("template", [CHAT, MARKED])
@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f", "x": null}]'])
def test_a_rows_tools_are_in_its_prompt(tmp_path: Path, template: str, tools: Any) -> None:
    shown = '[{"name": "f"' + (', "x": null' if isinstance(tools, str) else "") + "}]"
    asks, answers = "[user]hi$\n[assistant]", [("hello$", True)]
    rows = [
        {"messages": TALK[:2], "tools": tools},
        {"prompt": TALK[:1], "completion": TALK[1:2], "tools": tools},
        {"prompt": "hi", "completion": "hello", "tools": tools},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    ]
    for row in rows:
        (example,) = examples_of(tmp_path, [row], WITH_TOOLS + template)
        assert parts(example) == [((shown if "tools" in row else "") + asks, False), *answers]


def test_a_text_is_learned_whole_with_the_control_tokens_that_it_spells(tmp_path: Path) -> None:
    rows = [{"text": "ab"}, {"text": "a<eos>b<eos>\n"}, {"text": "a<eos>b"}]
    examples = examples_of(tmp_path, rows, CHAT)
    assert [parts(example) for example in examples] == [
        [("a", False), ("b$", True)],
        [("a", False), ("$b$", True)],
        [("a", False), ("$b$", True)],
    ]
    assert [bytes(e.prompt[:1]).decode() for e in examples] == ["a", "a", "a"]
    assert examples[0].prompt == examples[0].tokens  # so that not all texts count as one prompt


def test_alpacas_columns_are_read_by_default(tmp_path: Path) -> None:
    rows = [
        {"instruction": "do", "input": "it", "output": "ok", "system": "s"},
        {"instruction": "do", "input": "", "output": "ok"},
    ]
    assert list(map(parts, examples_of(tmp_path, rows, CHAT))) == [
        [("[system]s$\n[user]do\nit$\n[assistant]", False), ("ok$", True)],
        [("[user]do$\n[assistant]", False), ("ok$", True)],
    ]


def test_text_becomes_a_conversation_where_the_tokenizer_has_a_template(tmp_path: Path) -> None:
    row = {"question": "hi", "answer": "yo"}
    columns = {"prompt_column": "question", "completion_column": "answer"}
    (example,) = examples_of(tmp_path, [row], CHAT, system="be brief", **columns)
    prompt = "[system]be brief$\n[user]hi$\n[assistant]"
    assert parts(example) == [(prompt, False), ("yo$", True)]
    (example,) = examples_of(tmp_path, [row], CHAT, chat="off", **columns)
    assert parts(example) == [("hi", False), ("yo$", True)]


def test_an_end_that_the_template_does_not_give_is_put_behind_the_last_turn(tmp_path: Path) -> None:
    bare = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    (example,) = examples_of(tmp_path, [{"messages": TALK}], bare)
    assert parts(example) == [
        ("hi;", False),
        ("hello;", True),
        ("more;", False),
        ("no;$", True),
    ]


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    thinking = (
        "{% for m in messages %}{% if loop.last and m['role'] == 'assistant' %}(hm){% endif %}"
        "{{ m['content'] }}<eos>{% endfor %}"
    )
    with raises(TaskError, "template-changes-turns", "row 0"):
        examples_of(tmp_path, [{"messages": TALK}], thinking)


def test_a_turn_of_the_real_template_is_what_the_model_would_sample(tmp_path: Path) -> None:
    """ChatML puts a line break behind the end token, which is read and not learned."""
    chatml = (
        "{% for m in messages %}{{ '<' + m['role'] + '>\n' + m['content'] + '<eos>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
    )
    (example,) = examples_of(tmp_path, [{"messages": TALK[:2]}], chatml)
    assert parts(example) == [("<user>\nhi$\n<assistant>\n", False), ("hello$", True)]


# -- rows that cannot be used --------------------------------------------------------------------

GOOD = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("rows", "code", "facts"),
    [
        ([{"q": "a", "a": "b"}], "missing-column", ["'messages'", "'a', 'q'"]),
        ([GOOD, {"prompt": "a"}], "missing-column", ["row 1", "'completion'", "'prompt'"]),
        ([GOOD, {"prompt": "a", "completion": " "}], "no-completion", ["row 1"]),
        ([{"messages": TALK[:1]}], "no-assistant-turn", ["row 0", "user"]),
        ([{"messages": TALK[1:]}], "no-prompt", ["row 0"]),
        ([{"messages": "hi"}], "no-conversation", ["row 0"]),
        (
            [{"messages": [TALK[0], {"role": "assistant", "content": ""}]}],
            "empty-response",
            ["row 0"],
        ),
        ([], "no-rows", []),
    ],
)
def test_bad_rows_are_refused_with_their_place(
    tmp_path: Path, rows: list[dict[str, Any]], code: str, facts: list[str]
) -> None:
    with raises(TaskError, code, *facts):
        read_demonstrations(DemonstrationsConfig(name=write_rows(tmp_path, rows)))


def test_bad_rows_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = [GOOD, {"prompt": "a"}, {"prompt": "", "completion": "x"}, GOOD]
    name = write_rows(tmp_path, rows)
    with raises(TaskError, "missing-column", "row 1", "(2 rows", "on_error = 'drop'"):
        read_demonstrations(DemonstrationsConfig(name=name))
    kept, reasons = read_demonstrations(DemonstrationsConfig(name=name, on_error="drop"))
    assert [row.index for row in kept] == [0, 3]
    assert len(reasons) == 2
    bad = DemonstrationsConfig(name=write_rows(tmp_path, [rows[2]]), on_error="drop")
    with raises(TaskError, "prompt-not-text", "none of the 1 rows", "row 0"):
        read_demonstrations(bad)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    with raises(TaskError, "no-chat-template", "row 0"):
        examples_of(tmp_path, [{"messages": TALK}])
    with raises(TaskError, "chat-is-off", "data.chat = 'off'"):
        examples_of(tmp_path, [{"messages": TALK}], CHAT, chat="off")
    talk = [{"role": "system", "content": "x"}, *TALK]
    with raises(TaskError, "two-system-messages"):
        examples_of(tmp_path, [{"messages": talk}], CHAT, system="y")


@pytest.mark.parametrize(
    ("settings", "code", "fact"),
    [
        ({"steps": 3, "training": {"epochs": 2}}, "steps-and-epochs", "steps = 3"),
        ({"observe": {"checkpoint_every": 5}}, "setting-without-effect", "checkpoint_every = 5"),
        ({"observe": {"flight": False}}, "setting-without-effect", "flight = False"),
        (
            {"observe": {"checkpoint_minutes": 5}},
            "setting-without-effect",
            "checkpoint_minutes = 5.0",
        ),
        ({"data": {"system": "x", "chat": "off"}}, "system-without-chat", "system"),
        ({"data": {"held_out": 1.0}}, "less_than", "data.held_out = 1.0"),
        ({"rollout": {}}, "extra_forbidden", "'rollout'"),
    ],
)
def test_settings_that_contradict_are_refused(
    settings: dict[str, Any], code: str, fact: str
) -> None:
    with raises(ConfigError, code, fact):
        recipes.build(settings, "here", SftConfig)


# -- the loss ------------------------------------------------------------------------------------


def random_examples(shapes: Sequence[tuple[int, int]], seed: int = 0) -> list[Example]:
    """Sequences of (masked, learned) lengths, and one with a masked turn in between."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for masked, learned in shapes:
        tokens = torch.randint(3, 61, (masked + learned,), generator=generator).tolist()
        made.append(Example(tuple(tokens), (False,) * masked + (True,) * learned))
    tokens = torch.randint(3, 61, (9,), generator=generator).tolist()
    turns = (False, False, True, True, False, False, True, True, True)
    return [*made, Example(tuple(tokens), turns)]


EXAMPLES = random_examples([(3, 7), (20, 5), (5, 1), (2, 9), (8, 6)])


def naive_loss(model: Any, examples: Sequence[Example]) -> Tensor:
    """Every learned token's -log p, one sequence at a time out of full logits, over their count."""
    terms = []
    for e in examples:
        table = torch.log_softmax(model(torch.tensor([e.tokens])).logits[0], -1)
        terms += [-table[t - 1, e.tokens[t]] for t in range(len(e.tokens)) if e.trained[t]]
    return torch.stack(terms).mean()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("budget", [1, 40, 100_000])
@pytest.mark.parametrize("row_tokens", [0, 24, 60])
def test_loss_and_gradients_are_the_naive_ones_however_split_or_packed(
    budget: int, row_tokens: int
) -> None:
    model = llama(dtype=torch.float64)
    expected = naive_loss(model, EXAMPLES)
    expected.backward()
    want = gradients(model)
    objective = CrossEntropy(model, budget, row_tokens=row_tokens)
    stats = objective.learn(EXAMPLES)
    assert_close(gradients(model), want, 1e-9)
    assert stats["train/loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert stats["data/learned_tokens"] == 33
    assert objective.measure(EXAMPLES) == pytest.approx(expected.item(), rel=1e-12)


def test_packing_changes_nothing_in_float32() -> None:
    model = llama()
    plain = CrossEntropy(model, 64).learn(EXAMPLES)
    want = gradients(model)
    packed = CrossEntropy(model, 64, row_tokens=40).learn(EXAMPLES)
    assert packed["train/loss"] == pytest.approx(plain["train/loss"], rel=rounding(GRADIENT_TERMS))
    assert_close(gradients(model), want, rounding(GRADIENT_TERMS))


@pytest.mark.parametrize("kind", ["gpt_neox", "sliding"])
def test_packed_sequences_do_not_see_one_another_in_other_architectures(kind: str) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shape = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    if kind == "gpt_neox":
        model: Any = GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).double().eval()
    else:
        window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        model = Qwen2ForCausalLM(Qwen2Config(**shape, **window, num_key_value_heads=2))
        model = model.double().eval()
    packed = CrossEntropy(model, 1000, row_tokens=60).measure(EXAMPLES)
    assert packed == pytest.approx(naive_loss(model, EXAMPLES).item(), rel=1e-9)


def test_a_model_that_cannot_tell_packed_sequences_apart_is_refused() -> None:
    model = llama()
    inner = model.model.forward
    model.model.forward = lambda position_ids=None, **rest: inner(**rest)
    CrossEntropy(model, 64)
    with raises(ModelError, "packing-leaks", "LlamaForCausalLM", "packing = false"):
        CrossEntropy(model, 64, row_tokens=40)


def test_rows_are_packed_first_fit_with_the_longest_first() -> None:
    examples = [Example((1,) * (n + 1), (False,) + (True,) * n) for n in (3, 6, 4, 5, 2, 12)]
    rows = pack(examples, 10)
    assert [[len(e.tokens) - 1 for e in row] for row in rows] == [[12], [6, 4], [5, 3, 2]]


def test_training_on_one_batch_is_adamw_on_its_gradient() -> None:
    model, twin = llama(), llama()
    settings = {"training": {"lr": 1e-2, "lr_schedule": "constant"}, "batch": 6, "steps": 2}
    config = SftConfig.model_validate(settings)
    seen: list[float] = []
    objective = CrossEntropy.of(model, config)
    train(
        model,
        EXAMPLES,
        objective.learn,
        config,
        lambda step, stats: seen.append(stats["train/loss"]),
    )
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0)
    for expected in seen:
        loss = naive_loss(twin, EXAMPLES)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert CrossEntropy.of(model, config).measure(EXAMPLES) == pytest.approx(
        naive_loss(twin, EXAMPLES).item(), rel=1e-3
    )


# -- order and held-out part ---------------------------------------------------------------------


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    config = SftConfig.model_validate({"batch": 4, "training": {"epochs": 2}})
    made = list(batches(range(10), config))
    assert [len(b) for b in made] == [4, 4, 2, 4, 4, 2]
    assert updates(config, 10) == 6
    epochs = [[row for batch in half for row in batch] for half in (made[:3], made[3:])]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert list(batches(range(10), config)) == made
    some = SftConfig.model_validate({"batch": 4, "steps": 4})
    assert list(batches(range(10), some)) == made[:4]


def test_rows_with_one_prompt_are_held_out_together() -> None:
    rows = [f"{prompt}{n}" for prompt in "abcdefgh" for n in range(3)]
    train, held = hold_out(rows, lambda row: row[0], 0.2, seed=3)
    assert sorted(train + held) == sorted(rows)
    assert len(held) == 6  # 4.8 rows, rounded up to whole prompts
    assert not {row[0] for row in train} & {row[0] for row in held}
    assert hold_out(rows, lambda row: row[0], 0.2, seed=3) == (train, held)
    assert hold_out(rows, lambda row: row, 0.2, seed=3)[1] != held
    assert len(hold_out(rows, lambda row: row, 0.2, seed=3)[1]) == 5
    assert hold_out(rows, lambda row: row, 0.0, seed=3) == (rows, [])


def test_a_held_out_part_that_leaves_nothing_is_refused() -> None:
    with raises(TaskError, "nothing-to-train-on", 0.1, "3 rows"):
        hold_out(["a", "a", "a"], str, 0.1, seed=0)


# -- whole runs ----------------------------------------------------------------------------------

SPELLING = [{"prompt": f"{w}>", "completion": w[::-1]} for w in ("abc", "bca", "cab", "acb") * 8]


def test_a_run_learns_measures_and_saves_an_ordinary_checkpoint(
    tiny_folder: Path, tmp_path: Path
) -> None:
    name = write_rows(tmp_path, SPELLING)
    changes: dict[str, Any] = {"packing": True, "measure_every": 10, "training": {"epochs": 8}}
    config = supervised(SftConfig, tiny_folder, name, **changes)
    run = RunDirectory.create(tmp_path, "spell", config)
    result = sft(config, run_dir=run, progress=Progress())
    rows = lines(run.metrics_file)
    assert result.steps == 24
    assert [r["step"] for r in rows] == list(range(25))
    assert [r["step"] for r in rows if "held_out/loss" in r] == [0, 10, 20, 24]
    assert rows[0]["held_out/loss"] == pytest.approx(5.5, abs=0.3)  # ln 259: it knows nothing
    assert result.held_out_loss == rows[-1]["held_out/loss"]
    assert result.perplexity == pytest.approx(2.718281828 ** rows[-1]["held_out/loss"])
    assert result.loss < 1.5 < rows[1]["train/loss"]
    assert rows[1]["optimizer/lr"] == pytest.approx(5e-3)
    assert rows[2]["optimizer/lr"] == pytest.approx(5e-3 * 23 / 24)
    assert {p.name for p in run.path.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "model",
        "checkpoints",
    }
    assert recipes.load(run.path, SftConfig) == config
    # Whoever loads it finds the loss that was reported.
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert len(AutoTokenizer.from_pretrained(run.model)) == 259
    examples = examples_of(tmp_path, SPELLING)
    held = hold_out(examples, lambda e: e.prompt, 0.25, 0)[1]
    assert {e.prompt for e in held}.isdisjoint(
        e.prompt for e in hold_out(examples, lambda e: e.prompt, 0.25, 0)[0]
    )
    assert naive_loss(model, held).item() == pytest.approx(result.held_out_loss, rel=1e-5)


def test_lora_trains_adapters_and_saves_the_merged_model(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"lora_rank": 4}, "training": {"lr": 2e-2, "epochs": 8}}
    name = write_rows(tmp_path, SPELLING)
    config = supervised(SftConfig, tiny_folder, name, **changes)
    run = RunDirectory.create(tmp_path, "lora", config)
    result = sft(config, run_dir=run, progress=Progress())
    assert (run.model / "adapter" / "adapter_model.safetensors").is_file()
    before = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    held = hold_out(examples_of(tmp_path, SPELLING), lambda e: e.prompt, 0.25, 0)[1]
    assert result.held_out_loss == pytest.approx(naive_loss(model, held).item(), rel=1e-4)
    assert result.held_out_loss < naive_loss(before, held).item() - 0.1


def test_rows_that_are_too_long_are_left_out_whole_and_counted(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*SPELLING, {"prompt": "long>", "completion": "x" * 20}]
    common = ("--model.name", str(tiny_folder), "--out", str(tmp_path / "runs"), "--steps", "1")
    name = write_rows(tmp_path, rows)
    assert main(["sft", "--data.name", name, *common, "--data.max-tokens", "20"]) == 0
    text = capsys.readouterr().out
    assert "1 of 33 rows are longer than --data.max-tokens 20 and left out" in text
    assert "held out: 5." in text
    assert main(["sft", "--data.name", name, *common, "--data.max-tokens", "5"]) == 2
    error = capsys.readouterr().err
    assert "all 33 rows are longer than --data.max-tokens 5 (the shortest has 8 tokens)" in error
    assert len(list((tmp_path / "runs").iterdir())) == 1  # what never trained leaves nothing


@pytest.mark.parametrize("failing", [1, 2])
def test_a_run_without_an_update_leaves_nothing_behind_by_command_and_from_python(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: int,
) -> None:
    update, calls = TrainedModel.update, list[int]()

    def failed(self: TrainedModel) -> float:
        calls.append(1)
        if len(calls) == failing:
            raise LearnerError("no")
        return update(self)

    monkeypatch.setattr(TrainedModel, "update", failed)
    name, out = write_rows(tmp_path, SPELLING), tmp_path / "runs"
    line = f"sft --data.name {name} --model.name {tiny_folder} --steps 3 --out {out}"
    assert main([*line.split(), "--training.epochs", "1"]) == 2
    by_command = capsys.readouterr().out.replace("sft-001", "RUN")
    calls.clear()
    config = supervised(SftConfig, tiny_folder, name, steps=3, batch=32, out=str(out))
    with pytest.raises(LearnerError):
        stretto.sft(config)
    # Measured before the first update, which is no reason to keep it.
    assert len(list(out.iterdir())) == (0 if failing == 1 else 2)
    told = "what was done so far is in"
    assert (told in by_command) == (told in capsys.readouterr().out) == (failing == 2)


def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sft"]) == 2
    assert "--data.name is empty: name a file" in capsys.readouterr().err
    assert main(["sft", "--data.name", "nowhere.jsonl"]) == 2
    assert "there is no file 'nowhere.jsonl'" in capsys.readouterr().err
    write_rows(tmp_path, SPELLING)
    assert main(["sft", "--data.name", "rows.jsonl", "--data.size", "99"]) == 2
    assert "--data.size 99, but 'rows.jsonl' holds 32 rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sft", "--help-all"])
    text = capsys.readouterr().out
    for key in recipes.setting_names(SftConfig):
        assert "--" + key.replace("_", "-") in text
