"""Tools: functions that the policy calls, described by their type hints and docstrings."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stretto.environments.object_threads import ObjectThread
from stretto.environments.results import as_text, error_text, read_result
from stretto.environments.running import CallError, Runner
from stretto.errors import ConfigError, nearest
from stretto.plain import plain

SHARED = 4096
"""Most results of deterministic functions to keep."""

Tool = Callable[..., Any]


def schema_of(function: Tool, source: str) -> dict[str, Any]:
    """Return a function's JSON schema. ConfigError without hints or Google-style docstring."""
    refuse_generator(function, source)
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # the parsers of hints and docstrings raise many types
        name = getattr(function, "__name__", repr(function))
        why = str(error).rstrip("!.")
        raise ConfigError(
            f"`environment.sources`: the tool '{name}' of '{source}' cannot be described to the "
            f"policy: {why}. Give each parameter a type hint, and a line under 'Args:' in the "
            "docstring",
            "tool-without-schema",
        ) from error


def refuse_generator(function: Any, source: str) -> None:
    """Raise ConfigError for a function with ``yield``, because its result would be no value."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"`environment.sources`: '{function.__name__}' of '{source}' is a generator, and "
            "nothing would read its values; return one result in place of 'yield'",
            "environment-generator",
        )


class Results:
    """Results of functions marked ``deterministic``, by name and arguments.

    Siblings of a group often begin with the same call. It runs once, and the others wait for it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, asyncio.Future[Any]] = {}

    async def of(self, key: str, make: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result for a key, and whether it was shared. Errors are not kept."""
        future = self._kept.get(key)
        if future is not None:
            return await asyncio.shield(future), True
        task = self._kept[key] = asyncio.ensure_future(make())
        while len(self._kept) > SHARED:
            del self._kept[next(iter(self._kept))]
        try:
            return await task, False
        except BaseException:
            self._kept.pop(key, None)
            raise


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of an episode. It runs all calls of a turn concurrently.

    Attributes:
        of: object whose methods the tools are. Its calls run one after another.
        thread: of that object.
    """

    tools: Mapping[str, Tool]
    run: Runner
    results: Results
    of: object = None
    thread: ObjectThread | None = None

    async def answer(
        self, calls: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Run the calls of a turn. Return a message and a record for each, in order."""
        if self.of is None:
            answers = await asyncio.gather(*map(self._answer, calls))
        else:
            answers = [await self._answer(call) for call in calls]
        return [message for message, _ in answers], [record for _, record in answers]

    async def _answer(self, call: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        began_s = time.monotonic()
        name, arguments = call["name"], call["arguments"]
        status = call["status"]
        record = {"name": name, "arguments": arguments, "status": status}
        if status == "ok" and name not in self.tools:
            record["status"] = "unknown"
        try:
            result, shared = await self._result(call)
            if self.of is None:
                result, reward, metrics = read_result(result)
                extra = {"reward": reward, "metrics": metrics}
                record |= {k: plain(v) for k, v in extra.items() if v is not None}
            text = as_text(result)
            if shared:
                record["shared"] = True
        except CallError as error:
            text = error_text(str(error))
            record["error"] = error.place
            if error.timed_out:
                record["timed_out"] = True
        except Exception as error:  # the result cannot become text
            text = error_text(f"its result cannot be read: {error}")
            record["error"] = f"{type(error).__name__}: {error}"
        record["seconds"] = time.monotonic() - began_s
        message = {"role": "tool", "name": name, "content": text}
        return message | ({"tool_call_id": call["id"]} if call.get("id") else {}), record

    async def _result(self, call: Mapping[str, Any]) -> tuple[Any, bool]:
        name, arguments = call["name"], call["arguments"]
        if call["status"] != "ok":
            why = call.get("reason") or ("it has no end" if call["status"] == "unclosed" else "")
            raise CallError(f"the call cannot be read: {why or call['raw'][:200]}")
        tool = self.tools.get(name)
        if tool is None:
            raise CallError(f"there is no tool '{name}'. {nearest(name, self.tools)}")
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            raise CallError(f"{name}: {error}") from error
        of = tool if self.of is None else self.of
        bound_call = partial(tool, **arguments)
        if getattr(tool, "deterministic", False) and self.of is None:
            key = json.dumps([name, arguments], sort_keys=True)
            return await self.results.of(key, lambda: self.run(bound_call, of))
        return await self.run(bound_call, of, self.thread), False
