"""Reward functions as TRL, verl and OpenRLHF have them: how they are called and checked."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

from stretto.errors import ConfigError, RewardError, StrettoError, nearest
from stretto.types import is_finite

Sample = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], None]
Run = Callable[[Sequence[Sample], Send], str | None]
P = ParamSpec("P")
T = TypeVar("T")

SIGNATURES = """\
  TRL       f(prompts, completions, completion_ids, **columns) -> list of numbers
  verl      f(data_source, solution_str, ground_truth, extra_info=None) -> number or {'score': ...}
  OpenRLHF  f(queries, prompts, labels) -> list of numbers"""


@dataclass(frozen=True)
class Convention:
    """How a function is called, by the names of its parameters.

    Attributes:
        columns: dataset columns that it looks at; None for all.
        required: columns that it cannot do without.
    """

    kind: Literal["verl", "OpenRLHF", "TRL", "task"] = "task"
    columns: Sequence[str] | None = ()
    required: Sequence[str] = ()


@dataclass(frozen=True)
class RewardFunction:
    """A function in one form for all conventions.

    ``run`` scores a list, sends a verdict for each sample, and returns what went wrong with the
    list as a whole, if anything.
    """

    run: Run
    convention: Convention = Convention()


def convention_of(signature: inspect.Signature, file: str, name: str) -> Convention:
    """Recognise a function's convention; raises ConfigError if the signature is not known."""
    parameters = signature.parameters.values()
    named, takes_any = _names(signature)
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    verl = {"data_source", "solution_str", "ground_truth", "extra_info"}
    openrlhf = {"queries", "prompts", "labels"}
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        pass
    elif named >= {"solution_str", "ground_truth"} and required <= verl:
        columns = ("data_source", "reward_model", "ground_truth", "extra_info")
        return Convention("verl", columns, sorted(required & {"data_source"}))
    elif named >= {"queries", "prompts"} and required <= openrlhf:
        labels = ("label",) if "labels" in named else ()
        return Convention("OpenRLHF", labels, labels)
    elif named & {"completions", "completion_ids"} or (takes_any and "prompts" in named):
        columns_of = None if takes_any else sorted(named - _TRL)
        return Convention("TRL", columns_of, sorted(required - _TRL))
    raise ConfigError(
        f"reward.sources: '{name}{signature}' in '{file}' has a signature that is not known. The "
        f"parameters must be named as in one of:\n{SIGNATURES}",
        "unknown-signature",
    )


def recognise(function: Callable[..., Any], file: str, name: str) -> RewardFunction:
    """Make a reward function of one in any convention; raises ConfigError if it is in none."""
    signature = inspect.signature(function)
    convention = convention_of(signature, file, name)
    call = _caller(function, signature)
    if convention.kind == "verl":
        run = one_by_one(lambda sample: _verl(call, sample), file)
    elif convention.kind == "OpenRLHF":
        run = _all_at_once(lambda samples: _openrlhf(call, samples), file, as_number)
    else:
        number = lambda entry: None if entry is None else as_number(entry)  # noqa: E731
        run = _all_at_once(lambda samples: _trl(call, samples), file, number)
    return RewardFunction(run, convention)


def _names(signature: inspect.Signature) -> tuple[set[str], bool]:
    parameters = signature.parameters.values()
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return by_name, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _caller(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return a call of a function that passes the arguments it takes, and awaits its result."""
    named, takes_any = _names(signature)
    runner = asyncio.Runner()  # one event loop for good: clients keep connections in it

    async def wait(result: Any) -> Any:
        return await result

    def call(**arguments: Any) -> Any:
        if not takes_any:
            arguments = {key: arguments[key] for key in arguments if key in named}
        result = function(**arguments)
        return runner.run(wait(result)) if inspect.isawaitable(result) else result

    return call


_TRL = {"prompts", "completions", "completion_ids"}


def _trl(call: Callable[..., Any], samples: Sequence[Sample]) -> Any:
    """Call with all samples by keyword, dataset columns as lists, conversations as messages."""
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


def _openrlhf(call: Callable[..., Any], samples: Sequence[Sample]) -> Any:
    """Call with all samples: queries are prompt and response together, labels a column."""
    result = call(
        queries=[s["prompt"] + s["response"] for s in samples],
        prompts=[s["prompt"] for s in samples],
        labels=[s["data"].get("label") for s in samples],
    )
    return result.get("rewards", result) if isinstance(result, Mapping) else result


def _verl(call: Callable[..., Any], sample: Sample) -> Any:
    """Call with one sample, by verl's columns; the score may stand in a dict."""
    data = sample["data"]
    model = data.get("reward_model")
    holder = model if isinstance(model, Mapping) and "ground_truth" in model else data
    if "ground_truth" not in holder:
        raise RewardError(
            "the dataset row has no ground truth; verl's signature needs the column 'ground_truth' "
            "or 'reward_model' with a 'ground_truth' in it"
        )
    given = {key: data[key] for key in ("data_source",) if key in data}
    given |= {"ground_truth": holder["ground_truth"], "extra_info": data.get("extra_info")}
    result = call(solution_str=sample["response"], **given)
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(f"it returned a dict without 'score': {result!r}")
        return result["score"]
    return result


def one_by_one(score: Callable[[Sample], Any], file: str | None = None) -> Run:
    """Score each sample for itself: an error on one does not touch the others."""

    def judge(sample: Sample) -> float:
        return as_number(in_this_process(score, sample))

    def run(samples: Sequence[Sample], send: Send) -> None:
        for at, sample in enumerate(samples):
            send({"at": at, **_verdict(judge, sample, file)})

    return run


def _all_at_once(
    score: Callable[[Sequence[Sample]], Any], file: str, number: Callable[[Any], float | None]
) -> Run:
    """Score the list in one call; ``number`` makes a number of an entry, or ``None``.

    An error is that of the whole list. If it gives anything but one entry a sample, it cannot be
    told whose they are, and the function has failed on all samples.
    """

    def run(samples: Sequence[Sample], send: Send) -> str | None:
        scored = _verdict(lambda given: in_this_process(score, given), samples, file)
        if "error" in scored:
            return str(scored["error"])
        listed = _verdict(lambda result: _listed(result, len(samples)), scored["value"], file)
        verdicts = [listed] * len(samples)
        if "value" in listed:
            verdicts = [_verdict(number, entry, file) for entry in listed["value"]]
        for at, verdict in enumerate(verdicts):
            send({"at": at, **verdict})
        return None

    return run


def _verdict(judge: Callable[[T], Any], on: T, file: str | None) -> dict[str, Any]:
    """Return the result of a call as "value", or else its "error"."""
    try:
        return {"value": judge(on)}
    except KeyboardInterrupt:  # the user's, where the reward function shares their process
        raise
    except BaseException as error:  # SystemExit too, and whatever reward functions invent
        return {"error": describe(error, file)}


def _listed(result: Any, count: int) -> Sequence[Any]:
    """Return a function's list of scores; raises RewardError if it is none of ``count``."""
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, Sequence) or isinstance(result, str):
        raise RewardError(f"it returned {repr(result)[:200]} instead of a list of numbers")
    if len(result) != count:
        raise RewardError(f"it returned {len(result)} scores for {count} samples")
    return result


def not_defined(file: str, name: str, functions: Collection[str]) -> ConfigError:
    """Return the error of a file that lacks a function, and has ``functions``."""
    hint = nearest(name, functions) if functions else "It defines no function."
    return ConfigError(
        f"reward.sources: '{file}' has no function '{name}'. {hint}", "unknown-function"
    )


def as_number(value: Any) -> float:
    """Return a score as a number; raises RewardError if it is none that is finite as float32."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not is_finite(number):
        raise RewardError(
            f"it returned {repr(value)[:200]} where a number is needed that is finite as float32"
        )
    return number


def in_this_process(call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Return or raise what a call does, in the process that made the call.

    A child that comes out of it, if it forks, ends here as Python would end it, and does not go on
    as a second reward function, or as a second trainer.
    """
    pid = os.getpid()
    try:
        result = call(*args, **keywords)
    except BaseException as error:
        if os.getpid() != pid:
            _end_child(error)
        raise
    if os.getpid() != pid:
        _end_child(None)
    return result


def _end_child(error: BaseException | None) -> NoReturn:
    """End a forked child as Python would, without the exit handlers that its parent registered."""
    status = 1
    try:
        if error is None or (isinstance(error, SystemExit) and error.code is None):
            status = 0
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            status = error.code & 0xFF
        else:
            said = error.code if isinstance(error, SystemExit) else traceback.format_exc()
            print(said, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def describe(error: BaseException, file: str | None) -> str:
    """Describe an error, with the line of ``file`` (or of any code) that raised it."""
    if isinstance(error, StrettoError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and not own:
        return f"{type(error).__name__}: {error}"  # its text names the place
    at = (own or frames)[-1]
    place = f"{Path(at.filename).name}, line {at.lineno}, in {at.name}: {at.line}"
    return f"{type(error).__name__}: {error} ({place})"
