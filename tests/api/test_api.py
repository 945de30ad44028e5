"""The functions of ``import stretto``: what the commands do, with objects in place of names."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stretto
from raising import raises
from run_helpers import lines
from stretto import Config, RewardModelConfig, SftConfig
from stretto.api import begin, changed
from stretto.cli.main import main
from stretto.config import ModelConfig, RolloutConfig, TaskConfig, recipes
from stretto.errors import ConfigError, ModelError, StrettoError, TaskError
from stretto.evaluation.generation import generate as generate_each
from stretto.observe.display import Progress
from stretto.planner.formulas import priced
from stretto.runtime.sim.cluster import Cluster
from stretto.runtime.sim.simulate import simulate
from stretto.tasks import Task, TaskRow

SMALL: dict[str, Any] = {
    "steps": 2,
    "warmup_examples": 0,
    "rollout": {"batch": 4, "max_new_tokens": 4},
    "observe": {"progress": "off"},
}
"""Changes that make 'tiny' a matter of a second."""

ROWS = [{"prompt": f"say {word}", "answer": word} for word in ("cat", "dog", "cow")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def scores(run: Path) -> list[float]:
    return [step["objective/scores"] for step in lines(run / "metrics.jsonl")]


@pytest.mark.parametrize("preset", ["sync", "oppo"])
def test_reward_objects_run_in_the_thread_that_trains_while_nothing_overlaps(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where stages overlap, a line says that they do not."""
    threads = set[threading.Thread]()

    def f(completions: list[str], **kwargs: Any) -> list[float]:
        threads.add(threading.current_thread())
        return [1.0] * len(completions)

    options = {**SMALL, "observe": {"progress": "plain"}, "schedule__preset": preset}
    stretto.train("tiny", **options, out=str(tmp_path), dataset=ROWS, reward=f)
    assert (threads == {threading.main_thread()}) == (preset == "sync")
    said = capsys.readouterr()
    assert ("signal.alarm" in said.out + said.err) == (preset == "oppo")


def jsonl(file: Path, rows: Iterable[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def letters(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """How many different letters of the answer stand in the response."""
    return [float(len(set(a) & set(c))) for a, c in zip(answer, completions, strict=True)]


def wants_more(completions: Sequence[str], solution: Sequence[str]) -> list[float]:
    raise AssertionError


def vowels(folder: Path) -> str:
    """A gold reward in a file: the number of vowels."""
    file = folder / "gold.py"
    file.write_text(
        "def vowels(completions):\n"
        "    return [float(sum(c.count(v) for v in 'aeiou')) for c in completions]\n"
    )
    return f"{file}:vowels"


def half(completions: Sequence[str]) -> list[float]:
    return [0.5] * len(completions)


def test_all_names_are_there_and_importing_loads_nothing_heavy() -> None:
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None
        assert name in dir(stretto)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        stretto.trian  # noqa: B018
    code = (
        "import sys, stretto.scoring.function_host, stretto.tasks;"
        "print(*{'numpy'} & set(sys.modules));"
        "from stretto import train, Config, load_recipe; load_recipe('tiny');"
        "print(*{'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.split() == []


def test_settings_are_changed_singly_or_by_section() -> None:
    config = stretto.load_recipe(
        "tiny", steps=7, rollout={"max_new_tokens": 9}, training__lr=1e-5, task__settings={"a": 1}
    )
    before = recipes.load("tiny")
    assert (config.steps, config.rollout.max_new_tokens, config.training.lr) == (7, 9, 1e-5)
    assert config.rollout.batch == before.rollout.batch == 64  # others of the section stay
    assert config.task.settings == {"a": 1}  # a table is replaced, as on the command line
    assert config.training.critic_lr == before.training.critic_lr
    with raises(ConfigError, "extra_forbidden", "'training.lrr'", "training__lr="):
        stretto.load_recipe("tiny", training__lrr=1)
    with raises(ConfigError, "extra_forbidden", "'trainin"):
        stretto.load_recipe("tiny", trainin__lr=1)


def test_train_is_what_the_command_does(tmp_path: Path) -> None:
    result = stretto.train("tiny", **SMALL, out=str(tmp_path / "python"))
    words = "--steps 2 --warmup-examples 0 --rollout.batch 4 --rollout.max-new-tokens 4"
    line = f"train tiny {words} --observe.progress off --out {tmp_path / 'command'}"
    assert main(line.split()) == 0
    command = tmp_path / "command" / "tiny-001"
    assert result.model == tmp_path / "python" / "tiny-001" / "model"
    assert result.steps == 2
    assert scores(command) == scores(result.model.parent)
    assert same(weights(command / "model"), weights(result.model))
    assert result.stats["objective/scores"] == scores(command)[-1]


def test_rows_and_functions_take_the_place_of_names(tmp_path: Path) -> None:
    result = stretto.train(
        "tiny",
        **SMALL,
        out=str(tmp_path),
        dataset=iter(ROWS),
        reward=[letters, half],
        reward__weights=(2.0, 10.0),
        reward__missing_eos="off",
        observe__samples=4,
    )
    run = result.model.parent
    samples = lines(run / "samples.jsonl")
    assert len(samples) == 8
    for sample in samples:
        answer = sample["prompt"].removeprefix("say ")
        assert sample["reward"] == 2.0 * len(set(answer) & set(sample["response"])) + 5.0
    config = recipes.load(run)
    assert config.reward.sources == ("letters", "half")
    assert config.task.kind == "dataset"
    assert lines(Path(config.task.name)) == ROWS


def test_datasets_of_other_kinds_are_rows(tmp_path: Path) -> None:
    import datasets
    import pandas

    def kept(dataset: Any, **task: Any) -> list[Any]:
        few = {**SMALL, "steps": 1, "out": str(tmp_path), "task": task}
        run = stretto.train("tiny", **few, dataset=dataset, reward=half).model.parent
        return lines(Path(recipes.load(run).task.name))

    prompts = ["say a", "say b"]
    rows = [{"prompt": prompt} for prompt in prompts]
    assert kept(prompts) == rows
    assert kept(iter(prompts), columns={"prompt": "q"}) == [{"q": prompt} for prompt in prompts]
    third, day = 1 / 3, pandas.Timestamp(2024, 5, 6)
    frame = pandas.DataFrame({"prompt": [*prompts, None], "n": [third, None, math.inf]})
    frame["day"], frame["list"] = day, [np.array([1, 2])] * 3
    more = {"day": "2024-05-06T00:00:00", "list": [1, 2]}
    assert kept(frame) == [
        {"prompt": "say a", "n": third, **more},
        {"prompt": "say b", "n": None, **more},
        {"prompt": None, "n": math.inf, **more},
    ]
    data = datasets.Dataset.from_list(rows)
    both = datasets.DatasetDict(train=data, test=data.select([1]))
    assert (kept(data.to_iterable_dataset()), kept(both)) == (rows, rows)
    assert kept(both, split="test") == rows[1:]
    with raises(TaskError, "unknown-split", "'dev'", "test, train"):
        kept(both, split="dev")


def test_rows_that_cannot_be_used_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [ROWS[0], {"prompt": None}, {"other": 1}]
    few = {**SMALL, "out": str(tmp_path), "observe": {"progress": "plain"}}
    result = stretto.train("tiny", **few, dataset=rows, reward=half)
    assert [step["rows_left_out"] for step in lines(result.model.parent / "metrics.jsonl")] == [
        2,
        2,
    ]
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(said) == 1
    assert "2 rows cannot be used and are left out; the first: dataset, " in said[0]
    assert "row 1, column 'prompt': a prompt must be text" in said[0]


def logged(completions: Sequence[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> Any:
    log_extra("chars", [len(c) for c in completions])
    log_extra("text", list(completions))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return [float(len(c)) for c in completions]


def test_what_functions_log_is_in_the_records(tmp_path: Path) -> None:
    few = {**SMALL, "out": str(tmp_path), "observe__samples": 4}
    result = stretto.train("tiny", **few, dataset=ROWS, reward=logged)
    samples, metrics = (
        lines(result.model.parent / f"{name}.jsonl") for name in ("samples", "metrics")
    )
    assert len(samples) == 8
    for sample in samples:
        own = {"chars": sample["scores"]["logged"], "text": sample["response"]}
        own["progress"] = (sample["step"] - 1) / 2
        assert sample["extra"] == {f"logged/{name}": value for name, value in own.items()}
    assert [step["reward/logged/progress"] for step in metrics] == [0, 0.5]
    assert [step["reward/logged/chars"] for step in metrics] == [
        step["reward/logged"] for step in metrics
    ]
    assert "reward/logged/text" not in metrics[0]
    assert result.stats["reward/logged/progress"] == 0.5


def test_a_run_begins_in_a_new_folder_or_in_that_of_the_run_it_goes_on_with(tmp_path: Path) -> None:
    config = stretto.load_recipe("tiny", out=str(tmp_path))
    runs = [begin(config, "mine") for _ in range(2)]
    assert [run.run_dir.path for run in runs] == [tmp_path / "mine-001", tmp_path / "mine-002"]
    assert not any(run.resuming for run in runs)
    longer = changed(config, {"steps": 99})
    again = begin(longer, resume=tmp_path / "mine-001")
    assert (again.resuming, again.run_dir.path) == (True, tmp_path / "mine-001")
    assert again.config.steps == 99
    elsewhere = begin(changed(config, {"runtime": "local"}), resume=tmp_path / "mine-001")
    assert elsewhere.config.runtime == "local"
    with raises(ConfigError, "resumed-differs", "seed = 9", 0):
        begin(changed(config, {"seed": 9}), resume=tmp_path / "mine-001")
    with raises(ConfigError, None, tmp_path):
        begin(config, resume=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_task_judges_rows_by_their_answers_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    settings = {**SMALL, "task": {"columns": {"answer": "answer"}}, "observe__checkpoint_every": 1}
    whole = stretto.train("tiny", **settings, out=str(tmp_path), dataset=ROWS)
    first = stretto.train("tiny", **{**settings, "steps": 1}, out=str(tmp_path), dataset=ROWS)
    with raises(ConfigError, "resumed-differs", "training__lr=0.5", 0.001):
        stretto.resume(first.model.parent, training__lr=0.5)
    second = stretto.resume(first.model.parent, steps=2)
    assert second.steps == 2
    assert scores(second.model.parent) == scores(whole.model.parent)
    assert same(weights(second.model), weights(whole.model))


def test_a_model_that_is_brought_is_trained_in_place(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "out": str(tmp_path), "dataset": ROWS, "reward": letters}
    named = stretto.train("tiny", **settings, model=str(tiny_folder))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    brought = stretto.train("tiny", **settings, model=model, tokenizer=tokenizer)
    assert same(dict(model.named_parameters()), weights(brought.model))
    assert same(weights(named.model), weights(brought.model))


class Words(Task):
    """Prompts as an object."""

    has_verifier = False

    def __len__(self) -> int:
        return 2

    def row(self, index: int) -> TaskRow:
        return TaskRow(f"word {index}", {"answer": "ab"[index]}, index=index)

    def verify(self, index: int, response: str) -> float:
        raise AssertionError


def test_a_task_that_is_brought_gives_prompts_and_columns(tmp_path: Path) -> None:
    result = stretto.train(
        "tiny", **SMALL, out=str(tmp_path), task=Words(), reward=letters, reward__missing_eos="off"
    )
    for sample in lines(result.model.parent / "samples.jsonl"):
        letter = "ab"[int(sample["prompt"].removeprefix("word "))]
        assert sample["reward"] == float(letter in sample["response"])


@pytest.mark.parametrize(
    ("changes", "error", "code", "fact"),
    [
        ({"model": torch.nn.Linear(1, 1)}, ConfigError, "tokenizer-of-object", "tokenizer="),
        ({"task": Words()}, ConfigError, "task-without-reward", "reward="),
        ({"reward": [half, half]}, ConfigError, "rewards-alike", "'half'"),
        ({"reward": [3]}, ConfigError, "reward-not-callable", "got 3"),
        ({"reward": lambda x: x}, ConfigError, None, "signature"),
        ({"reward": wants_more}, ConfigError, None, "solution"),
        ({"dataset": [{"prompt": object()}]}, TaskError, "row-not-plain", "row 0"),
        ({"dataset": 3}, TaskError, "dataset-not-rows", "int"),
        ({"dataset": [{"question": "q"}]}, TaskError, "missing-column", "dataset, row 0"),
        ({"dataset": [{"question": "a"}]}, TaskError, None, "'prompt'"),
        ({"dataset": [{"prompt": "q"}]}, TaskError, "task-without-verifier", "task__columns"),
        ({"dataset": []}, TaskError, None, "no rows"),
        ({"model": "./none"}, ModelError, None, "./none"),
    ],
    ids=lambda v: v[:20] if isinstance(v, str) else "",
)
def test_mistakes_leave_no_run_behind(
    changes: dict[str, Any],
    error: type[StrettoError],
    code: str | None,
    fact: str,
    tmp_path: Path,
) -> None:
    with raises(error, code, fact):
        stretto.train("tiny", **SMALL, out=str(tmp_path), **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_display_of_the_callers_own_is_told_of_the_steps(tmp_path: Path) -> None:
    class Seen(Progress):
        rewards: list[float] = []  # noqa: RUF012

        def step(self, step: int, total: int, stats: Any, samples: Any) -> None:
            self.rewards.append(stats["objective/scores"])

    seen = Seen()
    result = stretto.train(
        "tiny", **SMALL, out=str(tmp_path), dataset=ROWS, reward=half, progress=seen
    )
    assert seen.rewards == scores(result.model.parent)


def test_supervised_training(tmp_path: Path, tiny_folder: Path) -> None:
    base = {"model": {"name": str(tiny_folder), "dtype": "float32"}, "out": str(tmp_path)}
    said = ({"prompt": f"p{i}", "completion": "yes" * i} for i in range(1, 9))
    preferred = ({"prompt": f"p{i}", "chosen": "good", "rejected": "bad"} for i in range(8))
    demonstrations = jsonl(tmp_path / "sft.jsonl", said)
    pairs = jsonl(tmp_path / "pairs.jsonl", preferred)
    quiet: dict[str, Any] = {
        "observe": {"progress": "off"},
        "training": {"lr": 1e-3, "epochs": 2},
        "batch": 4,
    }
    tuned = stretto.sft(
        SftConfig.model_validate({**base, "data": {"name": demonstrations}}), **quiet
    )
    assert tuned.model == tmp_path / "sft-001" / "model"
    assert tuned.steps == 4  # 7 rows are left to train on: 2 batches, twice
    again = stretto.sft(tmp_path / "sft-001")  # a run's folder repeats it
    assert again.loss == tuned.loss
    judge = stretto.train_reward_model(
        RewardModelConfig.model_validate({**base, "data": {"name": pairs}}), **quiet
    )
    assert judge.model == tmp_path / "reward-001" / "model"
    assert judge.held_out is not None
    assert judge.held_out.accuracy == 1.0
    with raises(ConfigError, "extra_forbidden", "'batchs'"):
        stretto.sft(SftConfig(), batchs=3)


def test_evaluate_is_what_the_command_does(tmp_path: Path, tiny_folder: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    result = stretto.evaluate(
        "tiny",
        model=tiny_folder,
        dataset=file,
        task__columns={"answer": "answer"},
        rollout={"max_new_tokens": 4},
    )
    assert (result.samples, result.pass_at_1, result.mean_tokens) == (3, 0.0, 4.0)
    line = f"eval tiny --model {tiny_folder} --samples 2 --rollout.max-new-tokens 4"
    assert main([*line.split(), "--out", str(tmp_path / "out.json")]) == 0
    two = stretto.evaluate("tiny", model=tiny_folder, samples=2, rollout={"max_new_tokens": 4})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["samples"] == two.samples == 2
    assert written["mean_tokens"] == two.mean_tokens


def test_rows_that_are_named_take_the_held_out_ones_of_others_with_them(
    tmp_path: Path, tiny_folder: Path
) -> None:
    own, held, mine = (
        jsonl(tmp_path / f"{name}.jsonl", (ROWS * 2)[:count])
        for name, count in (("own", 3), ("held", 2), ("mine", 5))
    )
    task = {"kind": "dataset", "name": own, "held_out": held, "columns": {"answer": "answer"}}
    config = Config.model_validate({"task": task, "rollout": {"max_new_tokens": 1}})
    for given, rows in (
        ({}, 2),
        ({"dataset": mine}, 5),
        ({"task__name": mine}, 5),
        ({"task": {"name": mine}}, 5),
        ({"task__name": mine, "task__held_out": own}, 3),
        ({"dataset": mine, "task": {"held_out": own}}, 3),
        ({"task__max_prompt_tokens": 99}, 2),
    ):
        measured = stretto.measure(config, model=tiny_folder, **given)
        assert measured.samples == rows
    assert stretto.evaluate(config, model=tiny_folder, dataset=mine).samples == 5
    changed = stretto.load_recipe("tldr", task__split="test")
    assert (changed.task.split, changed.task.held_out) == ("test", 0)
    assert stretto.load_recipe("tldr", task__size=9).task.held_out == "validation"


def test_training_on_other_rows_forgets_held_out_ones(tmp_path: Path) -> None:
    settings = {**SMALL, "out": str(tmp_path), "dataset": ROWS, "reward": half, "steps": 1}
    settings["rollout"] = {"batch": 4, "samples_per_prompt": 1, "max_new_tokens": 4}
    settings |= {"model": "tiny", "algorithm": {"name": "ppo"}, "task__columns": {}}
    del settings["warmup_examples"]
    first = stretto.train("posts", **settings)
    assert recipes.load(first.model.parent).task.held_out == 0
    held = jsonl(tmp_path / "held.jsonl", ROWS[:1])
    second = stretto.train("posts", **settings, task__held_out=held)
    assert recipes.load(second.model.parent).task.held_out == held


def test_a_runs_folder_stands_for_its_model_wherever_a_model_is_named(
    tmp_path: Path, tiny_folder: Path
) -> None:
    out = str(tmp_path / "runs")
    quiet: dict[str, Any] = {
        "observe": {"progress": "off"},
        "model": {"name": str(tiny_folder)},
        "out": out,
    }
    demonstrations = jsonl(
        tmp_path / "sft.jsonl", [{"prompt": f"p{i}", "completion": "yes"} for i in range(6)]
    )
    pairs = jsonl(
        tmp_path / "pairs.jsonl",
        [{"prompt": f"p{i}", "chosen": "good", "rejected": "bad"} for i in range(6)],
    )
    stretto.sft(SftConfig(), **quiet, data={"name": demonstrations}, training__lr=1e-2)
    quiet["model"] = {"name": f"{out}/sft-001"}
    stretto.train_reward_model(RewardModelConfig(), **quiet, data={"name": pairs})
    assert recipes.load(f"{out}/reward-001", RewardModelConfig).model.name == f"{out}/sft-001"
    trained, measured, answers, labelled = [], [], [], []
    greedy: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0}
    for inner in ("", "/model"):
        model, source = f"{out}/sft-001{inner}", f"model:{out}/reward-001{inner}"
        given = {"dataset": ROWS, "model": model, "reward": source, "out": out, "steps": 1}
        critic = {"init": f"{out}/reward-001{inner}"}
        result = stretto.train("tiny", **{**SMALL, **given}, critic=critic)
        trained.append(weights(result.model))
        found = stretto.measure(
            "tiny",
            model=model,
            sft=model,
            win_rate_by=source,
            dataset=jsonl(tmp_path / "rows.jsonl", ROWS),
            reference_column="answer",
        )
        assert found.win_rate
        assert found.kl
        measured.append((found.win_rate.score, found.win_rate.reference_score))
        assert found.kl.kl == pytest.approx(0, abs=1e-4)
        answers.append(stretto.generate(model, ["p1"], **greedy))
        file = tmp_path / f"labelled{len(labelled)}.jsonl"
        stretto.label(pairs, by=source, out=file)
        labelled.append(file.read_text())
    assert same(*trained)
    assert measured[0] == measured[1]
    assert answers[0] == answers[1] == stretto.generate(f"{out}/sft-001/model", ["p1"], **greedy)
    assert answers[0] != stretto.generate(tiny_folder, ["p1"], **greedy)
    assert labelled[0] == labelled[1]
    (tmp_path / "runs" / "sft-001" / "model").rename(tmp_path / "moved")
    with raises(ModelError, None, "sft-001"):
        stretto.generate(f"{out}/sft-001", ["p1"])


def test_a_models_responses_are_labelled(tmp_path: Path, tiny_folder: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    options = "--prompts 12 --samples 4 --rollout.max-new-tokens 64 --rollout.stop e"
    gold = vowels(tmp_path)
    line = f"label tiny --responses-from {tiny_folder} --by {gold} --out {out} {options}"
    assert main(line.split()) == 0
    found = stretto.label_responses(
        "tiny",
        model=tiny_folder,
        by=gold,
        out=tmp_path / "again.jsonl",
        prompts=12,
        per_prompt=4,
        rollout={"max_new_tokens": 64, "stop": ("e",)},
    )
    rows = lines(out)
    assert (tmp_path / "again.jsonl").read_text() == out.read_text()
    assert (found.read, found.kept) == (12, len(rows))
    for row in rows:
        for side in ("chosen", "rejected"):
            assert row[f"{side}_score"] == sum(row[side].count(v) for v in "aeiou")


def test_benchmarks_go_to_the_harness(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto import evaluation

    asked: dict[str, Any] = {}
    figure = evaluation.Benchmark("arc_easy", "acc", 0, 0.25, None)

    def benchmark(config: ModelConfig, **rest: Any) -> list[evaluation.Benchmark]:
        asked.update(rest)
        return [figure]

    monkeypatch.setattr(evaluation, "benchmark", benchmark)
    monkeypatch.setattr("stretto.api.inference.require", lambda *_: None)  # not installed here
    found = stretto.benchmark(Config(), ["arc_easy"], model=tiny_folder, limit=3, rollout__batch=7)
    assert found == [figure]
    assert asked == {"model": str(tiny_folder), "tasks": ["arc_easy"], "limit": 3, "batch": 7}


def test_measure_and_label_take_the_rewards_by_name(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "gold.py").write_text(
        "def longest(completions):\n    return [float(len(c)) for c in completions]\n"
    )
    gold = f"{tmp_path / 'gold.py'}:longest"
    out = tmp_path / "out.jsonl"
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "long"}])
    found = stretto.measure(
        "tiny",
        model=tiny_folder,
        win_rate_by=gold,
        reference_column="answer",
        dataset=jsonl(tmp_path / "rows.jsonl", ROWS),
        rollout={"max_new_tokens": 1},  # a byte against three letters
    )
    assert found.win_rate is not None
    assert (found.win_rate.losses, found.samples) == (3, 3)
    stretto.label(pairs, by=gold, out=out, model={"name": str(tiny_folder)})
    (row,) = lines(out)
    assert (row["chosen"], row["rejected"], row["flipped"]) == ("long", "a", True)


def test_generate_answers_in_order(tiny_folder: Path) -> None:
    prompts = ["a", "bb", "ccc"]
    texts = stretto.generate(tiny_folder, prompts, max_new_tokens=3, seed=2)
    options = RolloutConfig(batch=6, samples_per_prompt=2, max_new_tokens=3)
    rows, model = [TaskRow(prompt) for prompt in prompts], ModelConfig(name=str(tiny_folder))
    found = list(generate_each(model, rows, TaskConfig(), options, seed=2))
    each = {answer.number: answer.text for answer in found}
    # The second sample of a prompt has the random numbers of the next prompt's only answer.
    assert sorted(each) == list(range(6))
    repeated = [prompt for prompt in prompts for _ in range(2)]
    assert stretto.generate(tiny_folder, repeated, max_new_tokens=3, seed=2) == [
        each[i] for i in range(6)
    ]
    assert texts[0] == each[0]
    assert [(a.tokens, a.finish) for a in found] == [(3, "length")] * 6
    for bad in ([], "one text"):
        with raises(ConfigError, "prompts-not-list", repr(bad)):
            stretto.generate(tiny_folder, bad)
    with raises(ConfigError, "less_than_equal", "top_p=2"):
        stretto.generate(tiny_folder, ["a"], top_p=2)
    with raises(ConfigError, None, "seed=-1"):
        stretto.generate(tiny_folder, ["a"], seed=-1)
    with raises(TaskError, None, "surrogate"):
        stretto.generate(
            tiny_folder, ["\udcff"]
        )  # as a command line gives bytes that are not UTF-8


def test_compare_and_report(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    reward = {"sources": (vowels(tmp_path),), "missing_eos": "off"}
    settings = {**SMALL, "out": str(out), "reward": reward}
    found = stretto.compare("tiny", {"sync": {}, "streamed": {"score_on": "chunk"}}, **settings)
    assert list(found.figures) == ["sync", "streamed"]
    runs = sorted(out.iterdir())
    assert [run.name for run in runs] == ["streamed-seed0-001", "sync-seed0-001"]
    assert scores(runs[0]) == scores(runs[1])
    page = stretto.report(runs, tmp_path / "page.html")
    assert "streamed-seed0-001" in page.read_text()
    with raises(ConfigError, "literal_error", "'sync', 'oppo'"):
        stretto.compare("tiny", ["sync", "opo"], **settings)
    assert len(list(out.iterdir())) == 2


def test_simulate_is_the_simulator() -> None:
    cluster = Cluster.model_validate(
        {
            "generators": [{"devices": [0], "model": "qwen2.5-7b"}],
            "learner": {"devices": [0], "models": ["qwen2.5-7b"]},
            "workload": {"steps": 2, "batch": 8},
        }
    )
    ours = simulate(priced(cluster), seed=1)
    assert stretto.simulate(cluster, seed=1).makespan_s == ours.makespan_s
