"""``stretto generate --tools``: a scripted policy over a real chat template and real tools."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raising import raises
from stretto.cli.main import main
from stretto.config import (
    ENVIRONMENT,
    Config,
    EnvironmentConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    recipes,
)
from stretto.environments.running import Runner
from stretto.environments.tools import Results, ToolSet
from stretto.errors import ConfigError
from stretto.evaluation import generation, measures
from stretto.evaluation.generation import Answer, generate
from stretto.tasks import TaskRow
from stretto.types import Chunk, Decoded, FinishReason, Response
from template_helpers import tokenizer_of

FAMILY = "qwen2.5"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: another one
    """
    return a + b


async def program(data, base_url, api_key):
    return 1.0


class Counting:
    def reset(self, **row):
        self.answer, self.turns = row["answer"], 0
        return ""

    def step(self, text):
        self.turns += 1
        return "Sure?", float(text == f"It is {self.answer}."), self.turns == 2, {}
'''


class Talker:
    """An engine that says the next of its texts at each turn, and notes what it has read."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.read = list(texts), list[str]()
        self.tokenizer = tokenizer_of(FAMILY)
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.end, self.settings = end, SimpleNamespace(end_tokens=frozenset({end}))
        self.held: list[Response] = []

    def admit(self, responses: Sequence[Response]) -> None:
        self.held += responses
        for r in responses:
            ids = [*r.prompt.tokens, *r.tokens.tolist()]
            self.read.append(str(self.tokenizer.decode(ids)))

    def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        chunks = []
        for r in self.held:
            ids = self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"]
            tokens = np.array([*ids, self.end], np.int32)
            zeros = np.zeros(len(tokens), np.float32)
            chunks.append(Chunk(r.id, len(r), tokens, zeros, 0, FinishReason.TURN))
        self.held = []
        return Decoded(chunks, 1)

    def release(self, rollout_ids: Sequence[int]) -> None:
        pass


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path / "tools.py"


def talk(monkeypatch: pytest.MonkeyPatch, talker: Talker, **environment: Any) -> list[Answer]:
    monkeypatch.setattr(generation, "open_engine", lambda *given: (talker, None))
    monkeypatch.setattr(generation, "load_tokenizer", lambda *given, **more: talker.tokenizer)
    monkeypatch.setattr(generation, "resolve", lambda *given: Path("model"))
    config = ModelConfig(name="tiny", dtype="float32", device="cpu")
    options = RolloutConfig(batch=1, samples_per_prompt=1, max_new_tokens=200)
    sources = {"sources": ("tools.py:add",), **environment}
    asked = EnvironmentConfig(**sources)
    row = TaskRow("What is 2 + 3?")
    return list(generate(config, [row], TaskConfig(), options, environment=asked))


def test_a_call_is_run_and_its_result_read(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talker = Talker(CALL, "It is 5.")
    (answer,) = talk(monkeypatch, talker)
    assert (answer.text, answer.finish) == ("It is 5.", FinishReason.STOP)
    assert "Add two numbers." in talker.read[0]
    assert talker.read[1].startswith(talker.read[0] + CALL)
    assert "<tool_response>\n5\n</tool_response>" in talker.read[1]
    episode = answer.episode
    assert episode is not None
    (rollout,) = episode.samples
    assert answer.tokens == rollout.sampled_tokens < len(rollout)
    assert [m["role"] for m in episode.messages] == ["assistant", "tool", "assistant"]


def test_the_limit_of_turns_ends_an_episode(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = talk(monkeypatch, Talker(CALL, CALL, CALL), max_turns=2)
    assert answer.finish is FinishReason.STOP  # cut by no limit of tokens
    assert answer.episode is not None
    assert answer.episode.log[-1].ended_by == "turns"


def test_a_program_is_refused_as_it_holds_the_loop(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises(ConfigError, "program-holds-the-loop"):
        talk(monkeypatch, Talker(), sources=("tools.py:program",))


def test_generate_prints_turns_calls_and_results(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**options: str) -> str:
        talker = Talker(f"I call.\n{CALL}", "It is 5.")
        monkeypatch.setattr(generation, "open_engine", lambda *given: (talker, None))
        monkeypatch.setattr(generation, "load_tokenizer", lambda *given, **more: talker.tokenizer)
        more = [text for name, value in options.items() for text in (f"--{name}", value) if text]
        asked = ["--model", "tiny", "--dtype", "float32", "--tools", "tools.py:add", *more]
        assert main(["generate", *asked, "What is 2 + 3?"]) == 0
        return capsys.readouterr().out

    assert said() == 'I call.\nadd({"a": 2, "b": 3}) -> 5\nIt is 5.\n'
    record = json.loads(said(json=""))
    assert record["response"] == "It is 5."
    assert record["calls"][0]["arguments"] == {"a": 2, "b": 3}
    assert (record["turns"], record["ended_by"]) == (2, "environment")
    assert record["messages"][1]["content"] == "5"


def settings_of(tmp_path: Path, tiny_folder: Path, **sections: Any) -> Config:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    tokenizer_of(FAMILY).save_pretrained(folder)
    rows = [{"q": f"What is 2 + {n}?", "answer": f"{2 + n}"} for n in (3, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {
        "kind": "dataset",
        "name": str(tmp_path / "rows.jsonl"),
        "extract": "last_number",
    }
    task["columns"] = {"prompt": "q", "answer": "answer"}
    rollout = {"batch": 2, "max_new_tokens": 300}
    model = {"name": str(folder), "dtype": "float32", "device": "cpu"}
    return recipes.build({"model": model, "task": task, "rollout": rollout, **sections}, "here")


def test_eval_lets_the_verifier_judge_what_an_episode_ends_with(
    tools: Path, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = Talker(CALL, CALL, "It is 5.", "It is 5.")
    monkeypatch.setattr(measures, "open_engine", lambda *given: (talker, None))
    config = settings_of(tmp_path, tiny_folder, environment={"sources": ["tools.py:add"]})
    result = measures.evaluate(config, model=config.model.name, samples=2)
    assert (result.samples, result.pass_at_1, result.ended) == (2, 0.5, 1.0)
    with raises(ConfigError, "measure-with-environment"):
        measures.measure(config, policy=config.model.name, samples=2, by="task")


def test_eval_takes_the_environments_reward_where_that_is_what_is_trained_on(
    tools: Path, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = Talker(*["It is 5."] * 4)
    monkeypatch.setattr(measures, "open_engine", lambda *given: (talker, None))
    named = {"environment": {"sources": ["tools.py:Counting"]}}
    rewards = {"reward": {"sources": ["environment"]}}
    config = settings_of(tmp_path, tiny_folder, **named, **rewards)
    result = measures.evaluate(config, model=config.model.name, samples=2)
    assert (result.mean_score, result.pass_at_1) == (1.0, 0.5)  # 2 points for one, 0 for the other


def test_records_tell_what_was_not_run_and_what_took_too_long() -> None:
    async def hang() -> str:
        await asyncio.sleep(60)
        return ""

    async def answered() -> list[dict[str, Any]]:
        tools = ToolSet({"hang": hang}, Runner(4, 0.01), Results())
        call = {"arguments": {}, "raw": "", "id": ""}
        asked = [{**call, "name": "hang", "status": "ok"}, {**call, "name": "no", "status": "ok"}]
        asked.append({**call, "name": "", "status": "unclosed"})
        return (await tools.answer(asked))[1]

    late, unknown, unclosed = asyncio.run(answered())
    assert (late["status"], late["timed_out"]) == ("ok", True)
    assert unknown["status"] == "unknown"
    assert unclosed["status"] == "unclosed"
    assert "timed_out" not in {**unknown, **unclosed}


def test_tools_need_messages(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--tools", "tools.py:add", "--chat", "off"]) == 2
    assert "--chat off" in capsys.readouterr().err


def test_an_environment_that_cannot_be_opened_says_what_its_row_has(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tools.parent / "mine.py").write_text(
        "class Needs:\n"
        "    def reset(self, seed=None, options=None):\n"
        "        return str(options['goal']), {}\n"
        "    def step(self, action):\n"
        "        return '', 0.0, True, {}\n"
    )
    (answer,) = talk(monkeypatch, Talker("a"), sources=("mine.py:Needs",))
    assert answer.episode is not None
    why = answer.episode.log[-1].record["failure"]
    assert "KeyError" in why
    assert "its row has no columns" in why
    monkeypatch.setattr(generation, "open_engine", lambda *given: (Talker(), None))
    monkeypatch.setattr(generation, "load_tokenizer", lambda *given, **more: Talker().tokenizer)
    assert main(["generate", "x", "--model", "tiny", "--tools", "mine.py:Other"]) == 2
    assert "stretto: error: --tools: '" in capsys.readouterr().err


def test_functions_give_no_rewards(tools: Path, tmp_path: Path, tiny_folder: Path) -> None:
    sections = {"environment": {"sources": ["tools.py:add"]}, "reward": {"sources": [ENVIRONMENT]}}
    config = settings_of(tmp_path, tiny_folder, **sections)
    with raises(ConfigError, "environment-without-rewards"):
        measures.evaluate(config, model=config.model.name, samples=1)
