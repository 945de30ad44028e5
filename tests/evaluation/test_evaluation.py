"""Win-rates, drift from the SFT model, LLM judges and benchmarks, against naive references."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

from engine_helpers import StandIn
from helpers import critic_of, left_padded_logprobs
from raising import raises
from stretto import evaluation, tasks
from stretto.cli.main import main
from stretto.config import Config, ModelConfig, RolloutConfig, TaskConfig, recipes
from stretto.errors import (
    ConfigError,
    JudgeError,
    MissingExtraError,
    ModelError,
    RewardError,
    StrettoError,
    TaskError,
)
from stretto.evaluation.generation import answer, generate, open_engine
from stretto.evaluation.gold import compare, end_tokens_of, reference_text, standard_error
from stretto.evaluation.harness import FEWSHOT
from stretto.evaluation.llm_judge import Verdict, counted, open_judge, parse
from stretto.evaluation.measures import describe_rows, measured_on
from stretto.models.load import end_token_ids, load_tokenizer
from stretto.observe import RunDirectory
from stretto.schedules.rollout import Rollout
from stretto.scoring.response_buffer import response_text
from stretto.tasks import TaskRow
from stretto.tasks.prompts import PromptSource
from stretto.types import Score

SAMPLES = 9
BOS = 257  # of the byte tokenizer; it ends turns in some tests
JUDGE = """
def digits(prompts, completions, **_):
    return [float(sum(c in "e 0123456789" for c in text)) for text in completions]

def infinite(prompts, completions, **_):
    return [0.0 for _ in completions]
"""


def noisy(folder: Path, out: Path, scale: float = 0.3, seed: int = 3) -> Path:
    """A copy of a model with other weights, so that it prefers something."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    model.save_pretrained(out)
    load_tokenizer(folder).save_pretrained(out)
    return out


def reward_model(folder: Path, out: Path) -> tuple[Path, Any]:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = critic_of(auto.from_pretrained(folder))
    model.save_pretrained(out)
    load_tokenizer(folder).save_pretrained(out)
    return out, model


@pytest.fixture(scope="module")
def policy(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(tiny_folder, tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    """A dataset of prompts with two columns of references, and short responses."""
    rows = [
        {
            "prompt": f"question {i}:",
            "answer": f"{i}",
            "human": f"reply {'e' * (i % 5)}",
            "chat": [
                {"role": "user", "content": f"question {i}:"},
                {"role": "assistant", "content": "e"},
            ],
            "empty": " ",
        }
        for i in range(12)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config.model_validate(
        {
            "threads": 1,
            "model": {"name": str(tiny_folder), "dtype": "float32", "device": "cpu"},
            "task": {"kind": "dataset", "name": str(data), "columns": {"answer": "answer"}},
            "rollout": {"batch": 4, "max_new_tokens": 6, "temperature": 0.7, "stop": ["y"]},
        }
    )


def sampled(config: Config, policy: Path) -> list[Rollout]:
    """What a measure samples: randomness depends on the seed alone."""
    config = config.with_model(str(policy))
    task, tokenizer = tasks.load(config.task, config.seed), load_tokenizer(policy)
    prompts = PromptSource(task, config.task, tokenizer, config.seed).first(SAMPLES)
    return answer(open_engine(config, tokenizer)[0], prompts)


def test_a_win_rate_by_hand() -> None:
    result = compare("x", [1.0, 2.0, 3.0, 3.0], [0.0, 2.0, 4.0, 1.0])
    assert (result.wins, result.ties, result.losses) == (2, 1, 1)
    assert result.rate == 0.625
    variance = (0.375**2 + 0.125**2 + 0.625**2 + 0.375**2) / 4
    assert result.standard_error == pytest.approx(math.sqrt(variance / 4))
    assert (result.score, result.reference_score) == (2.25, 1.75)


def test_win_rate_by_a_function_sees_both_sides_as_text(
    config: Config, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    by = f"{tmp_path / 'judge.py'}:digits"
    result = evaluation.measure(
        config, policy=str(policy), samples=SAMPLES, by=by, reference_column="human"
    ).win_rate
    tokenizer = load_tokenizer(policy)
    own, references = [], []
    for r in sampled(config, policy):
        text = response_text(tokenizer, r.tokens, r.finish, config.rollout.stop)
        own.append(sum(c in "e 0123456789" for c in text))
        # The stop string 'y' stands in each reference, which is judged whole all the same.
        references.append(sum(c in "e 0123456789" for c in r.prompt.data["human"]))
    assert result == compare(by, own, references)
    assert len(set(own)) > 1
    assert len(set(references)) == 5


def test_win_rate_by_a_reward_model_reads_tokens_with_the_end(
    config: Config, policy: Path, tmp_path: Path
) -> None:
    folder, model = reward_model(policy, tmp_path / "gold")
    by = f"model:{folder}"
    measured = evaluation.measure(
        config, policy=str(policy), samples=SAMPLES, by=by, reference_column="chat"
    )
    tokenizer = load_tokenizer(policy)
    own, references = [], []
    rollouts = sampled(config, policy)
    for r in rollouts:
        given = [*tokenizer("e")["input_ids"], tokenizer.eos_token_id]
        for scores, tokens in ((own, r.tokens), (references, given)):
            ids = torch.tensor([[*r.prompt.tokens, *tokens]])
            scores.append(model(input_ids=ids).logits.item())
    win = measured.win_rate
    assert win is not None
    naive = compare(by, own, references)
    assert (win.wins, win.ties, win.losses) == (naive.wins, naive.ties, naive.losses)
    assert 0 < win.wins < SAMPLES
    assert win.score == pytest.approx(naive.score, abs=1e-5)
    assert win.reference_score == pytest.approx(naive.reference_score, abs=1e-5)
    assert measured.mean_tokens == fmean(len(r) for r in rollouts)
    assert measured.ended == fmean(str(r.finish) == "stop" for r in rollouts)
    assert (measured.samples, measured.temperature) == (SAMPLES, 0.7)


def test_several_sources_score_one_set_of_answers(
    config: Config, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    sources = (f"{tmp_path / 'judge.py'}:digits", "task")
    options: dict[str, Any] = {"policy": str(policy), "samples": SAMPLES}
    alone = [evaluation.measure(config, by=by, **options) for by in sources]
    assert [m.win_rates for m in alone] == [(m.win_rate,) for m in alone]
    sampled: list[int] = []

    def counted(*arguments: Any) -> Any:
        sampled.append(1)
        return answer(*arguments)

    monkeypatch.setattr("stretto.evaluation.measures.answer", counted)
    both = evaluation.measure(config, by=sources, **options)
    assert sampled == [1]
    assert both.win_rates == tuple(m.win_rate for m in alone)
    assert both.win_rate == alone[0].win_rate != alone[1].win_rate
    assert (both.rows, both.distinct, both.overlap) == (config.task.name, SAMPLES, 1.0)
    neither = evaluation.measure(config, by=(), **options)
    assert (neither.win_rates, neither.win_rate, neither.samples) == ((), None, SAMPLES)


def ending_turns(config: Config, policy: Path, out: Path) -> tuple[Config, Path, Any]:
    """A policy that ends its turns with a token that only the generation config names."""
    from transformers import GenerationConfig

    model, tokenizer = _load(policy), load_tokenizer(policy)
    model.generation_config = GenerationConfig(eos_token_id=[BOS, 258], pad_token_id=256)
    model.save_pretrained(out)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<bos>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    tokenizer.save_pretrained(out)
    return config, out, tokenizer


@pytest.mark.parametrize("same", [True, False])
def test_references_end_as_the_policys_responses_do(
    config: Config, policy: Path, tmp_path: Path, same: bool
) -> None:
    """With the token of the generation config; for a model of other tokens, in its own way."""
    config, folder, tokenizer = ending_turns(config, policy, tmp_path / "chat")
    gold, model = reward_model(policy, tmp_path / "gold")
    reader = copy.deepcopy(tokenizer)
    if not same:
        reader.add_tokens(["question"])
        model.resize_token_embeddings(260)
        reader.chat_template = tokenizer.chat_template.replace("<bos>", "<eos>")
        model.save_pretrained(gold)
    reader.save_pretrained(gold)
    measured = evaluation.measure(
        config, policy=str(folder), samples=SAMPLES, by=f"model:{gold}", reference_column="human"
    )
    end = "<bos>" if same else "<eos>"
    own, references = [], []
    rollouts = sampled(config, folder)
    for r in rollouts:
        asked = f"<user>{r.prompt.data['prompt']}{end}\n<assistant>"
        text = response_text(tokenizer, r.tokens, r.finish, config.rollout.stop)
        said = [*reader(asked)["input_ids"], *reader(text)["input_ids"]]
        said += [258] if str(r.finish) == "stop" else []
        if same:
            said = [*r.prompt.tokens, *r.tokens]
        given = reader(f"{asked}{r.prompt.data['human']}{end}")["input_ids"]
        for scores, tokens in ((own, said), (references, given)):
            with torch.no_grad():
                scores.append(model(input_ids=torch.tensor([tokens])).logits.item())
    assert measured.win_rate is not None
    assert measured.win_rate.score == pytest.approx(fmean(own), abs=1e-5)
    assert measured.win_rate.reference_score == pytest.approx(fmean(references), abs=1e-5)


def adapter_of(base: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return folder


def test_end_tokens_are_known_without_the_weights(
    config: Config, policy: Path, tmp_path: Path
) -> None:
    _, folder, tokenizer = ending_turns(config, policy, tmp_path / "chat")
    assert end_tokens_of(folder, tokenizer) == {BOS, 258}
    assert end_tokens_of(folder, tokenizer) == end_token_ids(_load(folder), tokenizer)
    assert end_tokens_of(adapter_of(folder, tmp_path / "adapter"), tokenizer) == {BOS, 258}
    (folder / "generation_config.json").unlink()
    model_config = json.loads((folder / "config.json").read_text())
    for named, expected in (([7, 9], {7, 9, 258}), (5, {5, 258}), (None, {258})):
        text = json.dumps({**model_config, "eos_token_id": named})
        (folder / "config.json").write_text(text)
        assert end_tokens_of(folder, tokenizer) == expected
        assert end_tokens_of(folder, tokenizer) == end_token_ids(_load(folder), tokenizer)


def test_what_is_read_is_said(config: Config) -> None:
    def of(**task: Any) -> str:
        changed = Config.model_validate(
            config.model_dump() | {"task": config.task.model_dump() | task}
        )
        read = measured_on(changed)
        return describe_rows(read.task, read.seed)

    name = config.task.name
    assert of() == name
    assert of(held_out=0.2) == f"{name}; the 20% of its prompts that are held out"
    assert of(held_out="other.jsonl") == "other.jsonl"
    hub = {"name": "owner/name:main"}
    assert of(**hub) == "owner/name:main, split 'train'"
    assert of(**hub, held_out="test") == "owner/name:main, split 'test'"
    tiny = measured_on(recipes.load("tiny"))
    assert describe_rows(tiny.task, tiny.seed) == f"{tiny.task.name}, seed 1000"


def test_the_task_judges_its_own_answers_right(config: Config, policy: Path) -> None:
    result = evaluation.measure(config, policy=str(policy), samples=3, by="task").win_rate
    assert result
    assert (result.reference_score, result.by) == (1.0, "task")
    assert result.rate == (result.wins + result.ties / 2) / 3


def test_kl_and_perplexity_are_those_of_a_naive_forward_pass(
    config: Config, policy: Path, tiny_folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    options: dict[str, Any] = {"policy": str(policy), "samples": SAMPLES, "sft": str(tiny_folder)}
    result = evaluation.measure(config, **options).kl
    assert result
    rollouts = sampled(config, policy)
    pi, sft = (auto.from_pretrained(folder) for folder in (policy, tiny_folder))
    with torch.no_grad():
        kls = [
            (a.sum() - b.sum()).item()
            for a, b in zip(
                left_padded_logprobs(pi, rollouts, 0.7),
                left_padded_logprobs(sft, rollouts, 0.7),
                strict=True,
            )
        ]
        nll = -torch.cat(left_padded_logprobs(sft, rollouts, 1.0))
    mean = fmean(kls)
    assert result.kl == pytest.approx(mean, abs=1e-4)
    assert result.kl > 1
    variance = sum((kl - mean) ** 2 for kl in kls) / (len(kls) - 1)
    assert result.standard_error == pytest.approx(math.sqrt(variance / SAMPLES), abs=1e-4)
    assert result.perplexity == pytest.approx(nll.mean().exp().item(), rel=1e-5)


def test_a_policy_has_no_kl_to_itself(config: Config, policy: Path) -> None:
    result = evaluation.measure(config, policy=str(policy), samples=4, sft=str(policy)).kl
    assert result
    assert result.kl == pytest.approx(0, abs=1e-5)
    rollouts = sampled(config, policy)[:4]
    at_one = left_padded_logprobs(_load(policy), rollouts, 1.0)
    assert result.perplexity == pytest.approx((-torch.cat(at_one).mean()).exp().item(), rel=1e-5)


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder).requires_grad_(False)


def test_what_cannot_be_measured_is_refused_before_sampling(
    config: Config, policy: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("sampled")

    monkeypatch.setattr("stretto.evaluation.measures.answer", never)

    def refused(
        kind: type[StrettoError], code: str, *facts: object, config: Config = config, **options: Any
    ) -> None:
        with raises(kind, code, *facts):
            evaluation.measure(config, policy=str(policy), samples=2, **options)

    greedy = config.rollout.model_copy(update={"temperature": 0.0})
    greedy_config = config.model_copy(update={"rollout": greedy})
    sft = str(tiny_folder)
    refused(ConfigError, "kl-of-greedy-responses", config=greedy_config, sft=sft)
    other = tmp_path / "other"
    _load(tiny_folder).save_pretrained(other)
    tokenizer = copy.deepcopy(load_tokenizer(tiny_folder))
    tokenizer.add_tokens(["question"])
    tokenizer.save_pretrained(other)
    refused(ConfigError, "sft-of-other-tokenizer", other, sft=str(other))
    refused(ConfigError, "no-reward-source", "'gold'", by="gold")
    for by in ("model:./nowhere", f"model:{tiny_folder}"):
        with pytest.raises(ModelError, match=r"no folder|scalar|num_labels|lacks"):
            evaluation.measure(config, policy=str(policy), samples=2, by=by)
    columns: dict[str, Any] = {"by": "task", "reference_column": "nobody"}
    refused(TaskError, "missing-column", "'nobody'", "answer, chat, empty", **columns)
    columns["reference_column"] = "empty"
    refused(TaskError, "no-reference-response", "column 'empty'", **columns)
    unanswered = tmp_path / "unanswered.jsonl"
    unanswered.write_text(Path(config.task.name).read_text().replace('"answer"', '"label"'))
    without = config.task.model_copy(update={"columns": {}, "name": str(unanswered)})
    no_answers = config.model_copy(update={"task": without})
    facts = ("`reference_column`", "chat, empty")
    refused(TaskError, "task-without-answers", *facts, config=no_answers, by="x.py:f")
    monkeypatch.setitem(sys.modules, "openai", None)
    judge = evaluation.LlmJudge("m", "http://127.0.0.1:9/v1")
    refused(MissingExtraError, "missing-library", "pip install 'openai>=1.60'", judge=judge)


def test_a_score_that_is_no_number_stops_the_comparison(
    config: Config, policy: Path, monkeypatch: Any
) -> None:
    class NoNumbers:
        def admit(self, responses: Any) -> None: ...

        def finish(self, ids: list[int]) -> list[Score]:
            return [Score(i, "task", "reward", np.array([math.nan], np.float32)) for i in ids]

    monkeypatch.setattr("stretto.assembly.roles.RoleFactory.open_function", lambda *_: NoNumbers())
    with raises(RewardError, "reward-not-finite", "nan"):
        evaluation.measure(config, policy=str(policy), samples=3, by="task")


def test_a_conversation_stands_for_its_last_turn(config: Config) -> None:
    task = tasks.load(config.task, 0)
    data = {**task.row(2).data, tasks.INDEX_KEY: 2}
    assert reference_text(task, data, "chat") == "e"
    assert reference_text(task, data, "") == "2"
    data["chat"] = data["chat"][:1]
    with raises(TaskError, "no-reference-response", "column 'chat'"):
        reference_text(task, data, "chat")


def test_procedural_tasks_are_measured_on_rows_of_their_own(config: Config) -> None:
    procedural = recipes.load("tiny")
    assert measured_on(procedural).seed == procedural.seed + 1000
    assert measured_on(config).seed == config.seed


# -- the LLM judge -------------------------------------------------------------------------------


class FakeJudge:
    """An OpenAI-compatible endpoint on loopback; ``answers`` makes an answer of (A, B)."""

    def __init__(self, answers: Callable[[str, str], str]) -> None:
        self.answers = answers
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.statuses: list[int] = []
        self.hang: threading.Event | None = None
        self.choices = True
        self.finish_reason = "stop"
        self.refused: tuple[str, ...] = ()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked = json.loads(body)
                status, answer = fake.handle(asked, self.headers["Authorization"])
                refused = [name for name in fake.refused if name in asked]
                status = 400 if refused else status
                payload = json.dumps(
                    {"error": {"message": f"Unsupported parameter: '{refused[0]}'"}}
                    if refused
                    else {
                        "id": "1",
                        "object": "chat.completion",
                        "created": 0,
                        "model": "m",
                        "choices": [
                            {
                                "index": 0,
                                "finish_reason": fake.finish_reason,
                                "message": {"role": "assistant", "content": answer},
                            }
                        ][: fake.choices],
                    }
                ).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.send_header("Retry-After-Ms", "1")
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def handle(self, body: dict[str, Any], key: str | None) -> tuple[int, str]:
        with self.lock:
            self.requests.append(body)
            self.headers.append(key)
            status = self.statuses.pop(0) if self.statuses else 200
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        if self.hang:
            self.hang.wait(20)
        text = body["messages"][1]["content"]
        a, b = (
            text.partition(f"<response_{side}>\n")[2].partition(f"\n</response_{side}>")[0]
            for side in "ab"
        )
        answer = self.answers(a, b)
        with self.lock:
            self.at_once -= 1
        return status, answer

    def close(self) -> None:
        if self.hang:
            self.hang.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeJudge]]:
    pytest.importorskip("openai")
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    opened: list[FakeJudge] = []

    def start(answers: Callable[[str, str], str]) -> FakeJudge:
        opened.append(FakeJudge(answers))
        return opened[-1]

    yield start
    for fake in opened:
        fake.close()


def judged(config: Config, policy: Path, fake: FakeJudge, **options: Any) -> evaluation.Judgement:
    by = evaluation.LlmJudge("m", fake.url, **options)
    result = evaluation.measure(
        config, policy=str(policy), samples=SAMPLES, judge=by, reference_column="human"
    )
    assert result.judge
    return result.judge


def test_a_judge_that_always_takes_the_first_gives_one_half(
    config: Config, policy: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    fake = serve(lambda a, b: "It comes first.\nVerdict: A")
    result = judged(config, policy, fake, concurrency=2)
    assert (result.rate, result.ties, result.consistent) == (0.5, SAMPLES, 0.0)
    assert len(fake.requests) == 2 * SAMPLES
    assert fake.most_at_once <= 2
    assert set(fake.headers) == {"Bearer sesame"}
    assert {(r["temperature"], r["model"]) for r in fake.requests} == {(0, "m")}
    shown = fake.requests[0]["messages"][1]["content"]
    assert "<request>\nquestion" in shown


def test_a_judge_with_a_preference_is_heard_in_both_orders(
    config: Config, policy: Path, serve: Any
) -> None:
    def longer(a: str, b: str) -> str:
        return f"Verdict: {'tie' if len(a) == len(b) else 'A' if len(a) > len(b) else 'B'}"

    result = judged(config, policy, serve(longer))
    tokenizer = load_tokenizer(policy)
    points = []
    for r in sampled(config, policy):
        text = response_text(tokenizer, r.tokens, r.finish, config.rollout.stop)
        difference = len(text) - len(r.prompt.data["human"])
        points.append(0.5 if difference == 0 else float(difference > 0))
    assert result.rate == fmean(points)
    assert (result.wins, result.losses) == (points.count(1.0), points.count(0.0))
    assert result.consistent == 1.0


def test_a_judge_is_asked_again_after_a_servers_error(
    config: Config, policy: Path, serve: Any
) -> None:
    fake = serve(lambda a, b: "Verdict: B")
    fake.statuses = [500, 429, 503]
    assert judged(config, policy, fake).rate == 0.5
    assert len(fake.requests) == 2 * SAMPLES + 3


def test_a_judge_that_refuses_or_hangs_ends_the_evaluation(
    config: Config, policy: Path, serve: Any
) -> None:
    fake = serve(lambda a, b: "Verdict: A")
    fake.statuses = [401] * 2 * SAMPLES
    with raises(JudgeError, "judge-failed", "'m'", fake.url, 401):
        judged(config, policy, fake)
    lost = serve(lambda a, b: "Verdict: A")
    lost.choices = False
    with raises(JudgeError, "no-chat-completion", lost.url):
        judged(config, policy, lost)
    slow = serve(lambda a, b: "Verdict: A")
    slow.hang = threading.Event()
    with raises(JudgeError, "judge-timed-out", "0.2 s"):
        judged(config, policy, slow, timeout_s=0.2)


def test_answers_without_a_verdict_are_counted_and_their_pairs_left_out(
    config: Config, policy: Path, serve: Any
) -> None:
    answers = iter(["I cannot say."] + ["Verdict: tie"] * (2 * SAMPLES - 1))
    result = judged(config, policy, serve(lambda a, b: next(answers)), concurrency=1)
    assert (result.unparsable, result.left_out, result.ties) == (1, 1, SAMPLES - 1)
    with raises(JudgeError, "judge-without-verdicts", SAMPLES):
        judged(config, policy, serve(lambda a, b: "?"))


@pytest.mark.parametrize("refused", ["temperature", "max_tokens"])
def test_a_judge_that_refuses_an_option_is_asked_without(
    config: Config, policy: Path, serve: Any, refused: str
) -> None:
    fake = serve(lambda a, b: "Verdict: A")
    fake.refused = (refused,)
    assert judged(config, policy, fake).ties == SAMPLES
    assert len(fake.requests) == 4 * SAMPLES
    own = {"model", "messages"}
    assert sum(set(r) - own == {"temperature", "max_tokens"} for r in fake.requests) == 2 * SAMPLES
    assert sum(set(r) - own == {"max_completion_tokens"} for r in fake.requests) == 2 * SAMPLES
    fake.refused = ("messages",)
    with raises(JudgeError, "judge-failed", "Unsupported parameter: 'messages'"):
        judged(config, policy, fake)


def test_an_answer_that_was_cut_off_has_no_verdict(
    config: Config, policy: Path, serve: Any
) -> None:
    fake = serve(lambda a, b: "First I thought:\nVerdict: A")
    fake.finish_reason = "length"
    with raises(JudgeError, "judge-without-verdicts", SAMPLES):
        judged(config, policy, fake)


def test_a_judge_can_be_asked_where_an_event_loop_runs(
    config: Config, policy: Path, serve: Any
) -> None:
    """As in a notebook."""
    fake = serve(lambda a, b: "Verdict: A")

    async def notebook() -> evaluation.Judgement:
        return judged(config, policy, fake)

    assert asyncio.run(notebook()).ties == SAMPLES


def test_verdicts_by_hand() -> None:
    verdicts: list[tuple[Verdict | None, Verdict | None]] = [
        ("A", "B"),  # the policy both times
        ("B", "A"),  # the reference both times
        ("A", "A"),  # whichever comes first
        ("tie", "tie"),
        ("tie", "B"),  # a tie, then the policy
        ("A", None),
    ]
    result = counted("m", verdicts)
    assert (result.wins, result.ties, result.losses) == (1, 3, 1)
    assert (result.rate, result.consistent) == (0.5, 0.6)
    assert (result.unparsable, result.left_out) == (1, 1)
    assert result.standard_error == pytest.approx(math.sqrt(0.1 / 5))


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Because.\nVerdict: A", "A"),
        ("**Verdict:** B.", "B"),
        ("Verdict: **tie**", "tie"),
        ("verdict - [b]", "B"),
        ("Verdict: A\nOn second thought:\nVerdict: B", "B"),
        ("B", "B"),
        (" tie. ", "tie"),
        ("So my final verdict: B!", "B"),
        ("**Verdict:**\n\nA", "A"),
        ("Verdict: Apples are better", None),
        ("Verdict: a tie", None),
        ("Verdict: A or B", None),
        ("Verdict: A\nNo:\nVerdict: either A or B", "A"),
        ("Verdict: A\nNo:\nVerdict: B or A", None),
        ("A is better", None),
        ("", None),
    ],
)
def test_verdicts_are_read_from_answers(answer: str, verdict: str | None) -> None:
    assert parse(answer) == verdict


def test_openais_own_endpoint_needs_a_key(serve: Any) -> None:
    with raises(ConfigError, "judge-without-key", "OPENAI_API_KEY", "`judge_url`"):
        open_judge(evaluation.LlmJudge("gpt"))
    with raises(ConfigError, "greater_than", 0):
        evaluation.LlmJudge("gpt", concurrency=0)


# -- benchmarks ----------------------------------------------------------------------------------


def test_benchmarks_get_the_examples_of_the_table(
    config: Config, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[dict[str, Any]] = []

    class TaskManager:
        def __init__(self, include_path: list[str]) -> None:
            names = ["own"] if include_path == [str(tmp_path)] else []
            self.all_tasks = [*FEWSHOT, "mmlu", *names]

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        calls.append(options)
        return {
            "results": {
                name: {"alias": name, "acc,none": 0.25, "acc_stderr,none": 0.125}
                if name != "gsm8k"
                else {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"}
                for name in options["tasks"]
            },
            "n-shot": dict.fromkeys(options["tasks"], options["num_fewshot"] or 3),
        }

    fake: Any = types.ModuleType("lm_eval")
    of_tasks: Any = types.ModuleType("lm_eval.tasks")
    of_tasks.TaskManager = TaskManager
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", of_tasks)
    fake.simple_evaluate = simple_evaluate
    monkeypatch.setitem(sys.modules, "lm_eval", fake)
    (tmp_path / "own.yaml").write_text("dataset_path: json\ntask: own\n")
    names = ["mmlu", "gsm8k", str(tmp_path / "own.yaml")]
    asked: dict[str, Any] = {"model": str(tiny_folder), "batch": 4}
    figures = evaluation.benchmark(config.model, tasks=names, limit=7, **asked)
    assert [(c["tasks"], c["num_fewshot"], c["limit"]) for c in calls] == [
        (["mmlu", "own"], None, 7),
        (["gsm8k"], 5, 7),
    ]
    assert calls[0]["model_args"]["pretrained"] == str(tiny_folder)
    assert calls[0]["batch_size"] == 4
    assert figures == [
        evaluation.Benchmark("mmlu", "acc", 3, 0.25, 0.125),
        evaluation.Benchmark("own", "acc", 3, 0.25, 0.125),
        evaluation.Benchmark("gsm8k", "exact_match,strict-match", 5, 0.5, None),
    ]
    adapter = str(adapter_of(tiny_folder, tmp_path / "adapter"))
    evaluation.benchmark(config.model, tasks=["mmlu"], model=adapter, batch=4)
    given = calls[-1]["model_args"]
    assert (given["pretrained"], given["peft"]) == (str(tiny_folder), adapter)
    with raises(ConfigError, "unknown-benchmark", "'mmlo'", "'mmlu'"):
        evaluation.benchmark(config.model, **asked, tasks=["mmlo"])
    with raises(ConfigError, "unreadable", "nowhere.yaml"):
        evaluation.benchmark(config.model, **asked, tasks=["nowhere.yaml"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with raises(MissingExtraError, "missing-library", "pip install 'lm_eval>=0.4.5'"):
        evaluation.benchmark(config.model, **asked, tasks=["gsm8k"])


# -- the command ---------------------------------------------------------------------------------


def test_the_command_prints_and_keeps_the_figures(
    config: Config,
    policy: Path,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs", "tiny", config)
    run.model.symlink_to(policy)
    command = ["eval", str(run.path), "--samples", "4", "--win-rate-by", "task"]
    command += ["--sft", str(tiny_folder), "--temperature", "0.5", "--out", "figures.json"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    (record,) = run.read_evaluations()
    figures = record["figures"]
    assert f"rows         {config.task.name}\n" in printed
    assert "overlap      4 of 4 prompts (100.0%) are asked in training\n" in printed
    assert (figures["rows"], figures["overlap"]) == (config.task.name, 1.0)
    assert "win_rates" not in figures
    assert (record["model"], record["what"]) == (str(run.model), ["win_rate", "kl"])
    assert figures["samples"] == 4
    assert record["settings"]["rollout"]["temperature"] == figures["temperature"] == 0.5
    assert f"KL           {figures['kl']['kl']:.4f} ± " in printed
    assert f"win-rate     {figures['win_rate']['rate']:.4f} ± " in printed
    assert f"perplexity   {figures['kl']['perplexity']:.4f} of {tiny_folder}" in printed
    written = json.loads(Path("figures.json").read_text())
    assert {**written, "settings": None} == {
        "model": str(run.model),
        **figures,
        "settings": None,
    }
    others = tmp_path / "others.jsonl"
    texts = ["question 3:", " question  4:", "no question:", "no question:"]
    others.write_text("".join(json.dumps({"prompt": t, "answer": "3"}) + "\n" for t in texts))
    for option in ("--task.held-out", "--task.name"):
        assert main(["eval", str(run.path), option, str(others)]) == 0
        printed = capsys.readouterr().out
        assert f"rows         {others}\n" in printed
        assert "samples      4, of 3 different prompts\n" in printed
        assert "overlap      2 of 4 prompts (50.0%) are asked in training\n" in printed
    records = run.read_evaluations()[1:]
    assert [record["what"] for record in records] == [["pass@1", "mean_score"]] * 2
    assert [record["figures"]["overlap"] for record in records] == [0.5, 0.5]


def test_the_command_asks_the_judge(
    policy: Path, serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(lambda a, b: f"Verdict: {'A' if a < b else 'B'}")
    command = ["eval", "tiny", "--model", str(policy), "--samples", "3", "--judge", "m"]
    command += ["--judge-url", fake.url, "--out", str(tmp_path / "out.json")]
    assert main(command) == 0
    figures = json.loads((tmp_path / "out.json").read_text())["judge"]
    assert figures["judge"] == "m"
    printed = capsys.readouterr().out
    assert f"LLM judge    {figures['rate']:.4f} ± " in printed
    assert f"consistent   {figures['consistent']:.4f} of the pairs" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0.5"], "--temperature has no effect without --win-rate-by or --sft"),
        (["--reference-column", "x"], "no effect without --win-rate-by or --judge"),
        (["--judge-url", "http://x"], "--judge-url has no effect without --judge"),
        (["--judge-concurrency", "8"], "--judge-concurrency has no effect without --judge"),
        (["--judge-timeout", "5"], "--judge-timeout has no effect without --judge"),
        (["--temperature", "0"], "--temperature has no effect without --win-rate-by or --sft"),
        (["--lm-eval", "gsm8k", "--samples", "200"], "--samples has no effect on benchmarks"),
        (["--lm-eval-limit", "-1"], "--lm-eval-limit -1: must be greater than or equal to 0"),
        (["--lm-eval-limit", "3"], "no effect without --lm-eval"),
        (
            ["--win-rate-by", "task", "--temperature", "-1"],
            "--temperature -1.0: must be greater than or equal to 0",
        ),
        (["--win-rate-by", "gold"], "'gold' is none of 'task'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "tiny", *options]) == 2
    assert message in capsys.readouterr().err


# -- engines --------------------------------------------------------------------------------------


def by_vllm(config: Config) -> Config:
    rollout = config.rollout.model_copy(update={"engine": "vllm"})
    return config.model_copy(update={"rollout": rollout})


def test_the_engine_of_the_settings_answers(
    config: Config, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the weights of the policy; vLLM is a stand-in, whose tokens are below 11."""
    opened: list[tuple[Any, StandIn]] = []

    def open_requests(settings: Any, kv_bytes_per_token: int, lora_rank: int) -> StandIn:
        opened.append((settings, StandIn()))
        return opened[-1][1]

    monkeypatch.setattr("stretto.rollout.vllm.vllm_engine.open_requests", open_requests)
    monkeypatch.setattr("stretto.rollout.vllm.llm.installed", lambda: Version("0.32"))
    monkeypatch.setattr(StandIn, "longest", 10_000)
    monkeypatch.setattr(StandIn, "ends", {258})
    config = by_vllm(config)
    measured = evaluation.measure(config, policy=str(policy), samples=4, sft=str(policy))
    assert measured.kl is not None
    assert measured.kl.kl == pytest.approx(0, abs=1e-5)
    ((settings, stand_in),) = opened
    assert settings.folder == str(policy)
    assert settings.longest == config.task.max_prompt_tokens + config.rollout.max_new_tokens
    for name, weight in _load(policy).named_parameters():
        assert torch.equal(stand_in.loaded[name], weight)
    options = RolloutConfig(engine="vllm", batch=2, max_new_tokens=3)
    model = ModelConfig(name=str(policy), dtype="float32", device="cpu")
    rows = [TaskRow("one"), TaskRow("another")]
    assert sorted(a.number for a in generate(model, rows, TaskConfig(), options)) == [0, 1]
    assert len(opened) == 2


def test_without_that_engines_library_stretto_s_own_answers(
    config: Config, policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("stretto.rollout.vllm.llm.installed", lambda: None)
    plain = evaluation.measure(config, policy=str(policy), samples=4, sft=str(policy))
    assert evaluation.measure(by_vllm(config), policy=str(policy), samples=4, sft=str(policy)) == (
        plain
    )
    assert "here Stretto's own engine answers" in capsys.readouterr().err


def test_standard_errors_by_hand() -> None:
    """Of a mean with the sample's variance, over n - 1; of a rate sqrt(p (1 - p) / n)."""
    assert standard_error([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt(14 / 2 / 3))
    assert standard_error([1.0, 0.0, 0.0, 0.0], rate=True) == pytest.approx(math.sqrt(3 / 16 / 4))
    assert standard_error([5.0]) == 0.0
