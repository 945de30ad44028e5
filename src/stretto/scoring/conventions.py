"""Reward functions as TRL, verl and OpenRLHF have them: how they are called and checked.

A function is called with what its convention says, and what it gives is checked: every sample gets
a number or an error.
"""

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
P = ParamSpec("P")
T = TypeVar("T")

SIGNATURES = """\
  TRL       f(prompts, completions, completion_ids, **columns) -> list of numbers
  verl      f(data_source, solution_str, ground_truth, extra_info=None) -> number or {'score': ...}
  OpenRLHF  f(queries, prompts, labels) -> list of numbers"""


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores samples, in one form for all conventions.

    Attributes:
        run: scores a list, sends a verdict for each sample, and returns what went wrong with the
            list as a whole (None when every sample has its verdict).
        columns: dataset columns that it looks at; None for all.
        required: columns that it cannot do without.
    """

    run: Callable[[Sequence[Sample], Send], str | None]
    columns: Sequence[str] | None = ()
    required: Sequence[str] = ()


@dataclass(frozen=True)
class Convention:
    """How a function is called, by the names of its parameters.

    Attributes:
        kind: whose convention it is.
        columns: dataset columns that it looks at; None for all.
        required: columns that it cannot do without.
    """

    kind: Literal["verl", "OpenRLHF", "TRL"]
    columns: Sequence[str] | None
    required: Sequence[str]


def convention_of(signature: inspect.Signature, file: str, name: str) -> Convention:
    """Recognise a function's convention.

    Raises:
        ConfigError: the signature is not known.
    """
    parameters = signature.parameters.values()
    named, takes_any = _named(parameters), _takes_any(parameters)
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
        f"parameters must be named as in one of:\n{SIGNATURES}"
    )


def recognise(function: Callable[..., Any], file: str, name: str) -> RewardFunction:
    """Make a reward function of one in any convention.

    Raises:
        ConfigError: the signature is not known.
    """
    signature = inspect.signature(function)
    convention = convention_of(signature, file, name)
    parameters = signature.parameters.values()
    call = _Caller(function, _named(parameters), _takes_any(parameters))
    if convention.kind == "verl":
        run = one_by_one(lambda sample: _verl(call, sample), file)
    elif convention.kind == "OpenRLHF":
        run = _all_at_once(lambda samples: _openrlhf(call, samples), file, as_number)
    else:
        run = _all_at_once(lambda samples: _trl(call, samples), file, as_number_or_none)
    return RewardFunction(run, convention.columns, convention.required)


def _named(parameters: Collection[inspect.Parameter]) -> set[str]:
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _takes_any(parameters: Collection[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


class _Caller:
    """A function that is called with those arguments that it takes, and awaited if async."""

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
    """Call a function of TRL's convention on all samples.

    All arguments are given by keyword, dataset columns as lists; a conversation's response is a
    conversation too.
    """
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
    """Call a function of OpenRLHF's convention on all samples.

    Queries are prompt and response together, labels the column 'label'.
    """
    result = call(
        queries=[s["prompt"] + s["response"] for s in samples],
        prompts=[s["prompt"] for s in samples],
        labels=[s["data"].get("label") for s in samples],
    )
    return result.get("rewards", result) if isinstance(result, Mapping) else result


def _verl(call: _Caller, sample: Sample) -> Any:
    """Call a function on one sample, with verl's columns; the score may stand in a dict."""
    data = sample["data"]
    model = data.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        truth = model["ground_truth"]
    elif "ground_truth" in data:
        truth = data["ground_truth"]
    else:
        raise RewardError(
            "the dataset row has no ground truth; verl's signature needs the column 'ground_truth' "
            "or 'reward_model' with a 'ground_truth' in it"
        )
    source = {"data_source": data["data_source"]} if "data_source" in data else {}
    extra = data.get("extra_info")
    result = call(solution_str=sample["response"], ground_truth=truth, extra_info=extra, **source)
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(f"it returned a dict without 'score': {result!r}")
        return result["score"]
    return result


def one_by_one(
    score: Callable[[Sample], Any], file: str | None = None
) -> Callable[[Sequence[Sample], Send], str | None]:
    """Score each sample for itself: an error on one does not touch the others."""

    def run(samples: Sequence[Sample], send: Send) -> None:
        for at, sample in enumerate(samples):
            verdict: dict[str, Any]
            try:
                verdict = {"value": as_number(in_this_process(score, sample))}
            except KeyboardInterrupt:  # the user's, where the reward function shares their process
                raise
            except BaseException as error:  # SystemExit too, and whatever reward functions invent
                verdict = {"error": describe(error, file)}
            send({"at": at, **verdict})

    return run


def _all_at_once(
    score: Callable[[Sequence[Sample]], Any], file: str, number: Callable[[Any], float | None]
) -> Callable[[Sequence[Sample], Send], str | None]:
    """Score the list in one call.

    If the call raises, the error is that of the whole list. If it gives anything but one entry a
    sample, nobody can tell whose they are, and it has failed on all samples.

    Args:
        number: makes a number of an entry, or ``None`` where the function does not apply.
    """

    def run(samples: Sequence[Sample], send: Send) -> str | None:
        try:
            result = in_this_process(score, samples)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return describe(error, file)
        for at, verdict in enumerate(_verdicts(result, len(samples), number, file)):
            send({"at": at, **verdict})
        return None

    return run


def _verdicts(
    result: Any, count: int, number: Callable[[Any], float | None], file: str
) -> list[dict[str, Any]]:
    """Return the verdict on each of ``count`` samples in a function's list: a value or an error."""
    try:
        result = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(result, Sequence) or isinstance(result, str):
            raise RewardError(f"it returned {repr(result)[:200]} instead of a list of numbers")
        if len(result) != count:
            raise RewardError(f"it returned {len(result)} scores for {count} samples")
    except Exception as error:
        return [{"error": describe(error, file)}] * count
    verdicts: list[dict[str, Any]] = []
    for entry in result:
        try:
            verdicts.append({"value": number(entry)})
        except Exception as error:
            verdicts.append({"error": describe(error, file)})
    return verdicts


def not_defined(file: str, name: str, functions: Collection[str]) -> ConfigError:
    """Return the error of a file that lacks a function.

    Args:
        functions: that the file does have.
    """
    hint = nearest(name, functions) if functions else "It defines no function."
    return ConfigError(f"reward.sources: '{file}' has no function '{name}'. {hint}")


def as_number(value: Any) -> float:
    """A score as a number that is finite as float32.

    Raises:
        RewardError: it is no such number.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not is_finite(number):
        raise RewardError(
            f"it returned {repr(value)[:200]} where a number is needed that is finite as float32"
        )
    return number


def as_number_or_none(value: Any) -> float | None:
    """A score of TRL's convention, in which ``None`` says that it does not apply.

    Raises:
        RewardError: it is neither ``None`` nor a number that is finite as float32.
    """
    return None if value is None else as_number(value)


def in_this_process(call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Return or raise what a call does, in the process that made the call.

    The call may fork. A child that comes out of it would go on as a second reward function, or as a
    second trainer. It ends here, with the exit status that Python would end it with.
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
