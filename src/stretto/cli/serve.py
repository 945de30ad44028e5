"""``stretto serve``: an OpenAI-compatible endpoint for a model, or a policy during training."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from stretto.cli.generate import check_model, command_chat
from stretto.cli.parsing import takes
from stretto.config import RolloutConfig, recipes
from stretto.config.capabilities import EngineName
from stretto.config.sections import ChatArguments, Port, RowsOrNone, Seed, Workers
from stretto.errors import StorageError, require
from stretto.machine import is_loopback
from stretto.observe.progress import on_stderr
from stretto.saying import LOADING, working

if TYPE_CHECKING:
    from stretto.api.policies import Policy
    from stretto.serving.streams import AsyncEngine

API_KEY = "STRETTO_API_KEY"
"""Environment variable with the key that requests must have."""

PATIENCE_S = 10
"""Grace period of answers in progress when the server stops, in seconds."""

FOLLOW_S = 2.0
"""Seconds between checks for a newer checkpoint."""

OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Host names of requests to a server on the loopback. IPv6 addresses are in brackets."""


@takes(command_chat, "model", "max_model_len", "dtype", "device")
def command_serve(
    model: str,
    /,
    follow: bool = False,
    host: str = "127.0.0.1",
    port: Port = 8000,
    api_key: str = "",
    engine: EngineName = "torch",
    slots: Workers = 16,
    queue: RowsOrNone = 256,
    seed: Seed = 0,
    template_arguments: ChatArguments = {},  # noqa: B006
    **options: Any,
) -> None:
    """Serve a model by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, and vLLM's
    /inference/v1/generate for token ids. Needs the extra 'serve'. Ctrl-C ends it.

    Args:
        follow: Load newer checkpoints of the run as they appear. Answers in progress end first.
        host: Address to listen on. Any but the default can be reached by other machines.
        port: Port to listen on. 0 takes a free one.
        api_key: Key that requests must have, better given as STRETTO_API_KEY in the environment.
        engine: Engine that generates. Vllm needs the extra 'vllm'.
        slots: Answers decoded at a time.
        queue: Limit of requests that wait for a slot. Further ones are refused with status 429.
        seed: Seed of requests that have none.
        template_arguments: An argument of the chat template, for example enable_thinking=false; may
            be repeated. A request's chat_template_kwargs take precedence.
    """
    for library in ("starlette", "uvicorn"):
        require(library, "serve", "stretto serve")
    rollout = recipes.build(
        {"engine": engine, "batch": slots, "slots": slots, "max_new_tokens": 1}, "", RolloutConfig
    )
    check_model(model)
    key = api_key or os.environ.get(API_KEY, "")
    if not (is_loopback(host) or key):
        on_stderr(
            f"whoever reaches {host} may use the model; {API_KEY} in the environment sets a key"
        )
    with _listening(host, port) as listener:
        with working(on_stderr, LOADING):
            from stretto.api.policies import open_policy
        opened = partial(
            open_policy,
            model,
            rollout,
            follow=follow,
            seed=seed,
            template_arguments=template_arguments,
            **options,
        )
        asyncio.run(_serve(listener, opened, key, slots + queue, follow=follow))


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a taken port is reported before a model loads."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise StorageError(
            f"cannot listen on {host}, port {port}: {error}; choose another with --host or --port",
            "port-taken",
        ) from error


async def _serve(
    listener: socket.socket, opened: Callable[[], Policy], key: str, most: int, *, follow: bool
) -> None:
    import uvicorn

    from stretto.serving.app import ModelServer
    from stretto.serving.connections import server_config
    from stretto.serving.streams import AsyncEngine
    from stretto.workers.threads import WorkerThread

    thread = WorkerThread("generator", 0)
    try:
        policy = await thread.run(opened)
        engine = AsyncEngine(policy.engine, thread.run, policy.longest, most)
        engine.version = policy.step
        host, port, *_ = listener.getsockname()
        # Without this, a web page could use the keyless server through a domain name that leads
        # here.
        local_only = is_loopback(host) and not key
        app = ModelServer(
            engine,
            policy.tokenizer,
            policy.name,
            api_key=key,
            label=policy.label,
            hosts=OWN_HOSTS if local_only else ("*",),
            end_tokens=policy.engine.settings.end_tokens,
            template_arguments=policy.template_arguments,
        ).app
        server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=PATIENCE_S))
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        of = f", step {policy.step}" if policy.run else ""
        print(f"serving {policy.name}{of} at {at} ({policy.longest} tokens)", flush=True)
        work = [asyncio.create_task(engine.run())]
        work += [asyncio.create_task(_follow(policy, engine))] if follow else []
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        # It ends by raising the signal that stopped it again, even if nothing awaits it.
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait((serving, *work), return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True  # as after a signal, if the engine failed
            await serving
        finally:
            for task in work:
                task.cancel()
            outcomes = await asyncio.gather(*work, return_exceptions=True)
        for error in outcomes:
            if isinstance(error, Exception):
                raise error
    finally:
        thread.interrupt()
        thread.join(PATIENCE_S)


async def _follow(policy: Policy, engine: AsyncEngine) -> None:
    while True:
        await asyncio.sleep(FOLLOW_S)
        if weights := await asyncio.to_thread(policy.newer):
            engine.load(weights)
            on_stderr(f"step {weights.version} answers once the answers under way have ended")
