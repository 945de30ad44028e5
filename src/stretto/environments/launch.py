"""Calls a user's program in the current process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from stretto.environments.running import Runner
from stretto.errors import require

HTTP_CLIENT = "http_client"


def is_program(thing: Any) -> bool:
    """Whether an object is a program: a function with ``base_url``, a function named ``run`` with
    ``**extra``, or a class with ``run`` that is not an environment.
    """
    if inspect.isclass(thing):
        steps = callable(getattr(thing, "step", None)) or callable(getattr(thing, "reset", None))
        return callable(getattr(thing, "run", None)) and not steps
    if not inspect.isroutine(thing):
        return False
    parameters = parameters_of(thing)
    is_run_function = thing.__name__ == "run" and takes_any(parameters)
    return is_run_function or "base_url" in parameters


async def launch(
    run: Runner, program: Callable[..., Any], data: Mapping[str, Any], base_url: str, api_key: str
) -> Any:
    """Run a program and return its result.

    It gets ``base_url`` and ``api_key`` if it names them or takes ``**extra``, and if it names it,
    ``http_client`` (for OpenAI's library).
    """
    instance: Any = program() if inspect.isclass(program) else None
    function = program if instance is None else instance.run
    parameters = parameters_of(function)
    arguments: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
    if not takes_any(parameters):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    async with AsyncExitStack() as stack:
        if HTTP_CLIENT in parameters:
            require("openai", "judge", "a program that takes http_client")
            from openai import DefaultAsyncHttpxClient

            arguments[HTTP_CLIENT] = await stack.enter_async_context(DefaultAsyncHttpxClient())
        return await run(partial(function, dict(data), **arguments))


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name, or none if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C
        return {}


def takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())
