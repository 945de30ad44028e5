"""What is remarked on a step's rewards, and the scores that samples are kept with."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto import runs
from stretto.config import Config, recipes
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.observe.recorder import Recorder, Remarks, scores_by_source
from stretto.schedules.rollout import Rollout
from stretto.types import FinishReason, Observation, Prompt, Score


def settings(rule: str = "replace", **reward: Any) -> Config:
    return recipes.build({"reward": {"missing_eos": rule, **reward}}, "here")


def remarks_of(config: Config) -> Remarks:
    return Remarks(config.reward, config.rollout.max_new_tokens)


def responses(*scores: float | None, cut: int = 0, source: str = "task") -> list[Rollout]:
    """One for each score, the first ``cut`` of them without an end."""
    made = []
    for i, score in enumerate(scores):
        finish = FinishReason.LENGTH if i < cut else FinishReason.STOP
        values = np.array([] if score is None else [score], np.float32)
        given = {source: Score(i, source, "reward", values)}
        given["reference"] = Score(i, "reference", "logprobs", np.zeros(1, np.float32))
        tokens = array("i", [5])
        made.append(Rollout(i, Prompt(i, (1,), ""), i, tokens, finish=finish, scores=given))
    return made


def said(remarks: Remarks, step: int, batch: list[Rollout], *rewards: float) -> list[str]:
    return remarks.of(step, batch, dict(enumerate(rewards)))


LIMIT = "responses were cut at rollout.max_new_tokens = 64"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (settings(), "and reward.missing_eos = 'replace' gives each of them -1 in place of its"),
        (settings(missing_eos_penalty=0), "gives each of them 0 in place of its score. Where they"),
        (settings("subtract", missing_eos_penalty=-0.5), "takes 0.5 off the score of each of them"),
        (settings("off"), "and scored as they stood (reward.missing_eos = 'off')"),
        (settings("off", sources=["task", "missing_eos"]), "'missing_eos' takes the penalty off"),
    ],
)
def test_the_first_step_says_what_was_cut_and_what_that_does(config: Config, says: str) -> None:
    (text,) = said(remarks_of(config), 1, responses(0, 1, 1, 0, cut=1), -1, 1, 1, 0)
    assert text.startswith(f"step 1: 1 of 4 {LIMIT}")
    assert says in text
    assert said(remarks_of(config), 1, responses(0, 1), 0, 1) == []


def test_it_is_said_again_where_it_persists_and_not_at_every_step() -> None:
    half, few = responses(0, 0, 1, 1, cut=2), responses(0, 0, 1, 1, cut=1)
    remarks = remarks_of(settings())
    told = [s for s in range(5, 205) if said(remarks, s, half, -1, -1, 1, 0)]
    assert told == [5, 15, 35, 75, 155]  # also where a resumed run does not begin with step 1
    remarks = remarks_of(settings())
    assert [s for s in range(1, 100) if said(remarks, s, few, -1, 1, 1, 0)] == [1]
    remarks = remarks_of(settings())
    assert said(remarks, 1, responses(0, 1), 0, 1) == []
    assert [s for s in range(2, 30) if said(remarks, s, half, -1, -1, 1, 0)] == [2, 12]


def test_a_batch_with_one_reward_is_remarked_on_with_its_cause() -> None:
    teaches = "a batch with one reward teaches nothing"
    (text,) = said(remarks_of(settings()), 1, responses(0.5, 1, cut=2), -1, -1)
    assert text.startswith(f"step 1: all 2 rewards are -1: {teaches}. 2 of 2 {LIMIT}, and reward.")
    (text,) = said(remarks_of(settings()), 7, responses(0, 0), 0, 0)
    assert text == (
        f"step 7: all 2 rewards are 0: {teaches}. They have one score (task 0): the task may be "
        "too hard or too easy for this model, or no answer is found where task.extract looks. "
        "See samples.jsonl"
    )
    own = responses(0.5, 0.5, source="dir/rewards.py:brief")
    (text,) = said(remarks_of(settings()), 7, own, 0.5, 0.5)
    assert "(rewards.py:brief 0.5)" in text
    assert "task.extract" not in text
    remarks = remarks_of(settings(missing_eos_penalty=0))
    both = responses(1, 0, 0, cut=1)
    (text,) = said(remarks, 1, both, 0, 0, 0)
    assert f"1 of 3 {LIMIT}" in text
    assert "; the others have one score (task 0)" in text
    assert [s for s in range(2, 60) if said(remarks, s, both, 0, 0, 0)] == [11, 31]
    assert said(remarks, 60, responses(0, 1), 0, 1) == []
    assert said(remarks_of(settings()), 1, responses(0), 0) == []  # one response is no batch


def test_scores_are_kept_by_source_and_none_where_one_does_not_apply() -> None:
    (rollout,) = responses(None, source="a/b.py:f")
    rollout.scores["task"] = Score(0, "task", "reward", np.array([0.25], np.float32))
    assert scores_by_source(rollout) == {"b.py:f": None, "task": 0.25}


def test_remarks_go_to_the_display_after_the_step(tmp_path: Path) -> None:
    shown: list[str] = []

    class Display(Progress):
        def step(self, step: int, *_: Any) -> None:
            shown.append(f"line {step}")

        def note(self, text: str) -> None:
            shown.append(text.split(":")[0])

    config = settings()
    run = RunDirectory.create(tmp_path, "run", config)
    rejected = responses(0, 0, 0, 0, cut=4)[3]
    with Recorder(config, run, Display()) as recorder:
        for step in (1, 2):
            batch = [*responses(0, 1, cut=1), rejected]
            recorder.step(step, {}, rollouts=batch, rewards={0: -1.0, 1: 1.0})
    assert shown == ["line 1", "step 1", "line 2"]


# -- Four sources, with responses that were cut --------------------------------------------------

REWARDS = """
def brief(completions, **columns):
    return [-len(c) / 1000 for c in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""

SUMS = """
[model]
name = "./my-model"

[task]
kind = "dataset"
name = "sums.jsonl"
columns = { prompt = "question", answer = "ground_truth" }
extract = "last_number"

[reward]
sources = ["task", "rewards.py:brief", "rewards.py:compute_score", "model:./my-reward-model"]
weights = [1.0, 0.2, 0.5, 1.0]

[rollout]
max_new_tokens = 256
"""


def test_four_sources_teach_something_and_what_was_cut_is_said(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Functions of TRL's and verl's kind and a reward model, with an untrained model for chats."""
    from transformers import AutoModelForCausalLM

    from helpers import critic_of
    from stretto.cli.main import main
    from stretto.models.load import load_tokenizer

    monkeypatch.chdir(tmp_path)
    row = {"data_source": "sums"}
    sums = [{**row, "question": f"What is 3 + {n}?", "ground_truth": str(3 + n)} for n in range(8)]
    Path("sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
    Path("rewards.py").write_text(REWARDS)
    Path("sums.toml").write_text(SUMS)
    auto: Any = AutoModelForCausalLM
    actor, tokenizer = auto.from_pretrained(tiny_folder), load_tokenizer(tiny_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    for folder, model in (("my-model", actor), ("my-reward-model", critic_of(actor))):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    small = "--steps 2 --rollout.batch 8 --observe.samples 8 --threads 1 --model.dtype float32"
    assert main(["train", "sums.toml", *small.split()]) == 0
    (run,) = Path("runs").iterdir()
    samples = [json.loads(line) for line in (run / "samples.jsonl").open()]
    cut = [s for s in samples if s["finish"] == "length"]
    ended = [s for s in samples if s["finish"] == "stop"]
    weights = recipes.load(run).reward.weights
    assert (len(samples), weights) == (16, (1.0, 0.2, 0.5, 1.0))
    for s in samples:
        text = s["response"]
        number = s["prompt"].split()[-1].rstrip("?")
        names = ["task", "rewards.py:brief", "rewards.py:compute_score", "my-reward-model"]
        task, brief, verl, learned = (s["scores"][name] for name in names)
        assert brief == pytest.approx(-len(text) / 1000)
        assert verl == float(str(3 + int(number)) in text)
        assert task in (0, 1)
        total = task + 0.2 * brief + 0.5 * verl + learned
        assert s["reward"] == (pytest.approx(total) if s in ended else -1)
    assert len({s["reward"] for s in ended}) == len(ended) >= 2
    printed = capsys.readouterr().out
    first = sum(s["step"] == 1 for s in cut)
    assert f"step 1: {first} of 8 responses were cut at --rollout.max-new-tokens 256" in printed


def test_a_run_without_a_signal_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    notes: list[str] = []

    class Display(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    config = recipes.load("tiny")
    changes = {"steps": 2, "warmup_examples": 0, "model": {"name": str(tiny_folder)}}
    changes |= {"rollout": {"batch": 4, "max_new_tokens": 2}, "reward": {}}
    config = recipes.build({**config.model_dump(), **changes}, "here")
    run = RunDirectory.create(tmp_path, "run", config)
    runs.train(config, run_dir=run, progress=Display())
    remarks = [text for text in notes if text.startswith("step ")]
    assert len(remarks) == 1
    assert remarks[0].startswith("step 1: all 4 rewards are -1: a batch with one reward teaches")
    assert "4 of 4 responses were cut at rollout.max_new_tokens = 2, and" in remarks[0]


def test_limits_that_ended_episodes_are_named() -> None:
    batch = responses(0, 1, 1, 0, cut=3)
    for rollout, why in zip(batch, ("turns", "tokens", "turns", "environment"), strict=True):
        rollout.ended_by = why
    (text,) = said(remarks_of(settings()), 1, batch, -1, -1, -1, 0)
    assert text.startswith(
        "step 1: 3 of 4 episodes were ended by a limit (2 by environment.max_turns, "
        "1 by rollout.max_new_tokens), and reward.missing_eos = 'replace'"
    )
    assert LIMIT not in text


def answered(rollout: Rollout, *errors: str) -> None:
    made = [{"name": "step", "status": "ok", "error": error} for error in errors]
    nothing = np.empty(0, np.int32)
    rollout.log.append(Observation(rollout.id, 1, nothing, record={"calls": made}))


def test_an_environment_of_which_all_calls_fail_is_said_once() -> None:
    batch = responses(0, 1)
    answered(batch[0], "KeyError: 'a' (envs.py, line 3)")
    answered(batch[1], "KeyError: 'b' (envs.py, line 3)")
    remarks = remarks_of(settings())
    assert said(remarks, 1, batch, 0, 1) == [
        "step 1: step: 2 of 2 calls failed. The first: KeyError: 'a' (envs.py, line 3)"
    ]
    assert said(remarks, 2, batch, 0, 1) == []
    answered(batch[0])  # a step that went well has no record
    assert said(remarks_of(settings()), 1, batch, 0, 1) == []
    batch[0].log.pop()
    answered(batch[0], "")
    assert said(remarks_of(settings()), 1, batch, 0, 1) == []
