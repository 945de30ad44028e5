"""Tools and environments of TRL's trainers, called in this process between turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raising import raises
from stretto.errors import ConfigError, TaskError
from stretto.models.load import load_tokenizer
from stretto.models.tiny import make_tiny
from stretto.trl import GRPOConfig, GRPOTrainer
from stretto.trl.trainer_inputs import answering

ROWS = [{"prompt": [{"role": "user", "content": f"open {n}"}], "code": n} for n in range(4)]


class Safe:
    """Counts what is asked of it."""

    resets: list[int] = []  # noqa: RUF012  # of all objects

    def reset(self, code: int, **columns: Any) -> str:
        self.resets.append(code)
        self.code = code
        return " now"

    def turn(self, to: int) -> str:
        """Turn the dial.

        Args:
            to: where to
        """
        return "open"

    def get_reward(self) -> float:
        return 0.25


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: another
    """
    return a + b


class Guess:
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "right", 1.0, True, False, {}


class Bell:
    def reset(self, **columns: Any) -> str:
        return ""

    def ring(self) -> str:
        """Ring it."""
        return "ding"


def test_what_gives_rewards_is_a_source_of_them(tmp_path: Path) -> None:
    make_tiny(tmp_path, chat=True)
    tokenizer = load_tokenizer(tmp_path)

    def gives(factory: Any, tools: Any = None) -> bool:
        return answering(tools, factory, tokenizer).rewards

    assert [gives(factory) for factory in (Guess, partial(Guess), Safe)] == [True] * 3
    assert gives({"bell": Bell, "guess": Guess})
    assert not gives(Bell)
    assert not gives(None, [add])
    assert not gives(None)


def seen(completions: Sequence[list[dict[str, str]]], **_: Any) -> list[float]:
    return [float(c[0]["role"] == "assistant" and len(c) == 1) for c in completions]


def opened(completions: Any, environments: Sequence[Safe], code: Sequence[int]) -> list[float]:
    return [0.5 * (e.code == c) for e, c in zip(environments, code, strict=True)]


@pytest.mark.parametrize(
    ("answers", "rewards", "sources", "total"),
    [
        (
            {"environment_factory": partial(Safe)},
            [seen, opened],
            ("seen", "opened", "environment"),
            1.75,
        ),
        ({"tools": [add]}, seen, ("seen",), 1.0),
    ],
    ids=["environment_factory", "tools"],
)
def test_a_trainer_plays_episodes(
    answers: dict[str, Any], rewards: Any, sources: tuple[str, ...], total: float, tmp_path: Path
) -> None:
    """The untrained policy calls no tool, so each episode ends with its first turn."""
    make_tiny(tmp_path / "model", chat=True)
    args = GRPOConfig(
        str(tmp_path / "out"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=9,
        max_steps=1,
        max_tool_calling_iterations=3 if "tools" in answers else None,
        mask_truncated_completions=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
    )
    Safe.resets.clear()
    model, rows = str(tmp_path / "model"), ROWS
    trainer = GRPOTrainer(model, rewards, args=args, train_dataset=rows, **answers)
    assert trainer.config.reward.sources == sources
    assert trainer.config.environment.max_turns == (4 if "tools" in answers else 9)
    trainer.train()
    assert trainer.run_dir is not None
    row = trainer.state.log_history[0]
    assert row["tools/call_frequency"] == row["tools/failure_frequency"] == 0.0
    assert trainer.reward_func_names == [s.replace("environment", "Safe") for s in sources]
    assert trainer.reward_weights.tolist() == [1.0] * len(sources)
    if "environment" in sources:
        assert (row["rewards/Safe/mean"], row["rewards/Safe/std"]) == (0.25, 0.0)
    samples = [json.loads(line) for line in trainer.run_dir.samples_file.open()]
    assert {sample["ended_by"] for sample in samples} <= {"environment", "tokens"}
    assert {sample["reward"] for sample in samples} == {total}
    if "environment" in sources:
        assert len(Safe.resets) == 8
        assert all(" now" in sample["prompt"] and "turn" in sample["prompt"] for sample in samples)
    else:
        assert all("Add two numbers" in sample["prompt"] for sample in samples)


class Owner:
    """Brings its prompts and its reward."""

    prompts: list[str] = []  # noqa: RUF012  # of all objects

    def reset(self, **columns: Any) -> str:
        assert "answer" not in columns
        self.prompts.append("Say " + "something " * 40)
        return self.prompts[-1]

    def look(self) -> str:
        """Look around."""
        return "nothing"

    def get_reward(self) -> float:
        return 0.75


def test_an_environment_may_own_data_and_reward(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", chat=True)
    given: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 9,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
    }
    Owner.prompts.clear()
    model, args = str(tmp_path / "model"), GRPOConfig(**given, max_steps=2)
    trainer = GRPOTrainer(model, args=args, environment_factory=Owner)
    assert len(trainer.train_dataset) == 2  # prompts of a batch
    assert trainer.reward_func_names == ["Owner"]
    trainer.train()
    assert len(Owner.prompts) == 2 * 8
    rows = trainer.state.log_history[:2]
    assert [row["rewards/Owner/mean"] for row in rows] == [0.75, 0.75]
    assert trainer.run_dir is not None
    for line in trainer.run_dir.samples_file.open():
        assert Owner.prompts[0].strip() in json.loads(line)["prompt"]
    with raises(ConfigError, "argument-missing", "environment_factory"):
        GRPOTrainer(model, args=GRPOConfig(**given, max_steps=2), reward_funcs=seen)
    with raises(ConfigError, "argument-missing", "environment_factory"):
        GRPOTrainer(model, args=args, environment_factory={"a": Owner})
    with raises(ConfigError, "no-length", "max_steps"):
        GRPOTrainer(model, args=GRPOConfig(**given), environment_factory=Owner)
    with raises(ConfigError, "no-rewards"):
        GRPOTrainer(model, args=args, environment_factory=Bell)


class Keeper(Owner):
    rows: list[dict[str, Any]] = []  # noqa: RUF012  # of all objects

    def reset(self, **columns: Any) -> str:
        self.rows.append(columns)
        return f"Say {columns['word']} " * 60


@pytest.mark.parametrize("named", [False, True], ids=["one", "by-name"])
def test_rows_may_lack_prompts_if_an_environment_gives_them(named: bool, tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", chat=True)
    rows = [{"word": word, "environment": "keeper"} for word in ("cat", "dog")]
    args = GRPOConfig(
        str(tmp_path / "out"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=9,
        max_steps=1,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
    )
    Keeper.rows.clear()
    factory: Any = {"keeper": Keeper} if named else Keeper
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        environment_factory=factory,
    )
    assert trainer.evaluate()["eval_reward"] == 0.75
    trainer.train()
    assert len(Keeper.rows) == 2 + 8
    assert {row["word"] for row in Keeper.rows} == {"cat", "dog"}
    assert not any("prompt" in row for row in Keeper.rows)
    assert trainer.run_dir is not None
    for line in trainer.run_dir.samples_file.open():
        prompt = json.loads(line)["prompt"]
        assert ("Say cat Say cat" in prompt) != ("Say dog Say dog" in prompt)
    with raises(TaskError, "missing-column", "'prompt'"):
        GRPOTrainer(
            str(tmp_path / "model"),
            reward_funcs=seen,
            args=args,
            train_dataset=rows,
            tools=[add],
        )


class Server(Owner):
    """Has an address of its own, of which there are as many as TRL makes objects."""

    addresses: list[str] = []  # noqa: RUF012  # that no object has

    def __init__(self) -> None:
        self.address = self.addresses.pop()

    def reset(self, **columns: Any) -> str:
        return " now"


def made_server() -> Server:
    return Server()


@pytest.mark.parametrize("factory", [Server, made_server, {"server": Server}])
def test_environments_are_as_many_as_responses_generated_at_a_time(
    factory: Any, tmp_path: Path
) -> None:
    """TRL makes ``generation_batch_size`` objects and resets them; here 16 episodes share 4."""
    make_tiny(tmp_path / "model", chat=True)
    Server.addresses[:] = ["a", "b", "c", "d"]
    rows = [{**row, "environment": "server"} for row in ROWS]
    args = GRPOConfig(
        str(tmp_path / "out"),
        per_device_train_batch_size=4,
        steps_per_generation=1,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=9,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
    )
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        args=args,
        train_dataset=rows,
        eval_dataset=rows * 2,
        environment_factory=factory,
    )
    assert trainer.args.generation_batch_size == 4
    trainer.train()
    trainer.evaluate()
    assert trainer.run_dir is not None
    records = [json.loads(line) for line in trainer.run_dir.samples_file.open()]
    assert not any(record.get("failures") for record in records)
    history = trainer.state.log_history
    assert {row["reward"] for row in history if "reward" in row} == {0.75}
    assert {row["eval_reward"] for row in history if "eval_reward" in row} == {0.75}


def test_rows_name_one_of_several_environments(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", chat=True)
    args = GRPOConfig(str(tmp_path / "out"), max_steps=1, num_generations=4, use_cpu=True)
    for environment, named in (({"environment": "vault"}, "'vault'"), ({}, "None")):
        with raises(
            TaskError, "unknown-environment", f"row 1: the column 'environment' is {named}"
        ):
            GRPOTrainer(
                str(tmp_path / "model"),
                args=args,
                train_dataset=[{**ROWS[0], "environment": "safe"}, {**ROWS[1], **environment}],
                environment_factory={"safe": Owner, "bell": Bell},
            )
