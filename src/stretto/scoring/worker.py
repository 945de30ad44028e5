"""The process that judges run in: ``python -m stretto.scoring.worker``.

It speaks JSON lines over what were its standard input and output; whatever judged code prints goes
to standard error. It ends with its parent, however that ends, and whatever it is doing. ::

    in    {"task": settings, "seed": n}  or  {"file": path, "function": name}          once, first
    out   {"ready": {"columns": names or null for all, "required": names}}
          {"refused": "ConfigError" or "TaskError", "message": text}                   and the end
    in    [sample, ...]                                                                repeatedly
    out   {"at": place in the list, "value": number}  or  {"at": place, "error": text}
          {"done": null, or what went wrong with the whole list}                       comes last

A sample of a task is ``{"index", "fingerprint", "response"}``; of a function ``{"prompt",
"messages", "response", "tokens", "data"}``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, NoReturn

from stretto.errors import ConfigError, JudgeError, StrettoError, nearest

Sample = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], None]

SIGNATURES = """\
  TRL       f(prompts, completions, completion_ids, **columns) -> list of numbers
  verl      f(data_source, solution_str, ground_truth, extra_info=None) -> number or {'score': ...}
  OpenRLHF  f(queries, prompts, labels) -> list of numbers"""


@dataclass(frozen=True)
class Judge:
    """Something that judges samples.

    Attributes:
        run: judges a list, sends a verdict for each sample, and returns what went wrong with the
            list as a whole (None when every sample has its verdict).
        columns: dataset columns that it looks at; None for all.
        required: columns that it cannot do without.
    """

    run: Callable[[Sequence[Sample], Send], str | None]
    columns: Sequence[str] | None = ()
    required: Sequence[str] = ()


def main() -> None:
    """Open the judge that the first line names, then answer until the parent goes."""
    requests, replies = _take_channel()
    inbox: SimpleQueue[str] = SimpleQueue()
    Thread(target=_listen, args=(requests, inbox), daemon=True).start()

    def send(message: Mapping[str, Any]) -> None:
        try:
            replies.write(json.dumps(message) + "\n")
            replies.flush()
        except BrokenPipeError:
            _end()

    try:
        judge = open_judge(json.loads(inbox.get()))
    except StrettoError as error:
        send({"refused": type(error).__name__, "message": str(error)})
        return
    send({"ready": {"columns": judge.columns, "required": judge.required}})
    while True:
        samples = json.loads(inbox.get())
        send({"done": judge.run(samples, send)})


def _take_channel() -> tuple[IO[str], IO[str]]:
    """Keep standard input and output for the protocol, out of reach of judged code."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _listen(requests: IO[str], inbox: SimpleQueue[str]) -> NoReturn:
    """Hand lines on until the parent's end closes, then end this process and all it started.

    In a thread of its own, so that it notices while judged code hangs.
    """
    for line in requests:
        inbox.put(line)
    _end()


def _end() -> NoReturn:
    """End this process and all it started, at once and without a word."""
    if os.getpgrp() == os.getpid():  # else it was started by hand, in a group of others
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def open_judge(opening: Mapping[str, Any]) -> Judge:
    """The judge that a first line names.

    Raises:
        ConfigError: the function cannot be imported or has an unknown signature.
        TaskError: the task cannot be opened, or has no judge of its own.
    """
    if "task" in opening:
        return _open_task(opening["task"], opening["seed"])
    file, name = opening["file"], opening["function"]
    return recognise(_import(file, name), file, name)


def _open_task(settings: Mapping[str, Any], seed: int) -> Judge:
    """The task's own verifier, which gets rows by index."""
    from stretto.config import TaskConfig
    from stretto.tasks import load
    from stretto.tasks.base import fingerprint

    task = load(TaskConfig.model_validate(settings), seed)
    task.require_verifier()

    def verify(sample: Sample) -> float:
        index: int = sample["index"]
        if fingerprint(task.row(index).data) != sample["fingerprint"]:
            raise JudgeError(
                f"row {index} as the judge reads it is not the row that the prompt was made of: "
                "either its file changed during the run, or the rows follow the order of Python "
                "sets (set PYTHONHASHSEED=0 in the environment)"
            )
        return task.verify(index, sample["response"])

    return Judge(run=_one_by_one(verify))


def _import(file: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of a Python file, which may import its neighbours."""
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"stretto_reward_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit too: the file may call sys.exit
        raise ConfigError(
            f"reward.sources: '{file}' must be importable; importing it raised "
            f"{describe(error, file)}"
        ) from error
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    known = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    help_ = nearest(name, known) if known else "It defines no function."
    raise ConfigError(f"reward.sources: '{file}' has no function '{name}'. {help_}")


def recognise(function: Callable[..., Any], file: str, name: str) -> Judge:
    """Whose convention a function follows, by the names of its parameters."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional_only = any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    call = _Caller(function, named, takes_any)

    verl = {"data_source", "solution_str", "ground_truth", "extra_info"}
    openrlhf = {"queries", "prompts", "labels"}
    if positional_only:
        pass
    elif named >= {"solution_str", "ground_truth"} and required <= verl:
        return Judge(
            run=_one_by_one(lambda sample: _verl(call, sample), file),
            columns=("data_source", "reward_model", "ground_truth", "extra_info"),
            required=sorted(required & {"data_source"}),
        )
    elif named >= {"queries", "prompts"} and required <= openrlhf:
        labels = ("label",) if "labels" in named else ()
        return Judge(
            run=_all_at_once(lambda samples: _openrlhf(call, samples), file),
            columns=labels,
            required=labels,
        )
    elif named & {"completions", "completion_ids"} or (takes_any and "prompts" in named):
        return Judge(
            run=_all_at_once(lambda samples: _trl(call, samples), file),
            columns=None if takes_any else sorted(named - _TRL),
            required=sorted(required - _TRL),
        )
    raise ConfigError(
        f"reward.sources: '{name}{inspect.signature(function)}' in '{file}' has a signature that "
        f"is not known. The parameters must be named as in one of:\n{SIGNATURES}"
    )


class _Caller:
    """Calls a function with those of the arguments that it takes, and waits if it is async."""

    def __init__(self, function: Callable[..., Any], named: set[str], takes_any: bool) -> None:
        self._function, self._named, self._takes_any = function, named, takes_any
        self._runner = asyncio.Runner()  # one event loop for good: clients keep connections in it

    def __call__(self, **arguments: Any) -> Any:
        if not self._takes_any:
            arguments = {key: arguments[key] for key in arguments if key in self._named}
        result = self._function(**arguments)
        return self._runner.run(_wait(result)) if inspect.isawaitable(result) else result


async def _wait(result: Any) -> Any:
    return await result


_TRL = {"prompts", "completions", "completion_ids"}


def _trl(call: _Caller, samples: Sequence[Sample]) -> Any:
    """All by keyword, dataset columns as lists; conversations in, conversations out."""
    columns = {key: None for sample in samples for key in sample["data"] if key not in _TRL}
    return call(
        prompts=[s["prompt"] if s["messages"] is None else s["messages"] for s in samples],
        completions=[
            s["response"]
            if s["messages"] is None
            else [{"role": "assistant", "content": s["response"]}]
            for s in samples
        ],
        completion_ids=[s["tokens"] for s in samples],
        **{key: [s["data"].get(key) for s in samples] for key in columns},
    )


def _openrlhf(call: _Caller, samples: Sequence[Sample]) -> Any:
    """Queries are prompt and response together, labels the column 'label'."""
    result = call(
        queries=[s["prompt"] + s["response"] for s in samples],
        prompts=[s["prompt"] for s in samples],
        labels=[s["data"].get("label") for s in samples],
    )
    return result["rewards"] if isinstance(result, Mapping) else result


def _verl(call: _Caller, sample: Sample) -> Any:
    """One sample, with verl's columns; the score may stand in a dict."""
    data = sample["data"]
    model = data.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        truth = model["ground_truth"]
    elif "ground_truth" in data:
        truth = data["ground_truth"]
    else:
        raise JudgeError(
            "the dataset row has no ground truth; verl's signature needs the column 'ground_truth' "
            "or 'reward_model' with a 'ground_truth' in it"
        )
    source = {"data_source": data["data_source"]} if "data_source" in data else {}
    extra = data.get("extra_info")
    result = call(solution_str=sample["response"], ground_truth=truth, extra_info=extra, **source)
    if isinstance(result, Mapping):
        if "score" not in result:
            raise JudgeError(f"it returned a dict without 'score': {result!r}")
        return result["score"]
    return result


def _one_by_one(
    score: Callable[[Sample], Any], file: str | None = None
) -> Callable[[Sequence[Sample], Send], str | None]:
    """Judges each sample for itself: what goes wrong with one does not touch the others."""

    def run(samples: Sequence[Sample], send: Send) -> None:
        for at, sample in enumerate(samples):
            verdict: dict[str, Any]
            try:
                verdict = {"value": as_number(score(sample))}
            except KeyboardInterrupt:  # the user's, where the judge shares their process
                raise
            except BaseException as error:  # SystemExit too, and whatever judges invent
                verdict = {"error": describe(error, file)}
            send({"at": at, **verdict})

    return run


def _all_at_once(
    score: Callable[[Sequence[Sample]], Any], file: str
) -> Callable[[Sequence[Sample], Send], str | None]:
    """Judges the list in one call, which fails as a whole if it fails."""

    def run(samples: Sequence[Sample], send: Send) -> str | None:
        try:
            result = score(samples)
            result = result.tolist() if hasattr(result, "tolist") else result
            if not isinstance(result, Sequence) or isinstance(result, str):
                raise JudgeError(f"it returned {repr(result)[:200]} instead of a list of numbers")
            if len(result) != len(samples):
                raise JudgeError(f"it returned {len(result)} scores for {len(samples)} samples")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return describe(error, file)
        return _one_by_one(lambda value: value, file)(result, send)

    return run


def as_number(value: Any) -> float:
    """A score as a finite number.

    Raises:
        JudgeError: it is none.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise JudgeError(f"it returned {repr(value)[:200]} where a finite number is needed")
    return number


def describe(error: BaseException, file: str | None) -> str:
    """What was raised, and on which line of ``file`` (or of the code that raised it)."""
    if isinstance(error, StrettoError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and not own:
        return f"{type(error).__name__}: {error}"  # its text names the place
    at = (own or frames)[-1]
    place = f"{Path(at.filename).name}, line {at.lineno}, in {at.name}: {at.line}"
    return f"{type(error).__name__}: {error} ({place})"


if __name__ == "__main__":
    main()
