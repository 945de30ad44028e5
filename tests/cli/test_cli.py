"""The commands, as a user types them; what computes is replaced by fakes."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import __version__, errors, evaluation, runs
from stretto.cli import doctor
from stretto.cli.main import COMMANDS, main
from stretto.cli.options import COMMON
from stretto.config import Config, ModelConfig, SftConfig, TaskConfig, recipes
from stretto.errors import RewardError
from stretto.evaluation import EvalResult, generation
from stretto.observe import RunDirectory
from stretto.tasks import TaskRow
from stretto.testing import contracts
from stretto.types import FinishReason
from stretto.workers import ray_cluster

EVALUATED = EvalResult(
    rows="rows.jsonl",
    samples=8,
    distinct=7,
    skipped=0,
    overlap=0.5,
    seen="4 of 8 prompts",
    pass_at_1=0.25,
    pass_at_1_standard_error=0.125,
    mean_score=0.375,
    mean_score_standard_error=0.0625,
    mean_tokens=7.5,
    ended=0.875,
)


@dataclasses.dataclass
class Runtime:
    """Stands in for what works with models, and remembers what it was asked."""

    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failure: BaseException | None = None
    steps: int = 1

    def train(self, config: Config, **rest: Any) -> Any:
        self.calls.append({"config": config, **rest})
        if self.steps:
            rest["progress"].step(1, config.steps, {"objective/scores": 0.5}, [])
            rest["run_dir"].append_metrics(1, {"objective/scores": 0.5})
        if self.failure:
            raise self.failure
        return types.SimpleNamespace(stopped="", steps=config.steps)

    def evaluate(self, config: Config, **rest: Any) -> EvalResult:
        self.calls.append({"config": config, **rest})
        return EVALUATED

    def generate(
        self, config: ModelConfig, rows: list[TaskRow], task: TaskConfig, options: Any, **rest: Any
    ) -> Iterator[generation.Answer]:
        prompts = [row.prompt for row in rows]
        about = {"config": config, "prompts": prompts, "task": task, "options": options}
        self.calls.append({**about, **rest})
        each = options.samples_per_prompt
        for number in reversed(range(len(prompts) * each)):
            text = str(prompts[number // each]).upper()
            yield generation.Answer(number, text, 2, FinishReason.LENGTH)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(evaluation, "evaluate", fake.evaluate)
    monkeypatch.setattr(generation, "generate", fake.generate)
    monkeypatch.setattr(runs, "train", fake.train)
    for checked in ("api.training.check_run", "api.training.check_supervised"):
        monkeypatch.setattr(f"stretto.{checked}", lambda *_, **__: None)
    for checked in ("cli.evaluate.check_measured", "api.inference.check_measured"):
        monkeypatch.setattr(f"stretto.{checked}", lambda *_, **__: None)
    monkeypatch.setattr("stretto.runs.checkpoint.require", lambda folder: None)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return fake


def run(*arguments: str) -> int:
    """The exit status, whichever way the command line ends."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_the_tour_is_no_command_and_its_place_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour"]) == 2
    assert "unknown command 'tour'" in (error := capsys.readouterr().err)
    assert "`python -m examples.tour`" in error


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trian") == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


LIGHT = """
import sys
import tomllib
from stretto.cli.main import main

for words in ("--help", "train tiny --help", "recipes", "memory 7B"):
    try:
        main(words.split())
    except SystemExit as end:
        assert not end.code
    assert not {"torch", "transformers", "accelerate"} & set(sys.modules), words
"""


def test_help_starts_fast_without_torch_or_transformers() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], stdout=subprocess.DEVNULL, check=True)


def test_train_help_documents_every_setting_with_the_recipes_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "tiny", "--help-all") == 0
    text = capsys.readouterr().out
    of_files_alone = {"cluster.processes"}  # a list of tables
    for key in set(recipes.setting_names()) - of_files_alone:
        assert "--" + key.replace("_", "-") in text
    assert "(default: tiny)" in text
    flat = " ".join(text.replace("│", " ").split())
    assert "Responses per step. (default: 64)" in flat


def test_train_help_documents_what_users_set_or_a_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "--help") == 0
    text = capsys.readouterr().out
    assert set(re.findall(r"--([a-z]+\.[a-z-]+) ", text)) == {
        key.replace("_", "-") for key in {*COMMON} & {*recipes.setting_names()} if "." in key
    }
    assert f"These are 15 of {len(recipes.setting_names()) - 1} settings" in text
    assert run("train", "--help", "training") == 0
    text = capsys.readouterr().out
    assert "--training.weight-decay" in text
    assert "--rollout.batch" not in text
    assert run("train", "--help", "trainin") == 2
    assert "Did you mean 'training'?" in capsys.readouterr().err


def test_train_runs_the_recipe_with_overrides(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "tiny", "--steps", "7", "--rollout.batch", "16"]
    settings = ["--task.settings", "min_terms=3", "flag=false", "word=+", 'text="3"', "rate=.5"]
    assert run(*arguments, *settings, "--observe.trackers", "tensorboard") == 0
    call = runtime.calls[0]
    config = call["config"]
    assert (config.steps, config.rollout.batch, config.model.name) == (7, 16, "tiny")
    assert config.task.settings == {
        "min_terms": 3,
        "flag": False,
        "word": "+",
        "text": "3",
        "rate": ".5",
    }
    assert config.observe.trackers == ("tensorboard",)
    assert config.warmup_examples == recipes.load("tiny").warmup_examples
    assert call["run_dir"].path == Path("runs/tiny-001")
    assert call["resume"] is False
    assert recipes.load(tmp_path / "runs" / "tiny-001") == config
    text = capsys.readouterr().out
    assert text.startswith("ppo with tiny: 115.2K parameters, float32 on cpu\n7 steps on ")
    assert "; results in runs/tiny-001; checkpoints: 2.765 MB each, " in text
    assert "step 1/7  reward 0.500" in text


def test_settings_of_the_recipe_survive_the_command_line(runtime: Runtime) -> None:
    assert run("train", "arithmetic") == 0
    config = runtime.calls[0]["config"]
    decided = config.model.model_copy(update={"dtype": "auto"})  # as the CPU is fast in
    assert config.model_copy(update={"model": decided}) == recipes.load("arithmetic")
    assert config.model.dtype in ("bfloat16", "float32")


def test_the_default_recipe_is_arithmetic(runtime: Runtime) -> None:
    assert run("train", "--observe.progress", "off") == 0
    assert runtime.calls[0]["config"].model.name == "smollm2-135m"
    assert runtime.calls[0]["run_dir"].name == "arithmetic-001"


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["tinny"], "'tiny'"),
        (["tiny", "--training.lr", "-1"], "--training.lr -1.0"),
        (["tiny", "--rollout.top-k", "5"], "--rollout.top-k"),
        (["tiny", "--rollout.bach", "5"], "--rollout.batch"),
        (["tiny", "--algorithm.kl-estimator", "k9"], "'k1', 'k2', 'k3'"),
        (["tiny", "--steps", "many"], "many"),
        (["tiny", "--task.settings", "min_terms"], "key=value; got 'min_terms'"),
        (["--steps", "3", "tiny"], "write 'tiny' first"),
        (["--resume", "absent"], "'absent'"),
        (["tiny", "--resume", "x"], "leave out the recipe 'tiny'"),
        (["tiny", "--model.name", "smollm"], "'smollm2-135m'"),
    ],
)
def test_what_cannot_be_done_is_said_with_status_2(
    runtime: Runtime, arguments: list[str], fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", *arguments) == 2
    captured = capsys.readouterr()
    shown = " ".join((captured.err + captured.out).replace("│", " ").split())
    assert fact in shown
    assert "Traceback" not in shown
    assert "pydantic" not in shown
    assert not runtime.calls


def test_a_schedule_keeps_its_steps_on_resume(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "tiny", "--training.lr-schedule", "linear") == 0
    assert run("train", "--resume", "runs/tiny-001", "--observe.samples", "1") == 0
    assert run("train", "--resume", "runs/tiny-001", "--steps", "999") == 2
    assert "--steps 999" in capsys.readouterr().err


def test_errors_and_interrupts_of_a_run(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.failure = RewardError("the function failed on sample 3")
    assert run("train", "tiny") == 2
    assert capsys.readouterr().err.endswith("stretto: error: the function failed on sample 3\n")
    runtime.steps = 0
    assert run("train", "tiny") == 2
    capsys.readouterr()
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-001"]  # none without a step
    runtime.failure, runtime.steps = KeyboardInterrupt(), 1
    assert run("train", "tiny") == 130
    captured = capsys.readouterr()
    assert "what was done so far is in runs/tiny-002" in captured.out
    assert captured.err == "stretto: interrupted\n"
    runtime.failure = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run("train", "tiny")


def test_resume_takes_the_runs_settings(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipes.build({"model": {"name": "tiny"}, "seed": 9, "steps": 5}, "here")
    earlier = RunDirectory.create("runs", "own", config)
    assert run("train", "--resume", str(earlier.path), "--steps", "8") == 0
    call = runtime.calls[0]
    assert call["resume"] is True
    assert call["run_dir"].path == earlier.path
    assert (call["config"].seed, call["config"].steps) == (9, 8)
    assert recipes.load(earlier.path).steps == 8
    assert len(list(Path("runs").iterdir())) == 1

    ways_out = ("--reward.on-failure", "0.05", "--reward.timeout-s", "60")
    assert run("train", "--resume", str(earlier.path), *ways_out) == 0
    reward = recipes.load(earlier.path).reward
    assert (reward.on_failure, reward.timeout_s) == (0.05, 60.0)

    assert run("train", "--resume", str(earlier.path), "--training.lr", "1") == 2
    error = capsys.readouterr().err
    assert "--training.lr 1.0" in error
    assert "3e-06" in error
    assert recipes.load(earlier.path).training.lr == 3e-6


def test_a_file_of_settings_takes_the_place_of_the_recipes(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('runtime = "local"\nsteps = 4\n[rollout]\nengines = 2\n')
    assert run("train", "tiny", "--overrides", str(file), "--steps", "6") == 0
    config = runtime.calls[0]["config"]
    assert (config.runtime, config.rollout.engines, config.steps) == ("local", 2, 6)
    assert config.rollout.batch == recipes.load("tiny").rollout.batch

    # A resumed run may move, and may not become another one.
    (earlier,) = Path("runs").iterdir()
    file.write_text('runtime = "inline"\n[cluster]\nrestarts = 5\n')
    assert run("train", "--resume", str(earlier), "--overrides", str(file)) == 0
    config = runtime.calls[1]["config"]
    assert (config.runtime, config.cluster.restarts, config.steps) == ("inline", 5, 6)
    file.write_text("[rollout]\nbatch = 3\n")
    assert run("train", "--resume", str(earlier), "--overrides", str(file)) == 2
    assert "--rollout.batch 3" in capsys.readouterr().err


def test_settings_of_a_file_and_the_command_line_are_checked_together(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What contradicts the recipe in a file is mended by an option; nothing else mends itself."""
    file = tmp_path / "groups.toml"
    file.write_text("[rollout]\nsamples_per_prompt = 5\n")
    given = ["train", "tiny", "--overrides", str(file)]
    assert run(*given, "--rollout.batch", "20") == 0
    assert runtime.calls[0]["config"].rollout.batch == 20
    assert run(*given) == 2
    error = capsys.readouterr().err
    assert f"'{file}' and the command line: --rollout.batch" in error
    for text, fact in (
        ("[rollout]\nengines = 0\n", "--rollout.engines 0"),
        ("[rollout]\nbatsch = 2\n", "'rollout.batsch'"),
        ("rollout = 3\n", "rollout = 3"),
    ):
        file.write_text(text)
        assert run(*given, "--rollout.batch", "20") == 2
        error = capsys.readouterr().err
        assert f"'{file}' and the command line: " in error
        assert fact in error


def test_eval_prints_and_writes_the_figures(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", "tiny", "--samples", "8", "--out", "r.json", "--task.size", "50") == 0
    call = runtime.calls[0]
    assert (call["model"], call["samples"], call["config"].task.size) == ("tiny", 8, 50)
    assert call["config"].rollout == recipes.load("tiny").rollout
    written = json.loads(Path("r.json").read_text())
    del written["settings"]
    assert written == {
        "model": "tiny",
        "rows": "rows.jsonl",
        "samples": 8,
        "distinct": 7,
        "skipped": 0,
        "overlap": 0.5,
        "pass@1": 0.25,
        "pass@1_standard_error": 0.125,
        "mean_score": 0.375,
        "mean_score_standard_error": 0.0625,
        "timeouts": 0,
        "mean_tokens": 7.5,
        "ended": 0.875,
    }
    printed = capsys.readouterr().out
    assert "samples      8, of 7 different prompts\n" in printed
    assert "overlap      4 of 8 prompts\n" in printed
    assert "pass@1       0.2500 ± 0.1250\n" in printed
    assert "mean score   0.3750 ± 0.0625\n" in printed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ("posts.jsonl", "posts-held-out.jsonl")),
        (("--task.name", "mine.jsonl"), ("mine.jsonl", "")),
        (("--task.name=mine.jsonl",), ("mine.jsonl", "")),
        (("--task.name", "mine.jsonl", "--task.held_out", "x.jsonl"), ("mine.jsonl", "x.jsonl")),
        (("--task.held-out=x.jsonl", "--task.name", "m.jsonl"), ("m.jsonl", "x.jsonl")),
        (("--task.system", "Be brief."), ("posts.jsonl", "posts-held-out.jsonl")),
    ],
)
def test_rows_named_for_evaluation_are_those_that_are_measured(
    runtime: Runtime, options: tuple[str, ...], expected: tuple[str, str]
) -> None:
    assert run("eval", "posts", *options) == 0
    assert run("train", "posts", *options) == 0  # and those that its run will be measured on
    for call in runtime.calls:
        task = call["config"].task
        assert (Path(task.name).name, Path(task.held_out_rows).name) == expected


def test_a_split_named_for_evaluation_is_measured(runtime: Runtime) -> None:
    assert run("eval", "tldr", "--task.split", "test") == 0
    task = runtime.calls[0]["config"].task
    assert (task.split, task.held_out) == ("test", 0)


def test_the_settings_of_another_command_are_recognised(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = RunDirectory.create("runs", "sft", SftConfig())
    assert run("eval", str(tuned.path)) == 2
    error = capsys.readouterr().err
    assert "holds settings of 'stretto sft', where those of 'stretto train' are taken" in error
    assert "stretto eval RECIPE --model runs/sft-001" in error
    assert "unknown setting" not in error
    assert run("sft", str(RunDirectory.create("runs", "tiny", Config()).path)) == 2
    assert "stretto sft RECIPE --model.name runs/tiny-001" in capsys.readouterr().err
    assert run("reward", str(tuned.path)) == 2
    assert "holds settings of 'stretto sft', where those of 'stretto reward'" in (
        capsys.readouterr().err
    )
    Path("pairs.toml").write_text('[data]\nchosen_column = "a"')
    assert run("train", "pairs.toml") == 2
    assert "give it to 'stretto reward'" in capsys.readouterr().err


def test_eval_of_a_run_takes_its_trained_model(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = RunDirectory.create("runs", "tiny", recipes.load("tiny"))
    assert run("eval", str(earlier.path)) == 2
    assert "has no trained model" in capsys.readouterr().err
    earlier.model.mkdir()
    assert run("eval", str(earlier.path)) == 0
    assert run("eval", "tiny", "--model", str(earlier.path)) == 0
    assert run("eval", str(earlier.path), "--model", "tiny") == 0
    models = [call["model"] for call in runtime.calls]
    assert models == [str(earlier.model), str(earlier.model), "tiny"]


def test_eval_needs_a_recipe_and_samples(runtime: Runtime) -> None:
    assert run("eval") == 2
    assert run("eval", "tiny", "--samples", "0") == 2
    assert run("eval", "tiny", "--rollout.temperature", "2") == 2
    assert not runtime.calls


def test_generate_answers_in_the_order_asked(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "tiny", "--stop", "\n", "--stop", "x", "--temperature", "0"]
    assert run("generate", *options, "one", "two", "three") == 0
    assert capsys.readouterr().out == "[1] ONE\n[2] TWO\n[3] THREE\n"
    call = runtime.calls[0]
    assert call["options"].stop == ("\n", "x")
    assert (call["options"].temperature, call["options"].batch, call["seed"]) == (0.0, 3, 0)
    assert run("generate", "alone") == 0
    assert capsys.readouterr().out == "ALONE\n"
    assert run("generate", "a", "b", "--samples", "2") == 0
    assert capsys.readouterr().out == "[1.1] A\n[1.2] A\n[2.1] B\n[2.2] B\n"
    assert run("generate", "a", "--samples", "0") == 2
    assert "error: --samples 0: must be greater than 0" in (err := capsys.readouterr().err)
    assert "--batch" not in err


def test_generate_takes_files_and_writes_json_lines(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "hi"}]
    rows = [{"q": "one"}, {"q": turns}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("lines.txt").write_text("one\n\ntwo\n")
    options = ("--system", "Be brief.", "--device", "cpu", "--dtype", "float32", "--chat", "on")
    asked = ("generate", "--prompts", "rows.jsonl", "--prompt-column", "q", "--out", "out.jsonl")
    assert run(*asked, *options) == 0
    assert capsys.readouterr().out == ""
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in found] == ["one", turns]
    about = {"response": "ONE", "finish_reason": "length", "tokens": 2, "index": 0, "sample": 0}
    assert found[0] == {"prompt": "one", **about}
    call = runtime.calls[0]
    assert (call["task"].system, call["task"].chat) == ("Be brief.", "on")
    assert (call["config"].device, call["config"].dtype) == ("cpu", "float32")
    assert run("generate", "--prompts", "lines.txt", "--json", "--samples", "2") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    places = [(row["prompt"], row["index"], row["sample"]) for row in lines]
    assert places == [("one", 0, 0), ("one", 0, 1), ("two", 1, 0), ("two", 1, 1)]
    for wrong in (["x", "--prompts", "lines.txt"], ["--prompts", "no.txt"], ["--prompts", "no"]):
        assert run("generate", *wrong) == 2
    assert run("generate", "x", "--out", f"{tmp_path}/no/out.jsonl") == 2
    written = Path("out.jsonl").read_text()
    assert run("generate", "x", "--out", "out.jsonl", "--top-p", "0") == 2
    assert run("generate", "--prompts", "out.jsonl", "--out", "./out.jsonl") == 2
    assert Path("out.jsonl").read_text() == written
    Path("lines.txt").write_text("a\u2028b\nc\r\n", newline="")
    assert run("generate", "--prompts", "lines.txt", "--out", "out.jsonl") == 0
    found = [json.loads(line) for line in Path("out.jsonl").read_text().split("\n")[:-1]]
    assert [row["prompt"] for row in found] == ["a\u2028b", "c"]


def test_generate_reads_lines(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\n second\n"))
    assert run("generate") == 0
    assert runtime.calls[0]["prompts"] == ["first", " second"]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run("generate") == 2
    assert run("generate", "x", "--top-p", "0") == 2
    assert "--top-p 0.0: must be greater than 0" in capsys.readouterr().err
    assert run("generate", "x", "--stop", "") == 2
    assert "an empty string in --stop" in capsys.readouterr().err


def test_recipes_lists_them_with_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    of_train = [line.split()[1] for line in lines if line.startswith("train ")]
    assert of_train == recipes.names()
    assert lines[0].endswith(recipes.describe("arithmetic"))
    assert len(lines) == sum(len(recipes.names(kind)) for kind in recipes.FOLDERS)


def test_memory_prints_both_countings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("memory", "7B") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["total", "112", "GB", "252", "GB"] in rows
    assert ["actor", "42", "GB", "112", "GB"] in rows
    assert run("memory", "7B", "--lora-rank", "8") == 2
    assert "name a model instead" in capsys.readouterr().err


def test_memory_of_each_gpu_by_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("memory", "7b", "--gpus", "8", "--tp", "2") == 0
    out = capsys.readouterr().out
    expected = "learner { fsdp = 4, tp = 2 }, generators { dp = 4, tp = 2 }, scorers { fsdp = 8 }"
    assert f"{expected}, all on the same GPUs" in out
    # Half of the layers' 6.48e9 and all of the 0.26e9 and 0.13e9 around them: 6.87e9 parameters of
    # actor and critic, 16 bytes of each over four shards. The engine keeps its 2 x 3.5e9 bytes and
    # 64 responses of 1024 tokens of 262 kB each. Frozen are eighths of 2 x (6.74 + 6.61)e9 bytes.
    sizes = "learner's states 27.5, keys and values 17.2, weights 7.0, frozen 3.3"
    assert out.count(sizes) == 4
    phases = [line[:13].strip() for line in out.splitlines()[2:6]]
    assert phases == ["generation", "scoring", "training", "weight sync"]
    assert run("memory", "7B", "--gpus", "8", "--fsdp", "4", "--offload") == 2
    assert "offload moves roles that take turns" in capsys.readouterr().err
    assert run("memory", "7B", "--gpus", "8", "--fsdp", "5") == 0
    assert (
        "learner { fsdp = 5 }, generators { dp = 2 }, scorers { dp = 1 }, apart"
        in capsys.readouterr().out
    )


def test_memory_names_the_phase_that_bursts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("memory", "70B", "--gpus", "16", "--tp", "8", "--offload") == 2
    printed = capsys.readouterr()
    assert "training takes 180.1 GB of each GPU, of which 72 GB can be filled; most" in printed.err
    assert "learner's states. All phases fit with --gpus 128\n" in printed.err
    assert "training      180.1 GB" in printed.out


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["70B", "--gpus", "64"], "--gpus 128 --tp 8, or with --gpus 256 --tp 4"),
        (["13B", "--gpus", "8"], "--gpus 16, or with --tp 4 --offload"),
        (
            ["70B", "--gpus", "128", "--fsdp", "16", "--tp", "4"],
            "--tp 8, or with --gpus 256 --fsdp 64",
        ),
    ],
)
def test_memory_names_options_with_which_all_fits(
    options: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("memory", *options) == 2
    assert capsys.readouterr().err.endswith(f"All phases fit with {remedy}\n")
    first, *_ = remedy.split(", or with ")
    changed = dict(zip(options[1::2], options[2::2], strict=True))
    words = first.split()
    changed |= {w: words[i + 1] for i, w in enumerate(words) if w in ("--gpus", "--tp")}
    flags = ["--offload"] if "--offload" in words else []
    assert run("memory", options[0], *(x for pair in changed.items() for x in pair), *flags) == 0


def test_memory_says_how_many_responses_are_decoded_at_a_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In training, 7B leaves 19.5 GB, and a response's keys and values take 0.54 GB."""
    assert run("memory", "7B", "--gpus", "8") == 0
    out = capsys.readouterr().out
    assert "A generator decodes 32 of its 64 responses at a time, in 2 goes: there is" in out
    assert run("memory", "7B", "--gpus", "32", "--tp", "2") == 0
    assert "at a time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["7B", "--tp", "2"], "add --gpus"),
        (["7B", "--gpus", "8", "--tp", "3"], "--tp divides --gpus"),
        (["7B", "--gpus", "8", "--fsdp", "7"], "with 1 for each. Give --fsdp 8"),
        (["7B", "--gpus", "8", "--gpu", "h10"], "gh200, h100, h200"),
        (["8B", "--gpus", "8"], "one of 7B, 13B, 33B, 70B (Llama)"),
        (["7B", "--gpus", "8", "--lora-rank", "8"], "all weights are trained"),
    ],
)
def test_memory_on_gpus_refuses(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("memory", *options) == 2
    assert message in capsys.readouterr().err


def _doctor_with(monkeypatch: pytest.MonkeyPatch, cached: bool, cache: Path) -> None:
    from stretto.models import resolve

    monkeypatch.setattr(resolve, "is_cached", lambda name: cached, raising=False)
    monkeypatch.setattr(resolve, "cache_dir", lambda: cache)
    monkeypatch.setattr(ray_cluster, "find", lambda: None)


def test_doctor_reports_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _doctor_with(monkeypatch, cached=False, cache=tmp_path / "a" / "b")
    versions = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", _without("wandb", versions))
    assert run("doctor") == 0
    text = capsys.readouterr().out
    assert "smollm2-135m is not cached; the first use downloads it" in text
    assert "not installed: observe.trackers wandb would not work; pip install 'wandb>=0.18'" in text
    assert text.endswith("ready\n")


def test_doctor_lists_each_extra_of_the_project_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _doctor_with(monkeypatch, cached=True, cache=tmp_path)
    versions = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", _without("starlette", versions))
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = sorted(set(project["optional-dependencies"]) - {"dev"})
    assert sorted(doctor._EXTRAS) == extras
    assert run("doctor") == 0
    topics = [line[9:22].strip() for line in capsys.readouterr().out.splitlines()]
    named = sorted(topic for topic in topics if topic in extras)
    assert named == [name for name in extras if name != "vllm" or not doctor.is_installed("vllm")]


def test_doctor_tells_of_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _doctor_with(monkeypatch, cached=True, cache=tmp_path)
    monkeypatch.setattr(doctor, "is_installed", lambda name: name == "ray")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run("doctor") == 0
    assert "ray cluster   none answers at 10.0.0.1:6379 (RAY_ADDRESS)" in capsys.readouterr().out
    monkeypatch.delenv("RAY_ADDRESS")
    assert run("doctor") == 0
    assert "ray cluster   none runs here, nor is" in capsys.readouterr().out
    there = ray_cluster.ClusterResources("10.0.0.1:6379", nodes=2, cpus=64, gpus=8)
    monkeypatch.setattr(ray_cluster, "find", lambda: there)
    assert run("doctor") == 0
    text = capsys.readouterr().out
    assert "ray cluster   10.0.0.1:6379; nodes: 2, CPUs: 64, GPUs: 8" in text
    monkeypatch.setattr(doctor, "is_installed", lambda name: False)
    versions = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", _without("ray", versions))
    needs = ["ray<3,>=2.50; extra == 'ray'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needs)
    assert run("doctor") == 0
    text = capsys.readouterr().out
    assert "ranks on several machines would not work; pip install 'ray<3,>=2.50'" in text
    assert "ray cluster" not in text


def test_doctor_fails_when_something_required_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _doctor_with(monkeypatch, cached=True, cache=tmp_path)
    versions = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", _without("peft", versions, torch="1.9"))
    assert run("doctor") == 1
    text = capsys.readouterr().out
    assert "[BROKEN] peft          not installed; pip install 'peft>=" in text
    assert "[BROKEN] torch         1.9, but " in text
    assert text.endswith("2 broken; nothing can be trained before that is repaired\n")


@pytest.mark.parametrize("clone", [True, False])
def test_doctor_without_an_installed_distribution_does_not_say_ready(
    clone: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _doctor_with(monkeypatch, cached=True, cache=tmp_path)
    versions = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", _without("stretto", versions))
    monkeypatch.setattr(doctor.metadata, "metadata", _without("stretto", versions))
    if not clone:
        monkeypatch.setattr(errors, "PROJECT", tmp_path / "pyproject.toml")
    assert run("doctor") == 0
    *findings, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith(
        "nothing broken was found, but Stretto is not installed: it runs from"
    )
    assert ("none was checked" in verdict) is not clone
    assert any(line.startswith("[  ok  ] pydantic ") for line in findings) is clone


@pytest.mark.parametrize("kept", [True, False])
def test_doctor_checks_the_gpu_that_there_is(
    kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("doctor", "--gpu") == 1
    assert "[BROKEN] cuda          torch sees no GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    found = [("chunks", True, "the same"), ("CUDA graphs", kept, "other tokens")]
    monkeypatch.setattr(contracts, "checked", lambda device: iter(found))
    assert run("doctor", "--gpu") == (0 if kept else 1)
    state = "  ok  " if kept else "BROKEN"
    assert capsys.readouterr().out.splitlines()[:3] == [
        "[  ok  ] cuda:0        the GPU cuda:0",
        "[  ok  ] chunks        the same",
        f"[{state}] CUDA graphs   other tokens",
    ]


def test_contracts_are_kept_on_a_cpu_and_broken_ones_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = list(contracts.checked(torch.device("cpu")))
    assert [name for name, kept, _ in found if kept] == [*contracts.CONTRACTS]
    monkeypatch.setattr(contracts, "EXACT", -1.0)  # no difference is as small
    broken = {name: text for name, kept, text in contracts.checked(torch.device("cpu")) if not kept}
    assert set(broken) == {"learner", "new weights", "streaming"}
    assert all(text.startswith("EngineError: ") for text in broken.values())


def _without(missing: str, versions: Any, **other: str) -> Any:
    def version(name: str) -> str:
        if name == missing:
            raise doctor.metadata.PackageNotFoundError(name)
        return other.get(name) or str(versions(name))

    return version
