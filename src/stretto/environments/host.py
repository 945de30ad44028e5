"""Live episodes of an environment by id, and requests about them as plain data."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from types import ModuleType
from typing import Any, ClassVar, Self

from stretto.environments.adapters import Episode, Source, recognise
from stretto.environments.launch import launch
from stretto.environments.object_threads import needs_main_thread
from stretto.environments.results import (
    CHARACTERS_PER_TOKEN,
    TurnResult,
    bounded,
    shortened,
    summed,
)
from stretto.environments.running import CallError, Runner, is_cancelled
from stretto.errors import ConfigError, RewardError
from stretto.outside import describe, import_module, member_of
from stretto.plain import plain
from stretto.scoring.conventions import (
    ENVIRONMENTS,
    Log,
    Sample,
    Verdict,
    bound,
    convention_of,
    function_or_object,
    listed,
)

_OPEN = ("error", "place", "failure", "calls", "result")
"""Keys of an answer whose length depends on user code."""


async def judged(
    function: Callable[..., Any], name: str, episode: Episode, sample: Sample, run: Runner
) -> Verdict:
    """Call TRL's reward function with the parameter ``environments`` at the end of an episode.

    It gets a batch of one, because the object is soon reset for another episode.
    """
    log, signature = Log(1), inspect.signature(function)
    convention = convention_of(signature, "", name).convention
    arguments = convention.arguments_of_all([sample], log)
    arguments[ENVIRONMENTS] = [episode.environment]
    thread = None if needs_main_thread(function) else episode.thread
    try:
        result = await run(bound(function, signature, arguments), thread=thread)
        (entry,) = listed(log.scores(result), 1)
        return log.beside(0, convention.entry(entry))
    except CallError as error:
        episode.sound &= not error.timed_out
        return {"error": error.place}
    except RewardError as error:
        return {"error": str(error)}


class EnvironmentHost:
    """Answers requests about episodes (see :mod:`stretto.workers.user_code`).

    ::

        {"do": "open", "episode": id, "row": {...}, "messages": [...]}  -> an Opening, as a dict
        {"do": "step", "episode": id, "turn": {...}}                    -> a TurnResult, as a dict
        {"do": "finish", "episode": id}         -> {"reward": number or null, maybe "failure": text}
        {"do": "score", "episode": id, "samples": {source: {...}}}
                                                    -> {"scores": {source: a verdict}}
        {"do": "close", "episode": id}                                  -> {}
        {"do": "run", "episode": id, "arguments": {...}}  of a program  -> {"result": plain data}
        {"do": "stop", "episode": id}                                   -> {}
        any of them                                                     -> {"error": text}

    Args:
        named: the objects of ``environment.sources`` by name.
        settings: ``timeout_s``, ``parallel`` and ``max_observation_tokens`` of the environment, and
            ``reward_timeout_s`` of judges.
        judges: reward functions that take environments, by reward source.
    """

    concurrent: ClassVar = True

    def __init__(
        self,
        named: Mapping[str, Any],
        settings: Mapping[str, Any],
        judges: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._run = Runner(settings["parallel"], settings["timeout_s"])
        # No limit: in lockstep, programs get their turns only once all of them have sent a request.
        self._unlimited = Runner(sys.maxsize, math.inf, settings["parallel"])
        self._characters = CHARACTERS_PER_TOKEN * settings["max_observation_tokens"]
        self.source: Source = recognise(named, self._run, settings.get("settings", {}))
        if judges and self.source.kind != "environment":
            raise ConfigError(
                f"reward.sources: '{next(iter(judges))}' has the parameter '{ENVIRONMENTS}', and "
                f"{', '.join(named)} are no environments; leave the parameter out",
                "no-environments",
            )
        limit_s = settings.get("reward_timeout_s", settings["timeout_s"])
        self._judging = Runner(settings["parallel"], limit_s)
        self._judges = {
            name: function_or_object(judge, "", name) for name, judge in (judges or {}).items()
        }
        self._episodes: dict[int, Episode] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._programs: dict[int, asyncio.Future[Any]] = {}
        self._does: Mapping[str, Callable[[Any], Coroutine[Any, Any, dict[str, Any]]]] = {
            "open": self._open,
            "step": self._step,
            "finish": self._finish,
            "score": self._score,
            "close": self._close,
            "run": self._run_program,
            "stop": self._stop_program,
        }

    @classmethod
    def open(cls, opening: Mapping[str, Any]) -> Self:
        """Import the ``"sources"`` and ``"judges"``, and use the ``"settings"``."""
        modules: dict[str, ModuleType] = {}
        sources = _imported(opening["sources"], "`environment.sources`", modules)
        judges = _imported(opening.get("judges", {}), "reward.sources", modules)
        host = cls(sources, opening["settings"], judges)
        host.use_main(asyncio.get_running_loop())
        return host

    @property
    def is_worn(self) -> bool:
        return any(runner.is_worn for runner in (self._run, self._unlimited, self._judging))

    def use_main(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Set the event loop for calls that need the process's main thread."""
        self._run.main = self._judging.main = loop

    def ready(self) -> dict[str, Any]:
        source = self.source
        rewards = {"rewards": source.rewards}
        return {"kind": source.kind, "tools": source.tools, "replay": source.replay, **rewards}

    async def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._answered(body)
        cut = {key: bounded(answer[key], self._characters) for key in _OPEN if key in answer}
        return {**answer, **cut}

    async def _answered(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._does[body["do"]](body)
        except (CallError, RewardError) as error:
            return {"error": str(error), "place": getattr(error, "place", str(error))}
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return {"error": type(error).__name__, "place": describe(error, None)}
        except Exception as error:  # otherwise there would be no answer
            text = f"{type(error).__name__}: {error}"
            return {"error": text, "place": describe(error, None)}

    async def _open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._close(body)
        episode = self.source.make(body["row"])
        self._episodes[body["episode"]] = episode
        try:
            opening = asdict(await episode.open(body["messages"]))
            if episode.schemas:
                opening["tools"] = [*episode.schemas, *(opening["tools"] or ())]
        except BaseException:
            await self._close(body)
            raise
        if self.source.tools and not opening["tools"]:
            opening["tools"] = None  # the prompt already has them
        return opening

    async def _step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        episode = self._episodes[body["episode"]]
        step: TurnResult = await episode.step(body["turn"])
        step.messages = shortened(step.messages, self._characters)
        answer = {**asdict(step), "calls": plain(step.calls)}
        if step.done:
            outcome = await self._finish(body)
            answer |= {**outcome, "reward": summed(step.reward, outcome["reward"])}
        return answer

    async def _finish(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"reward": await self._episodes[body["episode"]].finish()}
        except (CallError, RewardError) as error:  # not a number
            return {"reward": None, "failure": str(error)}

    async def _score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        episode = self._episodes[body["episode"]]
        scores = {}
        for name, sample in body["samples"].items():
            judge = self._judges[name]
            scores[name] = await judged(judge, name, episode, sample, self._judging)
        return {"scores": scores}

    async def _close(self, body: Mapping[str, Any]) -> dict[str, Any]:
        episode = self._episodes.pop(body["episode"], None)
        if episode is not None:
            await asyncio.shield(self._begin_close(episode))
        return {}

    def _begin_close(self, episode: Episode) -> asyncio.Future[None]:
        closing = asyncio.ensure_future(episode.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _run_program(self, body: Mapping[str, Any]) -> dict[str, Any]:
        assert self.source.run, "only programs are run"
        work = launch(self._unlimited, self.source.run, **body["arguments"])
        program = self._programs[body["episode"]] = asyncio.ensure_future(work)
        try:
            return {"result": plain(await program)}
        except CallError as error:
            return {"error": str(error), "place": _place(error, self.source.run)}
        except asyncio.CancelledError:
            return {"error": "it was ended"}
        finally:
            self._programs.pop(body["episode"], None)

    async def _stop_program(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if program := self._programs.get(body["episode"]):
            program.cancel()
        return {}

    async def close(self) -> None:
        """Close all episodes and wait for them. Errors are ignored, as nobody would read them."""
        for episode in self._episodes.values():
            self._begin_close(episode)
        self._episodes.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)


def _imported(
    places: Mapping[str, Mapping[str, str]], setting: str, modules: dict[str, ModuleType]
) -> dict[str, Any]:
    """Return objects by name. All objects of a file come from one import."""
    objects = {}
    for name, place in places.items():
        file = place["file"]
        if file not in modules:
            modules[file] = import_module(file, place["module"], place["root"], setting)
        objects[name] = member_of(modules[file], place, setting)
    return objects


def _place(error: CallError, program: Any) -> str:
    if error.__cause__ is None:
        return error.place
    try:
        file = inspect.getsourcefile(program)
    except TypeError:  # it has none
        file = None
    return describe(error.__cause__, file)
