"""Rewards from code in a separate process: the task's verifier, a user's function or a server.

A reward function fails on a sample if it raises, hangs, ends its process, or returns a number that
is not finite as float32. A failure is reported with the sample and never becomes a number. A TRL
function may return ``None`` if it does not apply to the sample.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stretto import outside
from stretto.config import TaskConfig
from stretto.config.capabilities import FUNCTION, SOURCES
from stretto.config.sections import RewardSource
from stretto.errors import ConfigError, EngineError, RewardError
from stretto.plain import plain
from stretto.scoring.conventions import ENVIRONMENTS, TIMED_OUT, Verdict, recognise
from stretto.scoring.function_host import FunctionHost
from stretto.scoring.response_buffer import ResponseScorer, response_text
from stretto.tasks.task import INDEX_KEY, fingerprint
from stretto.types import Response, Score, ScorerInfo, WeightsRef
from stretto.workers.child import (
    Child,
    Deadline,
    Inbox,
    LateError,
    Message,
    MismatchError,
    ProcessLostError,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETRY_LIMITS = 4
"""Most time limits to spend on scoring a failed batch again, one sample at a time."""

Payload = Mapping[str, Any]

_log = logging.getLogger(__name__)


class FunctionScorer(ResponseScorer):
    """Scores finished rollouts by the task's verifier, a server or a user's function.

    The process starts at construction, so that mistakes show before anything heavy is loaded. After
    a hang it restarts, and its memory is lost.

    Args:
        source: the task's verifier, a server, or a function. The function's file or module is
            relative to the working directory, or the module is installed.
        stop: strings that end a response or turn. They are not scored.
        timeout_s: for all responses of one ``finish`` call.
        columns: of the dataset. A function that requires another one is refused.
        function: the caller's object for ``source``. It runs in this process, with no time limit.
        max_steps: of the run, for TRL's ``trainer_state``.
        environment: whether the run has an environment. If so, functions with the parameter
            ``environments`` run in its process, and this class only makes their samples.

    Attributes:
        global_step: steps of the run so far, for ``trainer_state``.
        looks_inside: whether the function runs in the environment's process.
        timeouts: answers that the task's verifier could not compare in time.
    """

    def __init__(
        self,
        source: RewardSource,
        task: TaskConfig,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop: Sequence[str] = (),
        timeout_s: float = 30.0,
        columns: Collection[str] | None = None,
        function: Callable[..., Any] | None = None,
        max_steps: int = 0,
        environment: bool = False,
    ) -> None:
        super().__init__(source.name)
        self.global_step, self._max_steps = 0, max_steps
        self.info = ScorerInfo(
            source.name, "reward", streams=False, reads_text=True, whole_episodes=True
        )
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._timeout_s = timeout_s
        self._payload: Callable[[Response, str], Payload] = self._function_payload
        self._process: FunctionProcess | LocalFunction
        self._verifies = function is None and source.kind.verifies
        self.timeouts = 0
        if function is not None:
            self._process = LocalFunction(function)
        elif self._verifies:
            self._payload = _task_payload
            opening = {"task": task.model_dump(), "seed": seed}
            self._process = FunctionProcess(opening, limit_each=True)
        else:
            self._process = FunctionProcess(locate(source))
        properties = self._process.start()
        self._columns: list[str] | None = properties["columns"]
        self.looks_inside: bool = environment and properties["environments"]
        if self.looks_inside:
            self.close()
        if columns is not None:
            available_columns = {*columns, ENVIRONMENTS} if self.looks_inside else columns
            try:
                require_columns(source.name, properties["required"], available_columns)
            except ConfigError:
                self.close()
                raise

    @property
    def in_process(self) -> bool:
        return isinstance(self._process, LocalFunction)

    def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        responses = self._take(rollout_ids)
        texts = list(map(self._text, responses))
        return list(map(self._score, responses, texts, self._ask_all(responses, texts)))

    def sample(self, response: Response) -> Payload:
        """Return the function's input. Raises RewardError for a column without a JSON form."""
        return self._payload(response, self._text(response))

    def failure(self, response: Response, why: str) -> str:
        return self._failure(response, self._text(response), why)

    def load(self, weights: WeightsRef) -> None:
        """Raise EngineError, because a function has no weights."""
        raise EngineError(f"scorer '{self.name}' is a function: no weights", "scorer-frozen")

    def close(self) -> None:
        self._process.close()

    def _score(self, r: Response, text: str, verdict: Verdict) -> Score:
        failure, value = verdict.get("error"), verdict.get("value")
        values = np.array([] if value is None else [value], dtype=np.float32)
        self.timeouts += self._verifies and "timeouts" in verdict.get("extra", {})
        if failure is not None:
            failure = self._failure(r, text, failure)
        return Score(r.id, self.name, "reward", values, failure, verdict.get("extra", {}))

    def _text(self, r: Response) -> str:
        ids = r.tokens.tolist()
        return response_text(self._tokenizer, ids, r.finish, self._stop, r.sampled, r.joints)

    def _failure(self, r: Response, text: str, why: str) -> str:
        return (
            f"'{self.name}' failed on rollout {r.id}: {why}\n"
            f"  prompt: {_short(r.prompt.text)}\n"
            f"  response: {_short(text)}"
        )

    def _ask_all(self, responses: Sequence[Response], texts: Sequence[str]) -> list[Verdict]:
        """Ask for all verdicts in one call, and for missing ones again one at a time."""
        verdicts: dict[int, Verdict] = {}
        payloads: dict[int, Payload] = {}
        for at, (response, text) in enumerate(zip(responses, texts, strict=True)):
            try:
                payloads[at] = self._payload(response, text)
            except RewardError as error:
                verdicts[at] = {"error": str(error)}
        answers = self._ask(payloads, verdicts)
        missing = [at for at in payloads if at not in verdicts]
        if len(payloads) == 1 and missing:
            verdicts[missing.pop()] = self._unscored(answers.trouble, late=answers.late)
        if missing:
            _log.warning(
                "reward source '%s' on %d responses: %s; asking about %d of them one at a time",
                *(self.name, len(payloads), answers.trouble, len(missing)),
            )
        give_up_s = time.monotonic() + RETRY_LIMITS * self._timeout_s
        for at in missing:
            if time.monotonic() >= give_up_s:
                why = "not scored, as too much time went into others of its batch"
                verdicts[at] = self._unscored(f"{why} ({answers.trouble})", late=True)
                continue
            retry = self._ask({at: payloads[at]}, verdicts)
            verdicts.setdefault(at, self._unscored(retry.trouble, late=retry.late))
        return [verdicts[at] for at in range(len(responses))]

    def _ask(self, payloads: Mapping[int, Payload], verdicts: dict[int, Verdict]) -> Answers:
        if not payloads:
            return Answers([])
        places = list(payloads)
        answers = self._process.ask(list(payloads.values()), self._timeout_s)
        verdicts.update((places[verdict["at"]], verdict) for verdict in answers.verdicts)
        return answers

    def _unscored(self, why: str | None, *, late: bool) -> Verdict:
        """Return the verdict on an unscored sample: wrong if the task's verifier took too long,
        because it compares right answers in time. Otherwise a failure.
        """
        return TIMED_OUT if late and self._verifies else {"error": why}

    def _function_payload(self, response: Response, text: str) -> Payload:
        prompt = response.prompt
        row = {key: value for key, value in prompt.data.items() if key != INDEX_KEY}
        if self._columns is not None:
            row = {key: row[key] for key in self._columns if key in row}
        if self.looks_inside or not self.in_process:
            row = {key: _as_json(key, value) for key, value in row.items()}
        turns = prompt.messages
        text_of_row = prompt.text if turns is None else turns[-1]["content"]
        return {
            "prompt": prompt.text,
            "asked": text_of_row if turns is None or prompt.from_text else list(turns),
            "response": text,
            "tokens": response.tokens.tolist(),
            "data": row,
            **({} if response.messages is None else {"messages": list(response.messages)}),
            "state": {"global_step": self.global_step, "max_steps": self._max_steps},
        }


def _task_payload(response: Response, text: str) -> Payload:
    data = response.prompt.data
    if INDEX_KEY not in data:
        raise RewardError("the prompt is no row of the task, and only its rows can be verified")
    turns = [m["content"] for m in response.messages or () if m["role"] == "assistant"]
    answer = turns[-1] if turns else text
    return {"index": data[INDEX_KEY], "fingerprint": fingerprint(data), "response": answer}


def _as_json(column: str, value: Any) -> Any:
    try:
        return plain(value, finite=False)
    except RecursionError as error:
        raise RewardError(
            f"the dataset's column '{column}' cannot be handed to a function ({error}); make it "
            "text, numbers, or lists and objects of them"
        ) from error


def locate(source: RewardSource) -> dict[str, str]:
    """Return a function's location, or a server's URL. ConfigError if missing or unsafe."""
    if source.kind.place == "url":
        from stretto.scoring.remote import check_url

        check_url(source.name)
        return {"url": source.name}
    if not source.kind.place:
        examples = [e for kind in (*SOURCES.values(), FUNCTION) for e in kind.examples]
        raise ConfigError(
            f"reward.sources: '{source.name}' is none of {', '.join(map(repr, examples[:-1]))} and "
            f"'{examples[-1]}'",
            "unknown-source",
        )
    return outside.locate(source.name, "reward.sources")


def require_columns(source: str, required: Iterable[str], columns: Collection[str]) -> None:
    """Raise ConfigError if a function requires columns that the dataset lacks."""
    if missing := sorted(set(required) - set(columns)):
        raise ConfigError(
            f"reward.sources: '{source}' has parameters without a default that are no columns "
            f"of the dataset: {', '.join(missing)}. The dataset has: "
            f"{', '.join(sorted(columns))}. Rename them, or give them defaults",
            "missing-columns",
        )


def _short(text: str, limit: int = 400) -> str:
    if len(text) > limit:
        text = f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"
    return repr(text)


class Answers(NamedTuple):
    """The answer of a reward function to one request.

    Attributes:
        verdicts: of the samples, each with its index in the request as "at".
        trouble: why some samples have none, if so.
        late: whether the time limit was the reason.
        outside: whether something other than the function ended or paused the process.
    """

    verdicts: Sequence[Mapping[str, Any]]
    trouble: str | None = None
    late: bool = False
    outside: bool = False


class FunctionProcess(Child):
    """The process of a reward function, which scores one request at a time. Waits have deadlines.

    A process killed, or paused until its deadline, has not answered for the function. It is
    replaced once per request, and once if killed during its start.

    Args:
        opening: names the function. See :mod:`stretto.scoring.function_host`.
        limit_each: apply the time limit to each verdict rather than to a full request.
    """

    def __init__(self, opening: Mapping[str, Any], *, limit_each: bool = False) -> None:
        name = opening.get("url", "of the task")
        if "function" in opening:
            name = f"{opening['file']}:{opening['function']}"
        name = f"the reward function {name}"
        super().__init__(FunctionHost, opening, name, "function-not-started")
        self._limit_each = limit_each

    def ask(self, samples: Sequence[Mapping[str, Any]], timeout_s: float) -> Answers:
        """Score samples. If the process is lost, asks for all again: a function may compare."""
        answers = self._ask(samples, timeout_s)
        if answers.outside:
            _log.warning("%s: %s; asking once more", self._name, answers.trouble)
            answers = self._ask(samples, timeout_s)
        return answers

    def _ask(self, samples: Sequence[Mapping[str, Any]], timeout_s: float) -> Answers:
        verdicts: list[Message] = []
        places = set(range(len(samples)))
        inbox: Inbox = SimpleQueue()
        try:
            if self._process is None and self._loss is None:  # a loss counts for the next request
                self.start()
            deadline = Deadline(timeout_s)
            self._send({"do": "score", "samples": samples}, inbox.put)
            while "answer" not in (answer := self._next(inbox, deadline)):
                at = answer.get("at")
                if not isinstance(at, int) or at not in places:
                    raise MismatchError(f"its verdict {answer} is for no sample without one")
                places.remove(at)
                verdicts.append(answer)
                if self._limit_each:
                    deadline = Deadline(timeout_s)
            if answer["answer"] is None and places:
                raise MismatchError(f"it gave {len(verdicts)} verdicts for {len(samples)} samples")
        except BaseException as error:  # the next request would wait for the rest of this one
            self.close()
            match error:
                case LateError():
                    how = f"{error} within {timeout_s:g} s and was stopped"
                    return Answers(verdicts, how, late=not error.outside, outside=error.outside)
                case MismatchError():  # so that no verdict is trusted
                    return Answers([], f"its process was stopped as {error}")
                case ProcessLostError():
                    return Answers(verdicts, str(error), outside=error.outside)
                case RewardError():  # it could not be started
                    return Answers(verdicts, str(error))
            raise
        return Answers(verdicts, answer["answer"])

    def close(self) -> None:
        self._end(ProcessLostError("it was closed"))


class LocalFunction:
    """A function that runs in this process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            file = inspect.getsourcefile(function) or "Python"
        except TypeError:  # a callable object has no source
            file = "Python"
        try:
            self._host = FunctionHost(recognise(function, file, name))
        except (TypeError, ValueError) as error:  # some functions written in C
            raise ConfigError(
                f"reward.sources: '{name}' does not tell the names of its parameters ({error}); "
                "wrap it in a Python function of completions",
                "unknown-signature",
            ) from error

    def start(self) -> Mapping[str, Any]:
        return self._host.ready()

    def ask(self, samples: Sequence[Mapping[str, Any]], timeout_s: float) -> Answers:
        verdicts: list[Mapping[str, Any]] = []
        trouble = self._host.answer({"samples": samples}, verdicts.append)
        return Answers(verdicts, trouble)

    def close(self) -> None:
        """Do nothing, because there is no process to end."""
