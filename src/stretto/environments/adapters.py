"""Recognises environments by their methods: tools, TRL, gymnasium, SkyRL, OpenRLHF and others."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

from stretto.environments.launch import is_program, parameters_of, takes_any
from stretto.environments.made import (
    MADE_WITH,
    Row,
    VerlTool,
    accepted,
    config_for,
    earns,
    is_verl,
    made,
)
from stretto.environments.object_threads import ObjectThread
from stretto.environments.results import (
    Opening,
    TurnResult,
    error_text,
    read_opening,
    read_step,
    summed,
)
from stretto.environments.running import CallError, Runner
from stretto.environments.tools import Results, Tool, ToolSet, refuse_generator, schema_of
from stretto.errors import ConfigError, RewardError
from stretto.scoring.conventions import as_number

Turn = Mapping[str, Any]
"""A turn as ``index``, ``text``, ``tokens``, ``calls``, ``message`` and ``finish``, which is
``length`` if a token limit cut the turn."""

_BEGINNINGS = ("reset", "init", "initial_observation")
BEGINNINGS = {"open", *_BEGINNINGS}
"""Methods that begin an episode, of environments with ``step``."""

Kind = Literal["functions", "environment", "program"]

SHAPES = """\
  functions  def f(argument: hint) -> result, with a docstring: tools
  class      open(row), step(turn), close()
  TRL        reset(**row) and public methods, which are tools; get_reward()
  gymnasium  reset(seed=, options=), step(action) -> 5 or 4 values; also OpenEnv, Tinker
  SkyRL      init(prompt), step(action) -> dict
  verl       create(), execute(instance_id, parameters), calc_reward(), release(): a tool
  OpenRLHF   reset(states), step(states) -> dict
  program    async def run(data, base_url, api_key)"""


class Episode(ABC):
    """A live episode of one environment.

    Attributes:
        environment: the user's object, if there is one.
        thread: in which the object is made, called and closed.
        sound: False after a call that was given up, because it may still run.
        schemas: of tools to add to the opening's, for an environment that a row chooses.
    """

    environment: Any = None
    thread: ObjectThread | None = None
    sound = True
    schemas: Sequence[dict[str, Any]] = ()

    @abstractmethod
    async def open(self, messages: Sequence[Row]) -> Opening:
        """Begin with the messages of the prompt."""

    @abstractmethod
    async def step(self, turn: Turn) -> TurnResult:
        """Answer a turn."""

    async def finish(self) -> float | None:
        return None

    async def close(self) -> None:
        return


@dataclass
class Source:
    """A recognised entry of ``environment.sources``.

    Attributes:
        make: creates an episode for a row.
        tools: schemas of tools that all episodes have.
        replay: the environment's own setting, or empty.
        run: the program, if it is one.
        rewards: whether the environment gives rewards.
    """

    kind: Kind
    make: Callable[[Row], Episode]
    tools: list[dict[str, Any]] = field(default_factory=list)
    replay: str = ""
    run: Callable[..., Any] | None = None
    rewards: bool = True


Home = tuple[ObjectThread, Any]
"""An object and its thread."""


class Factory:
    """A factory of environments. If only an object tells the shape, the first is made at once.

    Attributes:
        makes: class of the environments.
        first: objects that wait for an episode.
        most: live objects of TRL's shape. 0: no limit.
    """

    def __init__(self, factory: Callable[[], Any], most: int = 0) -> None:
        self._factory, self.most = factory, most
        self.first: list[Home] = []
        if inspect.isclass(factory):
            self.makes: type = factory
            return
        thread = ObjectThread(factory)
        first = thread.result(factory)
        self.makes = type(first)
        self.first.append((thread, first))

    def __call__(self) -> Any:
        return self._factory()


def tools_of(kind: type) -> list[str]:
    names = (name for name, _ in inspect.getmembers(kind, inspect.isroutine))
    return [n for n in names if not (n.startswith("_") or n in ("reset", "get_reward"))]


def not_made(name: str, error: Exception) -> ConfigError:
    """Return the error for a factory that fails without arguments."""
    return ConfigError(
        f"`environment.sources`: '{name}' cannot be made without arguments: {error}",
        "environment-parameters",
    )


def unknown_environment(name: str, sort: str) -> ConfigError:
    """Return the error for an object that is neither environment, tool nor program."""
    return ConfigError(
        f"`environment.sources`: '{name}' is {sort} of no known shape. Known:\n{SHAPES}\nGive a "
        "class and not an object of it. A function that makes environments says so by its return "
        "type hint",
        "unknown-environment",
    )


def recognise(
    named: Mapping[str, Any], run: Runner, settings: Row = MappingProxyType({})
) -> Source:
    """Make a source of named objects. ConfigError for unknown or incompatible shapes."""
    tools = {name: thing for name, thing in named.items() if _is_tool(thing)}
    if len(tools) == len(named):
        return _functions(tools, run, settings)
    if len(named) > 1:
        other = next(name for name in named if name not in tools)
        raise ConfigError(
            f"`environment.sources`: '{other}' is no function, and only functions, which are "
            "tools, can be named beside others; name one environment, or a dict of them",
            "environments-mixed",
        )
    ((name, thing),) = named.items()
    if is_program(thing):
        return Source("program", lambda row: _refuse_program(), run=thing)
    if isinstance(thing, Mapping):
        return _choice(name, thing, run, settings)
    return _environment(name, thing, run, settings)


def _is_tool(thing: Any) -> bool:
    function = inspect.isroutine(thing) and not is_program(thing) and made_by(thing) is None
    return function or is_verl(thing)


def made_by(factory: Any) -> type | None:
    """Return the class that a class, or a function by its return hint, makes."""
    if inspect.isclass(factory):
        return factory
    if isinstance(factory, Factory):
        return factory.makes
    try:
        hint = inspect.get_annotations(factory, eval_str=True).get("return")
    except Exception:  # a hint may be any expression
        return None
    return hint if inspect.isclass(hint) and shape_of(hint) else None


def shape_of(kind: type) -> type[_Own | _Trl | _Stepped] | None:
    """Return the shape of a class by its methods, or ``None`` if it is no environment."""
    if not callable(getattr(kind, "step", None)):
        return _Trl if callable(getattr(kind, "reset", None)) else None
    if callable(getattr(kind, "open", None)):
        return _Own
    begins = any(callable(getattr(kind, name, None)) for name in _BEGINNINGS)
    return _Stepped if begins else None


def is_trl(kind: type) -> bool:
    return shape_of(kind) is _Trl


def _functions(tools: Mapping[str, Any], run: Runner, settings: Row) -> Source:
    by_name: dict[str, Any] = {}
    for source, thing in tools.items():
        tool = VerlTool(source, thing, settings) if is_verl(thing) else thing
        name = tool.name if isinstance(tool, VerlTool) else tool.__name__
        if name in by_name:
            raise ConfigError(
                f"`environment.sources`: two tools have the name '{name}', and the policy calls "
                "them by it; rename one",
                "tools-alike",
            )
        by_name[name] = tool
    verl = {name: tool for name, tool in by_name.items() if isinstance(tool, VerlTool)}
    schemas = [
        tool.schema if isinstance(tool, VerlTool) else schema_of(tool, source)
        for source, tool in zip(tools, by_name.values(), strict=True)
    ]
    results = Results()
    kind: Kind = "environment" if verl else "functions"
    rewards = bool(verl) or any(map(earns, tools.values()))
    return Source(
        kind, lambda row: _Functions(by_name, verl, row, run, results), schemas, rewards=rewards
    )


def _environment(name: str, factory: Any, run: Runner, settings: Row) -> Source:
    """Return a source of environments, which are new for each episode or pooled (TRL)."""
    kind = made_by(factory)
    shape = None if kind is None else shape_of(kind)
    if kind is None or shape is None:
        raise unknown_environment(name, sort_of(factory))
    for method in ("step", *BEGINNINGS):
        refuse_generator(getattr(kind, method, None), name)
    replay = str(getattr(kind, "replay", "") or "")
    if replay not in ("", "pure", "recorded", "no"):
        raise ConfigError(
            f"`environment.sources`: '{name}' has replay = '{replay}'; it is 'pure', 'recorded' or "
            "'no'",
            "unknown-replay",
        )
    if shape is _Trl:
        pool = _Pool(name, factory, kind, run)
        return Source("environment", lambda row: _Trl(pool, row, run), pool.schemas, replay)
    for needed in _needed(factory):
        if needed not in MADE_WITH:
            raise ConfigError(
                f"`environment.sources`: '{name}' cannot be made, as '{needed}' is not known; "
                f"parameters without a default are any of {', '.join(MADE_WITH)}",
                "environment-parameters",
            )
    if "env_config" in parameters_of(factory):
        config_for(factory, settings)  # raises early if the settings do not fit
    tools = getattr(kind, "tools", None)
    listed = tools if isinstance(tools, list | tuple) else ()
    schemas = [t if isinstance(t, dict) else schema_of(t, name) for t in listed]
    create: Any = shape
    return Source("environment", lambda row: create(factory, row, run, settings), schemas, replay)


def sort_of(thing: Any) -> str:
    """Describe the type of an object for messages."""
    if inspect.isclass(thing):
        return "a class"
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _choice(name: str, factories: Mapping[Any, Any], run: Runner, settings: Row) -> Source:
    """Return a source that chooses by the row's column ``environment``."""
    sources = {
        str(key): _environment(f"{name}[{key!r}]", factory, run, settings)
        for key, factory in factories.items()
    }
    if not sources:
        raise ConfigError(
            f"`environment.sources`: '{name}' is an empty dict; name the environments that the "
            "column 'environment' of the dataset chooses from",
            "unknown-environment",
        )

    def make(row: Row) -> Episode:
        row_source = sources.get(str(row.get("environment")))
        if row_source is None:
            raise CallError(
                f"the row's column 'environment' is {row.get('environment')!r}, and '{name}' has "
                f"{', '.join(sources)}"
            )
        episode = row_source.make(row)
        episode.schemas = row_source.tools
        return episode

    replays = {source.replay for source in sources.values()}
    return Source("environment", make, replay=replays.pop() if len(replays) == 1 else "")


def _refuse_program() -> Episode:
    raise AssertionError("a program holds its loop itself")


@dataclass(eq=False)
class _Functions(Episode):
    """Functions as tools. A turn without calls ends the episode."""

    tools: Mapping[str, Any]
    verl: Mapping[str, VerlTool]
    row: Row
    run: Runner
    results: Results
    instances: dict[str, str] = field(default_factory=dict)

    async def open(self, messages: Sequence[Row]) -> Opening:
        for name, tool in self.verl.items():
            self.instances[name] = await tool.create(self.row, self.run)
        return Opening()

    async def step(self, turn: Turn) -> TurnResult:
        if turn["finish"] == "length" or not turn["calls"]:
            return TurnResult(done=True)
        verl_tools = {name: tool.call(self.instances[name]) for name, tool in self.verl.items()}
        tools = ToolSet({**self.tools, **verl_tools}, self.run, self.results)
        messages, records = await tools.answer(turn["calls"])
        return TurnResult(
            messages, reward=summed(*(r.get("reward") for r in records)), calls=records
        )

    async def finish(self) -> float | None:
        instances = self.instances.items()
        return summed(
            *[await self.verl[name].reward(instance, self.run) for name, instance in instances]
        )

    async def close(self) -> None:
        while self.instances:
            name, instance = self.instances.popitem()
            await self.verl[name].release(instance, self.run)


class _Pool:
    """Objects of TRL's ``environment_factory``, reset for one episode after another.

    The first is made at once, because its methods are the tools. A :class:`Factory` keeps the
    objects for a later run with it.
    """

    def __init__(self, name: str, factory: Callable[[], Any], kind: type, run: Runner) -> None:
        self._factory = factory
        self._kind = kind
        self._run = run
        self._idle: list[Home] = getattr(factory, "first", [])
        self._places = asyncio.Semaphore(getattr(factory, "most", 0) or sys.maxsize)
        thread = run.thread_for(kind)
        if thread.main:
            self._idle[:] = [home for home in self._idle if home[0].main]
        try:
            if not self._idle:
                self._idle.append((thread, thread.result(factory)))
        except Exception as error:
            raise not_made(name, error) from error
        _, first = self._idle[0]
        self._names = tools_of(type(first))
        self.schemas = [schema_of(getattr(first, key), name) for key in self._names]
        self.results = Results()

    async def take(self) -> Home:
        """Return an idle or new object. Waits while the maximum is in use."""
        await self._places.acquire()
        if self._idle:
            return self._idle.pop()
        try:
            thread = self._run.thread_for(self._kind)
            return thread, await self._run(self._factory, thread=thread)
        except BaseException:
            self._places.release()
            raise

    def give_back(self, home: Home, *, sound: bool) -> None:
        if sound:
            self._idle.append(home)
        self._places.release()

    def tools(self, environment: Any) -> dict[str, Tool]:
        return {name: getattr(environment, name) for name in self._names}


class _Trl(Episode):
    """A TRL environment, reset with the row's columns. A turn without calls ends the episode."""

    def __init__(self, pool: _Pool, row: Row, run: Runner) -> None:
        self._pool = pool
        self._row = row
        self._run = run
        self._tools: ToolSet | None = None

    async def open(self, messages: Sequence[Row]) -> Opening:
        self.thread, environment = await self._pool.take()
        self.environment = environment
        tools = self._pool.tools(environment)
        self._tools = ToolSet(tools, self._run, self._pool.results, environment, self.thread)
        self.sound = False
        reset = partial(environment.reset, **accepted(environment.reset, self._row))
        observation = await self._run(reset, environment, self.thread)
        self.sound = True
        return read_opening(observation)

    async def step(self, turn: Turn) -> TurnResult:
        if turn["finish"] == "length" or not turn["calls"]:
            return TurnResult(done=True)
        assert self._tools
        messages, records = await self._tools.answer(turn["calls"])
        self.sound &= not any(record.get("timed_out") for record in records)
        return TurnResult(messages, calls=records)

    async def finish(self) -> float | None:
        get_reward = getattr(self.environment, "get_reward", None)
        if get_reward is None:
            return None
        sound = self.sound
        self.sound = False
        reward = await self._run(get_reward, self.environment, self.thread)
        self.sound = sound
        return None if reward is None else as_number(reward)

    async def close(self) -> None:
        if self.thread is not None:
            self._pool.give_back((self.thread, self.environment), sound=self.sound)
        self.environment = self.thread = None


def _needed(factory: Any) -> list[str]:
    if hasattr(factory, "from_dict"):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = parameters_of(factory).items()
    return [name for name, p in parameters if p.kind in kinds and p.default is p.empty]


def _apart(opening: Opening, messages: Sequence[Row]) -> Opening:
    """Start the opening's text on a new line, unless a space separates it from the prompt."""
    last = str(messages[-1]["content"])[-1:] if messages else ""
    if last.strip() and opening.text[:1].strip():
        opening.text = "\n" + opening.text
    return opening


def _failed_step(place: str) -> dict[str, Any]:
    return {"name": "step", "status": "ok", "error": place}


class _Made(Episode):
    """An environment made for one episode and closed after it."""

    def __init__(self, factory: Any, row: Row, run: Runner, settings: Row) -> None:
        self._factory = factory
        self._row = row
        self._run = run
        self._settings = settings

    async def _make(self) -> Any:
        self.thread = self._run.thread_for(made_by(self._factory))
        first = getattr(self._factory, "first", None)
        if first and not self.thread.main:
            self.thread, self.environment = first.pop()
        else:
            make = partial(made, self._factory, self._row, self._settings)
            self.environment = await self._run(make, thread=self.thread)
        return self.environment

    async def _call(self, call: Callable[[], Any]) -> Any:
        return await self._run(call, self.environment, self.thread)

    async def _step(self, action: Any) -> TurnResult:
        """Step the environment. An error is an observation, an unreadable result a failure."""
        try:
            return read_step(await self._call(partial(self.environment.step, action)))
        except CallError as error:
            message = {"role": "user", "content": error_text(str(error))}
            return TurnResult([message], calls=[_failed_step(error.place)])
        except RewardError as error:
            failure = f"the environment's step: {error}"
            return TurnResult(done=True, calls=[_failed_step(str(error))], failure=failure)

    async def close(self) -> None:
        environment, close = self.environment, getattr(self.environment, "close", None)
        thread = self.thread
        self.environment = None
        self.thread = None
        if environment is not None and callable(close):
            free = thread if thread and not thread.hangs else None
            await self._run(close, environment, free)


class _Own(_Made):
    """Stretto's own protocol: ``open(row)``, ``step(turn)``, ``close()``."""

    async def open(self, messages: Sequence[Row]) -> Opening:
        await self._make()
        opening = await self._call(partial(self.environment.open, dict(self._row)))
        return _apart(read_opening(opening), messages)

    async def step(self, turn: Turn) -> TurnResult:
        calls = [SimpleNamespace(**call) for call in turn["calls"]]
        return await self._step(SimpleNamespace(**{**turn, "calls": calls}))


class _Stepped(_Made):
    """Environments with reset and step, as in gymnasium and similar libraries."""

    async def open(self, messages: Sequence[Row]) -> Opening:
        environment = await self._make()
        begin = next(name for name in _BEGINNINGS if hasattr(environment, name))
        prompt = list(messages)
        text = "\n\n".join(str(m["content"]) for m in prompt)
        self._states = {"observation": text, "label": self._row.get("label")}
        options = dict(self._row)
        arguments = {"seed": _seed(self._row), "options": options, "states": self._states}
        values = {**self._row, **arguments, "prompt": prompt}
        function = getattr(environment, begin)
        parameters = parameters_of(function)
        if takes_any(parameters):
            values = {k: v for k, v in values.items() if k not in arguments or k in parameters}
        result = await self._call(partial(function, **accepted(function, values)))
        if "states" in parameters:  # OpenRLHF returns the prompt, possibly with more text
            opening = result.get("observation") if isinstance(result, Mapping) else result
            return Opening() if opening == text else _apart(read_opening(opening), messages)
        return _apart(read_opening(result, replaces=begin == "init"), messages)

    async def step(self, turn: Turn) -> TurnResult:
        parameters = parameters_of(self.environment.step)
        if "states" in parameters:
            action: Any = {
                "observation_text": self._states["observation"],
                "action_text": turn["text"],
                "label": self._states["label"],
                "sampling_params": None,
            }
            step = await self._step(action)
            observation = "".join(str(m["content"]) for m in step.messages)
            self._states["observation"] += turn["text"] + observation
            return step
        return await self._step(turn["text"])


def _seed(row: Row) -> int:
    """Return a seed that depends only on the row, so that siblings get the same world."""
    text = json.dumps(row, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
