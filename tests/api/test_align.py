"""The stages of alignment: recipes with the papers' settings, the plan, and all of it, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stretto
from raising import raises
from recipe_rows import post_rows
from run_helpers import lines
from stretto.api.alignment import Stages, check_opens, penalty, replaced, stages_of
from stretto.cli.main import main
from stretto.config import RewardConfig, RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError, RewardError, StateError, StrettoError, TaskError
from stretto.models.tiny import byte_tokenizer, make_tiny
from stretto.observe.lock import locked
from stretto.recipes import posts
from stretto.runs.finetuning import RewardModelResult

RECIPES = [
    *(("train", name) for name in recipes.names()),
    *(("sft", name) for name in recipes.names(SftConfig)),
    *(("reward", name) for name in recipes.names(RewardModelConfig)),
]

# -- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "responses", "prompts", "lr", "schedule", "tokens", "beta", "samples"),
    [
        ("tldr", 131_072, 512, 3e-6, "linear", (512, 128), 0.1, 2),
        ("no-robots", 100_000, 256, 8e-7, "linear", (512, 1024), 0.03, 2),
        ("gsm8k-rho", 516_096, 252, 3e-6, "constant", (512, 512), 0.05, 4),
    ],
)
def test_recipes_of_asynchronous_rlhf_have_its_settings(
    name: str,
    responses: int,
    prompts: int,
    lr: float,
    schedule: str,
    tokens: tuple[int, int],
    beta: float,
    samples: int,
) -> None:
    c = recipes.load(name)
    r = c.rollout
    assert abs(c.steps * r.batch - responses) < r.batch
    assert (r.samples_per_prompt, r.temperature) == (samples, 0.7)
    assert r.batch == prompts * samples
    assert (c.task.max_prompt_tokens, r.max_new_tokens) == tokens
    assert (c.training.lr, c.training.lr_schedule, c.training.epochs) == (lr, schedule, 1)
    assert (c.algorithm.name, c.algorithm.kl_coef) == ("online-dpo", beta)
    assert c.schedule.knobs.lag == 1
    assert c.reward.missing_eos == "replace"


@pytest.mark.parametrize("name", ["stack-exchange", "opencoder"])
def test_recipes_of_oppo_have_its_settings(name: str) -> None:
    c = recipes.load(name)
    assert (c.algorithm.name, c.rollout.batch, c.schedule.preset) == ("ppo", 112, "oppo")


def test_supervised_recipes_have_the_papers_settings() -> None:
    sft, reward = recipes.load("no-robots", SftConfig), recipes.load("tldr", RewardModelConfig)
    assert (sft.batch, sft.data.max_tokens, sft.training.epochs) == (128, 4096, 2)
    assert (sft.training.lr, sft.training.lr_schedule) == (5e-6, "linear")
    assert (reward.batch, reward.data.max_tokens, reward.training.epochs) == (256, 1024, 1)
    assert (reward.training.lr, reward.training.lr_schedule) == (3e-6, "linear")


# -- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "name"), RECIPES)
def test_every_recipe_has_a_dry_run(
    command: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"gsm8k": ("--task.name", "openai/gsm8k:main")}.get(name, ())
    data = ("--data.name", "owner/pairs") if command == "reward" else ()
    assert main([command, name, *given, *data, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "Memory for weights, gradients and Adam states" in out
    assert not list(tmp_path.iterdir())  # nothing is made, and nothing was fetched


def test_a_dry_run_derives_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tldr", "--schedule.overcommit", "10", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "a step: 1024 responses (512 prompts x 2)" in out
    assert "in all: 131,072 responses, 128 updates" in out
    assert "in flight: at most 1034 responses (delta at most 10)" in out
    assert "1.012B parameters a model (all trained in actor)" in out


def test_a_dry_run_of_an_alignment_needs_no_pairs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["align", "posts", "--dry-run"]) == 0
    assert "data: pairs that the gold reward labels, 10% of it held out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_supervised_training(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reward", "tldr", "--model.lora-rank", "8", "--dry-run"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 epoch(s) of 256 pairs, at most 524,288 tokens an update" in out
    assert "LoRA of rank 8 on all-linear" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task.kind", "dataset", "--task.name", "no.jsonl"), "there is no file 'no.jsonl'"),
        (("--reward.sources", "no.py:f"), "names the file 'no.py', which is not there"),
        (("--model.name", "./no"), "there is no folder './no'"),
    ],
)
def test_a_dry_run_finds_what_is_not_there(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny-tail", *arguments, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


# -- the controlled task --------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "count", "seed"), [("posts", 800, 0), ("posts-held-out", 200, 1)])
def test_the_packaged_posts_are_those_that_are_made(file: str, count: int, seed: int) -> None:
    path = Path(posts.__file__).with_name(f"{file}.jsonl")
    assert lines(path) == list(post_rows(count, seed))


def test_held_out_posts_are_others() -> None:
    seen = {row["prompt"] for row in post_rows(800, 0)}
    assert not seen & {row["prompt"] for row in post_rows(200, 1)}


def test_the_gold_judge_counts_facts_and_spare_words() -> None:
    facts = ["Anna", "red", "watch", "park", "Monday"]
    told = {
        " Anna lost a red watch at the park on Monday.": 5.0,  # ten words
        " Anna lost a watch.": 2.0,
        " Someone lost something.": 0.0,
        " Anna lost a red watch at the park on Monday and is so sad.": 5.0 - 0.4,
        " Annas": 0.0,  # whole words
    }
    assert posts.gold(list(told), [facts] * len(told)) == pytest.approx(list(told.values()))
    message = [{"role": "assistant", "content": "red Monday"}]
    assert posts.gold([message], [facts]) == [2.0]


# -- all stages -----------------------------------------------------------------------------------

SFT = """
batch = 16
steps = 30
[model]
name = "tiny"
dtype = "float32"
[data]
name = "{folder}/rows.jsonl"
[training]
lr = 3e-3
"""
REWARD = """
batch = 8
[model]
name = "tiny"
dtype = "float32"
[training]
lr = 1e-3
"""
TRAIN = """
steps = 2
[model]
name = "tiny"
dtype = "float32"
[task]
kind = "dataset"
name = "{folder}/rows.jsonl"
held_out = "{folder}/held-out.jsonl"
columns.answer = "completion"
[reward]
sources = ["{folder}/gold.py:gold"]
[rollout]
batch = 8
samples_per_prompt = 2
max_new_tokens = 6
[algorithm]
name = "rloo"
"""
GOLD = """
def gold(completions, letter, **_):
    return [c.count(a) - 0.1 * len(c) for c, a in zip(completions, letter)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = [{"prompt": f"{a}:", "completion": a + b, "letter": a} for a in "abcd" for b in "wxyz"]
    for name, part in (("rows", rows), ("held-out", rows[::3])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "gold.py").write_text(GOLD)
    for stage, text in (("sft", SFT), ("reward", REWARD), ("train", TRAIN)):
        (folder / f"{stage}.toml").write_text(text.format(folder=folder))
    return folder


def begin(folder: Path, out: Path, *more: str) -> int:
    arguments = ["align", str(folder), "--pairs", "16", "--samples", "6", "--out", str(out)]
    return main([*arguments, *more])


def test_three_stages_end_in_a_table(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stretto.evaluation import measures

    sampled: list[str] = []
    opened = measures.open_engine

    def counted(config: Any, *rest: Any) -> Any:
        sampled.append(config.model.name)
        return opened(config, *rest)

    monkeypatch.setattr(measures, "open_engine", counted)
    # Names of columns are of files that are not read here: the pairs are those that are labelled.
    (folder / "reward.toml").write_text(
        REWARD + '[data]\nname = "mine.jsonl"\nchosen_column = "better"\nsize = 9\n'
    )
    out = tmp_path / "runs"
    assert begin(folder, out) == 0
    printed = capsys.readouterr()
    run = out / "mine-align-001"
    result = outcome(run)
    before, after = result["before"], result["after"]
    assert before["kl"]["kl"] == pytest.approx(0, abs=1e-4)  # the tuned model against itself
    assert after["kl"]["kl"] != 0
    assert before["samples"] == after["samples"] == 6
    assert sampled == [
        result["sft"]["model"],
        str(Path(result["train"]["run_dir"]) / "model"),
    ]  # once for all measures
    row = next(line for line in printed.out.splitlines() if line.startswith("| after RL "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    gold, proxy = after["win_rates"]
    assert cells[1].startswith(f"{gold['rate']:.3f}")
    assert cells[2] == f"{gold['score']:.2f}"
    assert cells[3] == f"{proxy['score']:.2f}"
    last = recipes.load(run / "run-001")
    assert last.model.name == result["sft"]["model"]
    assert last.reward.sources == (f"model:{result['reward']['model']}",) == (proxy["by"],)
    metrics = lines(run / "reward-001" / "metrics.jsonl")
    mean, std = (metrics[-1][f"held_out/reward_{name}"] for name in ("mean", "std"))
    assert last.reward.missing_eos_penalty == pytest.approx(mean - 2 * std)
    assert f"missing_eos_penalty of the last stage: {mean - 2 * std:.2f}" in printed.out
    assert "in place of mine.jsonl" in printed.err
    pairs = lines(run / "pairs.jsonl")
    assert all(pair["chosen_score"] > pair["rejected_score"] for pair in pairs)
    assert stages_of(run) == stages_of(folder)  # to be aligned again, or to be gone on with
    assert main(["align", "--resume", str(run)]) == 0  # all is done: the same table, at once
    assert capsys.readouterr().out == printed.out[printed.out.index("reward model: ") :]
    assert len(sampled) == 2
    with locked(run, print):
        assert main(["align", "--resume", str(run)]) == 2
    assert f"'{run}' is in use by process" in capsys.readouterr().err


def outcome(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "align.json").read_text())
    return found


def test_what_is_done_is_not_done_again(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stretto.training.learner import PolicyLearner

    assert begin(folder, tmp_path / "whole") == 0
    whole = outcome(tmp_path / "whole" / "mine-align-001")["after"]
    learn, calls = PolicyLearner.train, list[int]()

    def stopped(self: PolicyLearner, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RewardError("stopped here")
        return learn(self, batch)

    for number, text in enumerate(("", "[observe]\ncheckpoint_every = 1\n"), 1):
        with (folder / "train.toml").open("a") as file:
            file.write(text)
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(PolicyLearner, "train", stopped)
            assert begin(folder, tmp_path / "runs") == 2
        run = tmp_path / "runs" / f"mine-align-00{number}"
        assert f"stretto align --resume {run}" in capsys.readouterr().out
        done = [run / name for name in ("sft-001", "pairs.jsonl", "reward-001")]
        kept = [path.stat().st_mtime_ns for path in done]
        assert main(["align", "--resume", str(run)]) == 0
        assert [path.stat().st_mtime_ns for path in done] == kept
        names = {entry.name for entry in run.iterdir() if entry.is_dir()}
        assert names == {"sft-001", "reward-001", "run-001", *(() if text else ("run-002",))}
        last = Path(outcome(run)["train"]["run_dir"])
        assert [step["step"] for step in lines(last / "metrics.jsonl")] == [1, 2]

        after = outcome(run)["after"]  # as without an interruption
        assert after["win_rates"][0]["score"] == whole["win_rates"][0]["score"]
        assert after["kl"]["kl"] == pytest.approx(whole["kl"]["kl"], rel=1e-5)

    (run / "sft-001").rename(run / "elsewhere")
    with raises(StateError, "stage-results-gone", "sft-001"):
        stretto.resume_alignment(run)
    with raises(ConfigError, "alignment-begun", run):
        stretto.align(folder, folder=run)


@pytest.mark.parametrize(
    ("changes", "options", "error", "code", "fact"),
    [
        ({"train": {"task__held_out": 0}}, {}, ConfigError, "stages-share-prompts", "0.0"),
        ({"train": {"task__held_out": 0.2}}, {}, ConfigError, "stages-share-prompts", "0.2"),
        ({"train": {"task__held_out": "train"}}, {}, ConfigError, "stages-share-prompts", "train"),
        ({"train": {"task__columns": {}}}, {}, TaskError, None, "reference_column="),
        ({}, {"reference_column": "answr"}, TaskError, None, "'answr'"),
        ({"train": {"reward__sources": ("no.py:f",)}}, {}, ConfigError, None, "no.py"),
        ({"train": {"reward__sources": ("task", "x.py:f")}}, {}, ConfigError, "gold-not-one", "x"),
        ({}, {"pairs": 1}, ConfigError, "greater_than_equal", "pairs=1: must be"),
        ({}, {"samples": 0}, ConfigError, "greater_than", "samples=0: must be"),
        ({"sft": {"data__name": ""}}, {}, ConfigError, "stage-without-data", "sft.toml"),
        ({"train": {"model__name": "./none"}}, {}, StrettoError, None, "./none"),
    ],
)
def test_what_the_last_stage_lacks_is_seen_before_the_first(
    folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    options: dict[str, Any],
    error: type[StrettoError],
    code: str | None,
    fact: str,
) -> None:
    with raises(error, code, fact):
        stretto.align(folder, folder=tmp_path / "out", **changes, **options)
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_an_alignment_that_cannot_begin(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin(folder, tmp_path / "runs", "--reference-column", "no") == 2
    assert not list((tmp_path / "runs").iterdir())
    assert main(["align", "--resume", str(folder), "--seed", "3"]) == 2
    assert "leave out the recipe and all other options" in capsys.readouterr().err
    assert main(["align", "--resume", str(folder)]) == 2
    assert "no alignment was begun in it" in capsys.readouterr().err
    assert main(["align"]) == 2
    assert "stretto align posts" in capsys.readouterr().err


CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def chat_model(tmp_path: Path) -> str:
    """The tiny model with a chat template."""
    make_tiny(tmp_path / "chat")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "chat")
    return str(tmp_path / "chat")


@pytest.mark.parametrize(
    ("sft", "reward", "train", "stage"),
    [
        ({}, {}, {}, ""),
        ({"chat": "off"}, {"chat": "off"}, {"chat": "off"}, ""),
        ({"system": "Be."}, {}, {"system": "Be."}, ""),  # the pairs hold the system message
        ({}, {}, {"system": "Be."}, "of sft.toml"),
        ({"system": "Be."}, {"system": "Be."}, {"system": "Be."}, "of reward.toml"),
        ({"chat": "off"}, {}, {}, "of sft.toml"),
        ({"chat": "off"}, {}, {"chat": "off"}, "of reward.toml"),
        ({}, {"chat": "off"}, {"chat": "off"}, "of sft.toml"),
    ],
)
def test_the_stages_read_prompts_alike(
    folder: Path,
    chat_model: str,
    sft: dict[str, Any],
    reward: dict[str, Any],
    train: dict[str, Any],
    stage: str,
) -> None:
    model = {"model__name": chat_model}
    stages = stages_of(
        folder,
        sft=model | {"data": sft},
        reward=model | {"data": reward},
        train=model | {"task": train},
    )
    if not stage:
        check_opens(stages)
        return
    with raises(ConfigError, "stages-differ-in-prompts", stage):
        check_opens(stages)


def test_all_stages_start_from_one_tokenizer(folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    data = json.loads(file.read_text())
    vocabulary = data["model"]["vocab"]
    a, b = list(vocabulary)[:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(data))
    stages = stages_of(folder, reward={"model__name": str(tmp_path / "other")})
    with raises(ConfigError, "stages-differ-in-tokenizer", tmp_path / "other"):
        check_opens(stages)
    make_tiny(tmp_path / "copy")
    stages = stages_of(folder, train={"model__name": str(tmp_path / "copy")})
    check_opens(stages)
    assert f"in place of {tmp_path / 'copy'}" in replaced(stages)[0]


@pytest.mark.parametrize(
    ("rule", "expected"), [("replace", 0.3 - 2 * 0.5), ("subtract", 1.0), ("off", -7.0)]
)
def test_a_missing_end_costs_on_the_learned_scale(rule: Any, expected: float) -> None:
    learned = RewardModelResult(Path("m"), 1, 0.7, None, reward_mean=0.3, reward_std=0.5)
    config = RewardConfig(missing_eos=rule, missing_eos_penalty=-7.0)
    assert penalty(learned, config) == pytest.approx(expected)


def test_the_seeds_of_recipes_stay_unless_one_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Stages] = []

    def begun(stages: Stages, **rest: Any) -> Any:
        seen.append(stages)
        raise ConfigError("seen")

    monkeypatch.setattr("stretto.cli.train.align", begun)
    text = (folder / "sft.toml").read_text()
    (folder / "sft.toml").write_text(f"seed = 7\n{text}")
    begin(folder, tmp_path / "runs")
    begin(folder, tmp_path / "runs", "--seed", "3", "--algorithm", "ppo")
    assert [(s.sft.seed, s.reward.seed, s.train.seed) for s in seen] == [(7, 0, 0), (3, 3, 3)]
    assert [s.train.algorithm.name for s in seen] == ["rloo", "ppo"]


def test_stages_need_a_recipe_each(tmp_path: Path) -> None:
    with raises(ConfigError, "no-recipe-of-stages", "'tiny'", "posts"):
        stages_of("tiny")
    with raises(ConfigError, None, "sft.toml"):
        stages_of(tmp_path)
