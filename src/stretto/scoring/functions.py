"""Rewards from code: the task's own verifier, or a user's function, in a process of its own.

A reward function that raises, hangs, ends its process, or gives no number that is finite as float32
has failed on a sample. That is reported with the sample and never turned into a number. A function
of TRL's convention may say ``None``: it does not apply to the sample.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.config import TaskConfig
from stretto.config.sections import RewardSource
from stretto.errors import ConfigError, EngineError, RewardError
from stretto.scoring.conventions import recognise
from stretto.scoring.responses import Pending, response_text
from stretto.tasks.base import INDEX_KEY, fingerprint
from stretto.types import Chunk, Prompt, Response, Score, ScorerInfo, WeightsRef
from stretto.workers.function import FunctionProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETRY_LIMITS = 4
"""Time limits spent, at most, on scoring a failed batch again one sample at a time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Verdict:
    """A number, ``None`` where the reward function does not apply, or why it failed."""

    value: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class _Response:
    """A finished rollout as reward functions see it."""

    prompt: Prompt
    tokens: list[int]
    text: str


class FunctionScorer:
    """A scorer of finished rollouts by the task's verifier or a function of the user's.

    The methods are those of :class:`~stretto.protocols.Scorer`, not yet coroutines. The reward
    function's process starts at construction, so that mistakes show before anything heavy is
    loaded; it is started again after a hang, and then has lost what it kept in memory.

    Args:
        source: the task's verifier, or a function, whose file is relative to the working directory.
        task: the task's settings; the verifier is made anew from them in the reward function's
            process.
        stop: strings that end a response; not part of what is scored.
        timeout_s: time that the reward function may take for the responses of one ``finish`` call.
        columns: names of the dataset's columns. Where given, a function that needs another one is
            refused at construction.
        function: what ``source`` stands for where the caller has it as an object. It is called in
            this process, and no time limit can end it.

    Raises:
        ConfigError: the function cannot be found or imported, has an unknown signature, or needs a
            column that is not there.
        TaskError: the task cannot be opened, or has no verifier.
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
    ) -> None:
        self.info = ScorerInfo(source.name, "reward", streams=False, reads_text=True)
        self._tokenizer, self._stop, self._timeout_s = tokenizer, tuple(stop), timeout_s
        self._pending = Pending(source.name)
        self._payload: Callable[[_Response], Mapping[str, Any]]
        self._process: FunctionProcess | LocalFunction
        if function is not None:
            self._payload = self._function_payload
            self._process = LocalFunction(function)
        elif source.kind == "task":
            self._payload = _task_payload
            self._process = FunctionProcess({"task": task.model_dump(), "seed": seed})
        else:
            self._payload = self._function_payload
            self._process = FunctionProcess(locate(source))
        ready = self._process.start()
        self._columns: list[str] | None = ready["columns"]
        if columns is not None:
            try:
                require_columns(source.name, ready["required"], columns)
            except ConfigError:
                self.close()
                raise

    def admit(self, responses: Sequence[Response]) -> None:
        """Learn of responses whose chunks will follow; tokens that one already has are kept."""
        self._pending.admit(responses)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Take more tokens of admitted rollouts, in order for each rollout.

        Raises:
            LifecycleError: a chunk is of an unknown rollout, leaves a gap, or comes after the end.
        """
        self._pending.extend(chunks)

    def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        """Score finished rollouts, in the order asked, and forget them.

        A rollout that could not be scored gets a score with ``failure`` set and no values; one that
        the function does not apply to gets a score with neither.

        Raises:
            LifecycleError: a rollout is unknown or has not ended.
            ConfigError, TaskError, RewardError: the reward function's process cannot be started
                again.
        """
        responses = [self._as_seen(r) for r in self._pending.take(rollout_ids)]
        verdicts = self._ask_all(responses)
        return [self._score(*each) for each in zip(rollout_ids, responses, verdicts, strict=True)]

    def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts without a score; unknown ids are ignored."""
        self._pending.release(rollout_ids)

    def load(self, weights: WeightsRef) -> None:
        """Refuse weights: a function follows no trained model.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"scorer '{self.info.name}' is a function and takes no weights")

    def close(self) -> None:
        """End the reward function's process; what it is doing is lost."""
        self._process.close()

    def _as_seen(self, response: Response) -> _Response:
        tokens = response.tokens.tolist()
        text = response_text(self._tokenizer, tokens, response.finish, self._stop)
        return _Response(response.prompt, tokens, text)

    def _score(self, rollout_id: int, response: _Response, verdict: _Verdict) -> Score:
        if verdict.failure is None:
            numbers = [] if verdict.value is None else [verdict.value]
            values = np.array(numbers, dtype=np.float32)
            return Score(rollout_id, self.info.name, "reward", values)
        failure = (
            f"'{self.info.name}' failed on rollout {rollout_id}: {verdict.failure}\n"
            f"  prompt: {_short(response.prompt.text)}\n"
            f"  response: {_short(response.text)}"
        )
        return Score(rollout_id, self.info.name, "reward", np.empty(0, np.float32), failure)

    def _ask_all(self, responses: Sequence[_Response]) -> list[_Verdict]:
        """Ask for all in one call; where that leaves some open, for those one at a time."""
        verdicts: dict[int, _Verdict] = {}
        payloads: dict[int, Mapping[str, Any]] = {}
        for at, response in enumerate(responses):
            try:
                payloads[at] = self._payload(response)
            except RewardError as error:
                verdicts[at] = _Verdict(failure=str(error))
        trouble = self._ask(payloads, verdicts)
        left = [at for at in payloads if at not in verdicts]
        if len(payloads) == 1 and left:
            verdicts[left[0]] = _Verdict(failure=trouble)
            left = []
        if left:
            _log.warning(
                "reward source '%s' on %d responses: %s; asking about %d of them one at a time",
                self.info.name, len(payloads), trouble, len(left),
            )  # fmt: skip
        give_up_s = time.monotonic() + RETRY_LIMITS * self._timeout_s
        for at in left:
            if time.monotonic() >= give_up_s:
                failure = f"not scored, as too much time went into others of its batch ({trouble})"
                verdicts[at] = _Verdict(failure=failure)
                continue
            alone = self._ask({at: payloads[at]}, verdicts)
            verdicts.setdefault(at, _Verdict(failure=alone))
        return [verdicts[at] for at in range(len(responses))]

    def _ask(
        self, payloads: Mapping[int, Mapping[str, Any]], verdicts: dict[int, _Verdict]
    ) -> str | None:
        """Have payloads judged in one call, note the verdicts, and say what stopped it."""
        if not payloads:
            return None
        places = list(payloads)
        answers, trouble = self._process.ask(list(payloads.values()), self._timeout_s)
        for answer in answers:
            failure = answer.get("error")
            value = answer["value"] if failure is None else None
            verdicts[places[answer["at"]]] = _Verdict(value, failure)
        return trouble

    def _function_payload(self, response: _Response) -> Mapping[str, Any]:
        """Return a function's payload; of the row, only the columns that it looks at."""
        row = {key: value for key, value in response.prompt.data.items() if key != INDEX_KEY}
        if self._columns is not None:
            row = {key: row[key] for key in self._columns if key in row}
        for key, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise RewardError(
                    f"the dataset's column '{key}' cannot be handed to a function ({error}); make "
                    "it text, numbers, or lists and objects of them"
                ) from error
        messages = response.prompt.messages
        return {
            "prompt": response.prompt.text,
            "messages": None if messages is None else list(messages),
            "response": response.text,
            "tokens": response.tokens,
            "data": row,
        }


def _task_payload(response: _Response) -> Mapping[str, Any]:
    """Return the verifier's payload: the row's index, proof of its content, and the response."""
    data = response.prompt.data
    if INDEX_KEY not in data:
        raise RewardError("the prompt is no row of the task, and only its rows can be verified")
    return {
        "index": data[INDEX_KEY],
        "fingerprint": fingerprint(data),
        "response": response.text,
    }


def locate(source: RewardSource) -> dict[str, str]:
    """Absolute path and name of a function, so that a later change of folder is harmless.

    Raises:
        ConfigError: the source is no function, or there is no such file.
    """
    if source.kind != "function":
        raise ConfigError(
            f"reward.sources: '{source.name}' is none of 'task', 'file.py:name' and 'model:NAME'"
        )
    path = source.file.expanduser()
    if not path.is_file():
        raise ConfigError(
            f"reward.sources: '{source.name}' names the file '{path}', which is not there (looked "
            f"for from {Path.cwd()})"
        )
    return {"file": str(path.resolve()), "function": source.function}


def require_columns(source: str, required: Iterable[str], columns: Collection[str]) -> None:
    """Refuse a function that needs columns which the dataset has not.

    Raises:
        ConfigError: it does.
    """
    if missing := sorted(set(required) - set(columns)):
        raise ConfigError(
            f"reward.sources: '{source}' has parameters without a default that are no columns "
            f"of the dataset: {', '.join(missing)}. The dataset has: "
            f"{', '.join(sorted(columns))}. Rename them, or give them defaults"
        )


def _short(text: str, limit: int = 400) -> str:
    if len(text) > limit:
        text = f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"
    return repr(text)


class LocalFunction:
    """A function called here, with the methods of
    :class:`~stretto.workers.function.FunctionProcess`.

    Args:
        function: in TRL's, verl's or OpenRLHF's convention.

    Raises:
        ConfigError: its signature is not known.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            file = inspect.getsourcefile(function) or "Python"
        except TypeError:  # an object that can be called has no source of its own
            file = "Python"
        try:
            self._function = recognise(function, file, name)
        except (TypeError, ValueError) as error:  # some that are written in C do not tell
            raise ConfigError(
                f"reward.sources: '{name}' does not tell the names of its parameters ({error}); "
                "wrap it in a Python function of completions"
            ) from error

    def start(self) -> Mapping[str, Any]:
        """Return the columns that the function looks at, and those it cannot do without."""
        return {"columns": self._function.columns, "required": self._function.required}

    def ask(
        self, samples: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> tuple[list[Mapping[str, Any]], str | None]:
        """Return verdicts on samples, and the error that concerns all of them, if any.

        ``timeout_s`` is ignored: nothing ends a call in one's own process.
        """
        answers: list[Mapping[str, Any]] = []
        trouble = self._function.run(samples, answers.append)
        return answers, trouble

    def close(self) -> None:
        """Do nothing: there is no process to end."""
