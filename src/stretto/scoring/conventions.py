"""Reward functions as in TRL, verl and OpenRLHF: how to call them and check their results."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from stretto.errors import ConfigError, RewardError
from stretto.outside import describe, ending_forked_children, in_this_process
from stretto.plain import is_finite, plain

Sample = Mapping[str, Any]
Verdict = Mapping[str, Any]
"""``value``, a number or ``None`` if the function does not apply, and optional values by name as
``extra``. Or ``error``, the reason of a failure."""
TIMED_OUT: Verdict = {"value": 0.0, "extra": {"timeouts": 1}}
"""Verdict on an answer that the task's verifier could not compare in time."""
Send = Callable[[Mapping[str, Any]], None]
Run = Callable[[Sequence[Sample], Send], str | None]
Value = Callable[[Sample], Any]
ASKED_TOGETHER = 64
"""Most calls of an asynchronous per-response function to await at a time."""
P = ParamSpec("P")
T = TypeVar("T")


def _of(key: str) -> Value:
    return lambda sample: sample[key]


def _column(name: str) -> Value:
    return lambda sample: sample["data"].get(name)


def _completion(sample: Sample) -> Any:
    """Return the response as text or message, like its prompt (TRL), or an episode's messages."""
    if "messages" in sample:
        return sample["messages"]
    text = sample["response"]
    return text if isinstance(sample["asked"], str) else [{"role": "assistant", "content": text}]


def _ground_truth(sample: Sample) -> Any:
    data = sample["data"]
    model = data.get("reward_model")
    holder = model if isinstance(model, Mapping) and "ground_truth" in model else data
    if "ground_truth" not in holder:
        raise RewardError(
            "the dataset row has no ground truth; verl's signature needs the column 'ground_truth' "
            "or 'reward_model' with a 'ground_truth' in it"
        )
    return holder["ground_truth"]


def _number(entry: Any) -> Verdict:
    return {"value": as_number(entry)}


def _number_or_none(entry: Any) -> Verdict:
    return {"value": None if entry is None else as_number(entry)}


def _score_of(entry: Any) -> Verdict:
    if isinstance(entry, Mapping):
        if "score" not in entry:
            raise RewardError(f"it returned a dict without 'score': {entry!r}")
        extra = {str(name): plain(value) for name, value in entry.items() if name != "score"}
        return {"value": as_number(entry["score"]), "extra": extra}
    return _number(entry[0] if isinstance(entry, tuple) and entry else entry)


@dataclass(frozen=True)
class Convention:
    """A library's convention for reward functions, recognised by their parameter names.

    Attributes:
        library, form: for people.
        values: by parameter, its value for a sample.
        aliases: other names of these parameters.
        needs: groups of names. A function must have a parameter of each group.
        columns: by parameter, the dataset column that must exist if the parameter is required.
        reads: dataset columns that the values come from.
        entry: converts a sample's part of the result.
        batched: whether it is called once with lists, instead of once per sample.
        others_are_columns: whether further parameters are dataset columns of the same name.
    """

    library: str
    form: str
    values: Mapping[str, Value]
    needs: Sequence[Collection[str]]
    entry: Callable[[Any], Verdict]
    aliases: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    reads: Sequence[str] = ()
    batched: bool = True
    others_are_columns: bool = False

    def arguments(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """Return all arguments that its functions may take, as lists."""
        arguments = {name: [value(s) for s in samples] for name, value in self.values.items()}
        if self.others_are_columns:
            keys = {key: None for s in samples for key in s["data"] if key not in self.values}
            arguments |= {key: [s["data"].get(key) for s in samples] for key in keys}
        return arguments | {other: arguments[name] for other, name in self.aliases.items()}

    def arguments_of_all(self, samples: Sequence[Sample], log: Log) -> dict[str, Any]:
        """Return :meth:`arguments`, and TRL's that concern the complete batch."""
        arguments: dict[str, Any] = self.arguments(samples)
        if self.others_are_columns:
            state = TrainerState(**samples[0]["state"])
            arguments |= {"trainer_state": state, "log_extra": log.add, "log_metric": log.metric}
        return arguments


_VERL = {
    "data_source": _column("data_source"),
    "solution_str": _of("response"),
    "ground_truth": _ground_truth,
    "extra_info": _column("extra_info"),
}
_VERL_READS = ("data_source", "reward_model", "ground_truth", "extra_info")
_VERL_ALIASES = {
    **dict.fromkeys(("model_output", "predict_str", "completion"), "solution_str"),
    "test_cases": "ground_truth",
}
"""Parameter names in verl's package ``reward_score``."""

CONVENTIONS = (
    Convention(
        "verl",
        "f(data_source, solution_str, ground_truth, extra_info=None) -> number or {'score': ...}",
        _VERL,
        (
            {"solution_str", "model_output", "predict_str", "completion"},
            {"ground_truth", "test_cases"},
        ),
        _score_of,
        aliases=_VERL_ALIASES,
        columns={"data_source": "data_source"},
        reads=_VERL_READS,
        batched=False,
    ),
    Convention(
        "verl",
        "f(data_sources, solution_strs, ground_truths, extra_infos) -> list of these",
        {f"{name}s": value for name, value in _VERL.items()},
        ({"solution_strs"}, {"ground_truths"}),
        _score_of,
        columns={"data_sources": "data_source"},
        reads=_VERL_READS,
    ),
    Convention(
        "OpenRLHF",
        "f(queries, prompts, labels) -> list of numbers",
        {
            "queries": lambda sample: sample["prompt"] + sample["response"],
            "prompts": _of("prompt"),
            "labels": _column("label"),
        },
        ({"queries"}, {"prompts"}),
        _number,
        columns={"labels": "label"},
        reads=("label",),
    ),
    Convention(
        "TRL",
        "f(prompts, completions, completion_ids, **columns) -> list of numbers",
        {"prompts": _of("asked"), "completions": _completion, "completion_ids": _of("tokens")},
        ({"prompts", "completions", "completion_ids"},),
        _number_or_none,
        others_are_columns=True,
    ),
)

_GIVEN = {"trainer_state", "log_extra", "log_metric"}
"""Further parameters of TRL's functions, which concern the complete batch."""

ENVIRONMENTS = "environments"
"""A parameter of TRL's functions for the objects of ``environment_factory``."""

SIGNATURES = "\n".join(f"  {c.library:9} {c.form}" for c in CONVENTIONS)


class Recognised(NamedTuple):
    """A function's convention and dataset columns.

    Attributes:
        columns: columns to pass. None: all.
        required: columns without which it cannot be called.
        environments: whether it takes the environments' objects. Without any it is a column.
    """

    convention: Convention
    columns: Sequence[str] | None
    required: Sequence[str]
    environments: bool = False


@dataclass(frozen=True)
class RewardFunction:
    """A function in one form for all conventions.

    ``run`` scores a list, sends a verdict for each sample, and returns an error of the complete
    list, if any. For the other fields see :class:`Recognised`.
    """

    run: Run
    columns: Sequence[str] | None = ()
    required: Sequence[str] = ()
    environments: bool = False


def convention_of(signature: inspect.Signature, file: str, name: str) -> Recognised:
    """Recognise a function's convention. Raises ConfigError for an unknown signature."""
    parameters = signature.parameters.values()
    names, takes_any = _names(signature)
    required = {p.name for p in parameters if p.name in names and p.default is p.empty}
    # TRL passes everything by keyword, so its functions may name only some of the values.
    any_names = takes_any or ENVIRONMENTS in names
    positional = any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    conventions = () if positional else CONVENTIONS
    for convention in conventions:
        trl = convention.others_are_columns
        if any(names.isdisjoint(group) for group in convention.needs) and not (trl and any_names):
            continue
        if trl:
            standard = convention.values.keys() | _GIVEN
            columns = None if takes_any else sorted(names - standard)
            takes_environments = ENVIRONMENTS in names
            return Recognised(convention, columns, sorted(required - standard), takes_environments)
        if required <= convention.values.keys() | convention.aliases.keys():
            required_columns = [
                column for of, column in convention.columns.items() if of in required
            ]
            return Recognised(convention, convention.reads, required_columns)
        any_names = False  # of this convention, but with an unknown parameter
    raise ConfigError(
        f"reward.sources: '{name}{signature}' in '{file}' has a signature that is not known. The "
        f"parameters must be named as in one of:\n{SIGNATURES}",
        "unknown-signature",
    )


def function_or_object(function: Callable[..., Any], file: str, name: str) -> Callable[..., Any]:
    """Return a function, or an object of a class with ``__call__``, made without arguments.

    Raises ConfigError if the class cannot be instantiated.
    """
    if not (inspect.isclass(function) and "__call__" in dir(function)):
        return function
    make: Callable[[], Any] = function
    try:
        instance: Callable[..., Any] = in_this_process(make)
    except Exception as error:
        raise ConfigError(
            f"reward.sources: making an object of '{name}' raised {describe(error, file)}; a "
            "class takes no arguments and has __call__",
            "reward-class-raised",
        ) from error
    return instance


def recognise(function: Callable[..., Any], file: str, name: str) -> RewardFunction:
    """Convert a function of any convention. Raises ConfigError for others."""
    function = function_or_object(function, file, name)
    signature = inspect.signature(function)
    convention, columns, required, environments = convention_of(signature, file, name)
    aliases = convention.aliases
    loop = asyncio.Runner()  # one for all calls, because clients keep connections in it
    if columns is None:  # with **kwargs, only the code shows its use
        code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
        environments |= ENVIRONMENTS in getattr(code, "co_consts", ())
    needed = {p.name for p in signature.parameters.values() if p.default is p.empty}

    def score_one(sample: Sample) -> Any:
        cells = convention.arguments([sample]).items()
        arguments = {key: v for key, (v,) in cells if v is not None or key in needed}
        return bound(function, signature, arguments, aliases)()

    def score_all(samples: Sequence[Sample], log: Log) -> Any:
        arguments = convention.arguments_of_all(samples, log)
        result = bound(function, signature, arguments, aliases)()
        return log.scores(loop.run(awaited(result)) if inspect.isawaitable(result) else result)

    if convention.batched:
        run = all_at_once(score_all, file, convention.entry)
    else:
        run = one_by_one(score_one, file, convention.entry, loop)
    return RewardFunction(run, columns, required, environments)


def _names(signature: inspect.Signature) -> tuple[set[str], bool]:
    parameters = signature.parameters.values()
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return by_name, any(p.kind is p.VAR_KEYWORD for p in parameters)


def bound(
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: Mapping[str, Any],
    aliases: Collection[str] = (),
) -> Callable[[], Any]:
    """Bind those arguments that a function takes."""
    names, takes_any = _names(signature)
    keys = (k for k in arguments if k in names or (takes_any and k not in aliases))
    return partial(function, **{key: arguments[key] for key in keys})


async def awaited(result: Awaitable[T]) -> T:
    return await result


class TrainerState(SimpleNamespace):
    """The fields of TRL's ``TrainerState`` that its functions get here."""

    def __getattr__(self, name: str) -> NoReturn:
        fields = " and ".join(vars(self))
        raise AttributeError(f"trainer_state has {fields} here, and no '{name}'")


class Log:
    """Values by name that a function logs in addition to the scores of ``count`` samples."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._of_samples: dict[str, Sequence[Any]] = {}
        self._of_all: dict[str, list[float]] = {}

    def add(self, column: str, values: Any) -> None:
        """Log one value per sample, as TRL's ``log_extra``. RewardError for a wrong count."""
        entries = plain(values)
        if not isinstance(entries, list) or len(entries) != self._count:
            raise RewardError(f"'{column}' is not a list of {self._count} values, one a sample")
        self._of_samples[str(column)] = entries

    def metric(self, name: str, value: Any) -> None:
        """Log a finite number for all samples, as TRL's ``log_metric``. Several are averaged.

        Other values are dropped, because an error would cost the scores.
        """
        with suppress(RewardError):
            number = as_number(value)
            self._of_all.setdefault(str(name), []).append(number)

    def scores(self, result: Any) -> Any:
        """Return the scores of a result, or a dict's ``rewards``. Log its ``extra_logs``."""
        if not isinstance(result, Mapping):
            return result
        for name, values in (result.get("extra_logs") or {}).items():
            entries = plain(values)
            (self.add if isinstance(entries, list) else self.metric)(name, entries)
        return result.get("rewards", result)

    def beside(self, at: int, verdict: Verdict) -> Verdict:
        """Add the logged values to a sample's verdict."""
        extra = {name: fmean(values) for name, values in self._of_all.items()}
        extra |= {name: values[at] for name, values in self._of_samples.items()}
        extra |= verdict.get("extra", {})
        return {**verdict, "extra": extra} if extra else verdict


def one_by_one(
    score: Callable[[Sample], Any],
    file: str | None = None,
    entry: Callable[[Any], Verdict] = _number,
    loop: asyncio.Runner | None = None,
) -> Run:
    """Score each sample separately, so that an error concerns only one.

    Awaits up to :data:`ASKED_TOGETHER` results at a time in ``loop``.
    """

    def judge(sample: Sample) -> Verdict:
        result = in_this_process(score, sample)
        return {"awaitable": result} if inspect.isawaitable(result) else entry(result)

    async def finish(at: int, result: Awaitable[Any], limit: asyncio.Semaphore, send: Send) -> None:
        async with limit:
            try:
                with ending_forked_children():
                    verdict = entry(await result)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                verdict = {"error": describe(error, file)}
        send({"at": at, **verdict})

    async def finish_all(results: Mapping[int, Awaitable[Any]], send: Send) -> None:
        limit = asyncio.Semaphore(ASKED_TOGETHER)
        await asyncio.gather(*(finish(at, result, limit, send) for at, result in results.items()))

    def run(samples: Sequence[Sample], send: Send) -> None:
        results = {}
        for at, sample in enumerate(samples):
            verdict = _verdict(judge, sample, file)
            if "awaitable" in verdict:
                results[at] = verdict["awaitable"]
            else:
                send({"at": at, **verdict})
        if results and loop:
            in_this_process(loop.run, finish_all(results, send))

    return run


def all_at_once(
    score: Callable[[Sequence[Sample], Log], Any], file: str, entry: Callable[[Any], Verdict]
) -> Run:
    """Score the list in one call. ``entry`` converts a sample's part of the result.

    An error fails all samples. So does a wrong number of entries, because they cannot be matched.
    """

    def run(samples: Sequence[Sample], send: Send) -> str | None:
        log = Log(len(samples))
        outcome = _verdict(lambda s: {"value": in_this_process(score, s, log)}, samples, file)
        if "error" in outcome:
            return str(outcome["error"])
        result = outcome["value"]
        parts = _verdict(lambda scores: {"value": listed(scores, len(samples))}, result, file)
        verdicts = [parts] * len(samples)
        if "value" in parts:
            verdicts = [_verdict(entry, part, file) for part in parts["value"]]
        for at, verdict in enumerate(verdicts):
            send({"at": at, **log.beside(at, verdict)})
        return None

    return run


def _verdict(judge: Callable[[T], Verdict], on: T, file: str | None) -> Verdict:
    try:
        return judge(on)
    except KeyboardInterrupt:  # the user's, if the function runs in their process
        raise
    except BaseException as error:  # including SystemExit
        return {"error": describe(error, file)}


def listed(result: Any, count: int) -> Sequence[Any]:
    """Return a function's list of scores. Raises RewardError unless it has ``count`` entries."""
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, Sequence) or isinstance(result, str):
        raise RewardError(f"it returned {repr(result)[:200]} instead of a list of numbers")
    if len(result) != count:
        raise RewardError(f"it returned {len(result)} scores for {count} samples")
    return result


def as_number(value: Any) -> float:
    """Return a score as a float. Raises RewardError unless it is finite as float32."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not is_finite(number):
        raise RewardError(
            f"it returned {repr(value)[:200]} where a number is needed that is finite as float32"
        )
    return number
