"""The tour: its figures against hand counts, and all of it from end to end."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from examples.tour import WIDTH, analysis, models, rollout, training
from examples.tour.__main__ import main
from stretto.api import load_recipe, simulated
from stretto.api.runs import Job
from stretto.observe import RunDirectory
from stretto.observe.run_directory import RolloutRecord
from stretto.planner.fitting import fewest_gpus, memory_plan
from stretto.saying import format_size
from stretto.schedules.rollout import Rollout, train_batch
from stretto.types import Chunk, FinishReason, Prompt, Score, ScoreKind

SMALL = """
threads = 1
[model]
name = "tiny"
dtype = "float32"
[task]
name = "chain_sum"
settings = {min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}
[rollout]
batch = 8
max_new_tokens = 6
"""


def record(id_: int, prompt_tokens: int, tokens: int, step: int = 1) -> RolloutRecord:
    return RolloutRecord(
        step=step, id=id_, prompt=id_, group=id_, finish="stop", state="trained", because="",
        carries=0, oldest_version=0, newest_version=0, reward=0.5, prompt_tokens=prompt_tokens,
        tokens=tokens,
    )  # fmt: skip


# -- part 1 --------------------------------------------------------------------------------------


def test_models_have_the_parameters_that_are_published() -> None:
    found = {name: plan.parameters for name, plan in models.plans().items()}
    assert found == {
        "huggyllama/llama-7b": 6_738_415_616,
        "huggyllama/llama-13b": 13_015_864_320,
        "huggyllama/llama-30b": 32_528_943_616,
        "meta-llama/Llama-3.1-70B": 70_553_706_496,
    }


def test_the_models_page_shows_the_figures_of_the_memory_plan() -> None:
    text = "\n".join(models.page())
    for each in models.plans().values():
        plan = memory_plan(each.parameters)
        for counting in (plan.sixteen_bit, plan.mixed):
            sizes = (counting["actor"], counting["reference"], counting.total())
            row = " ".join([*map(format_size, sizes), f">= {fewest_gpus(counting)}"])
            assert row in " ".join(text.split())
    assert "llama-7b 6.74 B each 16-bit 40.43 GB" in " ".join(text.split())  # 6 bytes of 6.738 B
    lines = [line.split() for line in text.splitlines()]
    bytes_each = {line[0]: line[-2:] for line in lines if line and line[0] in models.DOES}
    trained, frozen = ["6", "16"], ["2", "2"]
    assert bytes_each == {
        "actor": trained, "critic": trained, "reference": frozen, "reward": frozen
    }  # fmt: skip


# -- part 2 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> list[rollout.WalkStep]:
    folder = tmp_path_factory.mktemp("tour") / "tiny"
    return list(rollout.walk(folder))


def numbers(step: rollout.WalkStep, name: str) -> list[float]:
    """The first response's row of a tensor."""
    tensor = torch.as_tensor(step.tensors[name])
    return tensor.reshape(-1, tensor.shape[-1])[0].tolist()


def shapes(step: rollout.WalkStep) -> list[tuple[int, ...]]:
    return [tuple(torch.as_tensor(tensor).shape) for tensor in step.tensors.values()]


def test_the_walk_has_the_shapes_of_two_prompts_of_20_and_23_bytes(
    walked: list[rollout.WalkStep],
) -> None:
    weights, asked, first, second, third, scores, sent, padded, rewards, gae, batch = walked
    # 256 bytes and three special tokens; hidden states of 64 numbers.
    assert shapes(weights) == [(259, 64), (1, 64)]
    assert shapes(asked) == [(len("Spell backward: tea\n"),), (23,)]
    # The first response ends early; where it no longer does, SEED is to be chosen anew.
    assert numbers(sent, "lengths") == [3, 12, 12, 12]
    # Calls of 4 tokens: the first response and the last, then the second and the last.
    calls = [first, second, third]
    assert [shapes(call) for call in calls] == [[(3,), (3,), (4,), (4,)], [(4,)] * 4, [(4,)] * 4]
    figures = [re.findall(r"Call (\d): (\d+) \D+ (\d) \D+ (\d)", call.text) for call in calls]
    assert figures == [[("1", "15", "4", "1")], [("2", "12", "3", "0")], [("3", "12", "3", "3")]]
    assert "41 prompt tokens" in first.text  # 19 + 22: the last of each is decoded
    assert shapes(scores) == [(1,), (3,), (3,)]
    of_batch, of_tokens = [(4,)] * 2, [(39,)] * 5  # 3 + 3 * 12
    assert shapes(sent) == [*of_batch, *of_tokens, (4,)]
    for step in (padded, gae, batch):
        assert set(shapes(step)) == {(4, 12)}
    assert shapes(rewards) == [(4, 12), (4,), (4, 12)]
    dtypes = [tensor.dtype for tensor in padded.tensors.values()]
    assert dtypes == [torch.bool, torch.float32, torch.float32]


def test_the_walks_values_follow_from_one_another(walked: list[rollout.WalkStep]) -> None:
    *_, scores, sent, padded, rewards, gae, batch = walked
    log_pi, values = numbers(padded, "log pi")[:3], numbers(padded, "V")[:3]
    log_ref = numbers(scores, "response 0: log pi_ref(y_t)")
    score = numbers(rewards, "score r(x, y)")[0]
    assert numbers(scores, "response 0: r(x, y)") == [score] == numbers(sent, "r(x, y)")[:1]
    kl = numbers(rewards, "KL_t")[:3]
    assert kl == pytest.approx([a - b for a, b in zip(log_pi, log_ref, strict=True)], abs=1e-5)
    r = [-0.05 * kl[0], -0.05 * kl[1], -0.05 * kl[2] + score]
    assert numbers(rewards, "r_t")[:3] == pytest.approx(r, abs=1e-5)
    delta = [r[0] + values[1] - values[0], r[1] + values[2] - values[1], r[2] - values[2]]
    last = delta[2]
    middle = delta[1] + 0.95 * last
    advantages = [delta[0] + 0.95 * middle, middle, last]
    assert numbers(gae, "A_t")[:3] == pytest.approx(advantages, abs=1e-5)
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    assert numbers(gae, "R_t")[:3] == pytest.approx(returns, abs=1e-5)
    assert numbers(batch, "returns") == numbers(gae, "R_t")
    assert numbers(batch, "log pi_old") == numbers(padded, "log pi")


def test_the_rollout_page_writes_name_shape_type_and_first_values(tmp_path: Path) -> None:
    text = "\n".join(rollout.page(tmp_path / "tiny"))
    assert re.search(r"KL_t +\[4, 12\]  float32  (-?\d\.\d{3} ){5}\.\.\.", text)
    assert re.search(r"lengths +\[4\] +int64 +3 12 12 12$", text, re.MULTILINE)
    assert re.search(r"x of prompt 1  \[23\]  int  83 112 101 108 108 \.\.\.$", text, re.MULTILINE)


# -- part 3 --------------------------------------------------------------------------------------


def test_the_verdict_compares_the_first_third_with_the_last() -> None:
    names = [metric for label, metric, _ in training.COLUMNS if label in training.JUDGED]
    metrics = [dict.fromkeys(names, value) for value in (0.0, 0.5, 0.0, 0.0, 1.0, 1.0)]
    for step in metrics:
        step["objective/kl"] = 1 - step["objective/kl"]
        step["policy/entropy_avg"] = 2.0
    text = training.verdict(metrics)
    assert text.startswith("Means of the first and the last 2 steps: reward rose from 0.250 to")
    assert "KL fell from 0.750 to 0.000" in text
    assert "entropy stayed from 2.000 to 2.000" in text


# -- part 4 --------------------------------------------------------------------------------------


def payload(message: Any) -> int:
    """Bytes of all arrays in a message, and of token ids as an array of 32 bits would have them."""
    match message:
        case np.ndarray():
            return message.nbytes
        case (int(), *_):
            return 4 * len(message)
        case Mapping():
            return sum(map(payload, message.values()))
        case list() | tuple():
            return sum(map(payload, message))
    if dataclasses.is_dataclass(message):
        return sum(payload(getattr(message, f.name)) for f in dataclasses.fields(message))
    return 0


def replayed(of: RolloutRecord) -> Rollout:
    """A rollout of the recorded lengths, with the scores of the recipe's scorers."""
    prompt, n = Prompt(of.prompt, (0,) * of.prompt_tokens, ""), of.tokens
    tokens, logprobs = array("i", [0] * n), array("f", [0.0] * n)
    made = Rollout(of.id, prompt, of.group, tokens, logprobs, tokens, FinishReason.STOP)
    kinds: dict[str, ScoreKind] = {"task": "reward", "reference": "logprobs", "critic": "values"}
    for source, kind in kinds.items():
        values = np.zeros(1 if kind == "reward" else n, np.float32)
        made.scores[source] = Score(of.id, source, kind, values)
    return made


def test_bytes_of_a_step_are_those_of_the_messages_that_roles_exchange() -> None:
    actor, critic = nn.Linear(10, 5, bias=False), nn.Linear(4, 1)
    records, config = [record(0, 5, 2), record(1, 7, 3)], load_recipe("tiny")
    scorers = analysis.scorers_of(config.reward, config.algorithm)
    counted = analysis.flows(records, scorers, {"actor": actor, "critic": critic})
    made = [replayed(each) for each in records]
    asked = [Rollout(r.id, r.prompt, r.group).response() for r in made]
    chunks = [
        Chunk(r.id, 0, np.array(r.tokens, np.int32), np.array(r.logprobs, np.float32), 0)
        for r in made
    ]
    read = payload([r.response() for r in made])
    scores = {s: payload([r.scores[s] for r in made]) for s in ("task", "reference", "critic")}
    assert counted == {
        ("driver", "generator", "prompts"): payload(asked),
        ("generator", "driver", "tokens, log-probs"): payload(chunks),
        ("driver", "task", "prompts, responses"): read,
        ("task", "driver", "rewards"): scores["task"],
        ("driver", "reference", "prompts, responses"): read,
        ("reference", "driver", "log-probs"): scores["reference"],
        ("driver", "critic", "prompts, responses"): read,
        ("critic", "driver", "values"): scores["critic"],
        ("driver", "learner", "the batch"): payload(train_batch(made)),
        ("learner", "generator", "weights: actor"): 50 * 4,
        ("learner", "critic", "weights: critic"): 5 * 4,
    }
    # The same by hand: 12 tokens of prompts and 5 of responses, of 4 bytes.
    assert (payload(asked), payload(chunks), read) == (12 * 4, 5 * 8, 17 * 4)
    assert list(scores.values()) == [2 * 4, 5 * 4, 5 * 4]


def test_stages_are_means_without_the_first_step() -> None:
    config = load_recipe("tiny")
    scorers = analysis.scorers_of(config.reward, config.algorithm)
    seconds = {"gen": 1.0, "score/task": 0.5, "score/reference": 2.0, "score/critic": 3.0}
    step = {f"timing_s/{name}": s for name, s in (seconds | {"update": 4.0, "step": 12.0}).items()}
    metrics = [dict.fromkeys(step, 100.0) | {"step": 1}, step | {"step": 2}, step | {"step": 3}]
    records = [record(0, 900, 900), record(1, 6, 2, step=2), record(2, 8, 4, step=3)]
    found = analysis.phase_costs(metrics, records, scorers, parameters=1000, epochs=4)
    assert [(s.name, s.seconds, s.tokens, s.operations) for s in found] == [
        ("generation", 1.0, 3.0, 2 * 1000 * 10),
        ("score: task", 0.5, 3.0, 0),
        ("score: reference", 2.0, 10.0, 2 * 1000 * 10),
        ("score: critic", 3.0, 10.0, 2 * 1000 * 10),
        ("training", 4.0, 40.0, 6 * 1000 * 2 * 40),
        ("the rest", 1.5, 0, 0),
    ]
    # Three forward passes of 2, and two models of 6 in four epochs, over a supervised step's 6.
    assert analysis.against_supervised(found, epochs=4) == pytest.approx((9.0, 3.0))


# -- all of it -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recipe of seconds in the place of the tour's own."""
    file = tmp_path_factory.mktemp("recipe") / "small.toml"
    file.write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "RECIPE", str(file))
        patch.setenv("STRETTO_CACHE", str(file.parent / "cache"))
        yield file


@pytest.fixture(scope="module")
def trained(recipe: Path) -> RunDirectory:
    return training.train(recipe.parent, 4)


def test_a_placement_takes_what_compare_says_of_it(trained: RunDirectory, tmp_path: Path) -> None:
    found = {result.name: result for result in analysis.placement_results(trained.path, tmp_path)}
    devices = {"colocated": 1, "apart": 4, "overlapping": 4, "two": 2}
    assert {name: result.devices for name, result in found.items()} == devices
    for name, result in found.items():
        file = "" if name == "colocated" else str(tmp_path / f"{name}.toml")
        simulation = simulated.recorded(str(trained.path), file)
        job = Job(analysis.PLACEMENTS[name][-1], 0)
        times_s = simulation.run(job, simulation.asked(job)).times_s
        assert result.step_s == pytest.approx((times_s[-1] - times_s[0]) / 3)
    assert found["colocated"].idle < found["two"].idle < found["apart"].idle


def test_the_whole_tour_is_plain_text_and_leaves_the_run_that_it_names(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--steps", "3", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    titles = [line for line in text.splitlines() if line[:2] in ("1.", "2.", "3.", "4.")]
    assert len(titles) == 4
    assert text.count("Go on: docs/") == 4
    assert "\x1b" not in text
    own = [line for line in text.splitlines() if "Go on:" not in line]  # these name long folders
    assert [line for line in own if len(line) > WIDTH] == []
    run = RunDirectory.open(tmp_path / "small-001")
    assert [step["step"] for step in run.read_metrics()] == [1, 2, 3]
    assert f"stretto compare --sim {run.path} --placement {run.path / 'two.toml'}" in text


def test_one_part_by_number_or_name_and_nothing_is_left(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    main(["2"])
    assert capsys.readouterr().out.startswith("2. One rollout phase")
    main(["placements", "--steps", "3"])
    text = capsys.readouterr().out
    assert "needs a run of part 3: 3 steps" in text
    assert "3. A few iterations" not in text
    assert list(tmp_path.glob("stretto-tour-*")) == []


def test_the_notebook_prints_what_is_stored_with_it(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts 1 and 2 in full but for fractions, which processors round differently. Parts 3 and 4
    are of another run: their titles and the heads of their tables."""
    monkeypatch.setattr(tempfile, "tempdir", str(recipe.parent))
    notebook = json.loads(Path("examples/tour/tour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    pages = []
    for cell in cells:
        code = "".join(cell["source"]).replace("steps=30", "steps=3")
        exec(compile(code, "tour.ipynb", "exec"), names)
        stored = "".join("".join(output["text"]) for output in cell["outputs"])
        pages.append((capsys.readouterr().out, stored))
    nothing, models_page, rollout_page, *of_runs = pages
    assert nothing == ("", "")
    assert models_page[0] == models_page[1]
    words, stored_words = (re.sub(r"-?\d+\.\d+", "x", text).split() for text in rollout_page)
    assert words == stored_words
    for page in of_runs:
        lines, stored_lines = ([line.split() for line in text.splitlines()] for text in page)
        heads = [row for row in stored_lines if row[:1] in (["3."], ["4."], ["step"], ["stage"])]
        assert len(heads) == 2
        assert [row for row in lines if row in heads] == heads


@pytest.mark.slow
def test_the_recipe_of_the_tour_trains(capsys: pytest.CaptureFixture[str]) -> None:
    main(["training", "--steps", "3"])
    text = " ".join(capsys.readouterr().out.split())
    assert "learns to spell 200 short words backward, first from 4,500 examples" in text
    assert "on 64 responses a step, each batch 4 times" in text
    assert " 3/3 " in text


def test_an_interrupted_tour_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path) -> Iterator[str]:
        folder.mkdir()
        yield "so far"
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rollout, "page", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["rollout"])
    assert capsys.readouterr().out == "so far\n"
    assert list(tmp_path.glob("stretto-tour-*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["5"], "unknown part '5'; the parts are models, rollout, training, placements"),
        (["--steps", "2"], "--steps must be at least 3"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
