"""Clients for a schedule's roles. Executors run the work on a thread or in a process.

:class:`KVRouter` is the driver's side of :mod:`stretto.runtime.kv_transfer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from stretto.config import ENVIRONMENT
from stretto.errors import RankError, TransferError
from stretto.observe.spans import SWAPS
from stretto.protocols import Environment, Tracer
from stretto.runtime.kv_transfer import SAMPLE_BYTES
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.process_messages import Loaded
from stretto.runtime.role_services import FollowerService, GeneratorService, ScorerService
from stretto.stateful import from_plain
from stretto.types import (
    Chunk,
    Decoded,
    Hold,
    KVTransfer,
    Observation,
    Reply,
    Response,
    Score,
    ScorerInfo,
    TrainBatch,
    TrainStepOutput,
    WeightsRef,
    short_name,
)
from stretto.weights.transfer import Meeting, Route, choose_wires
from stretto.workers.flight import AnswerCodec
from stretto.workers.gate import EventGate
from stretto.workers.services import remote_of
from stretto.workers.threads import Executor, Method, T, Ts

Load = Callable[[WeightsRef], Awaitable[Reply[Loaded]]]


@dataclass(eq=False)
class Client:
    """Calls the service of a role through a gate, and traces the work that its replies list."""

    member: str  # unique name in the run
    role: str  # name in traces
    executor: Executor
    tracer: Tracer
    gate: EventGate = field(default_factory=EventGate)
    answer: AnswerCodec[Any] | None = None  # records what a replay cannot compute again

    async def _call(self, method: Method[*Ts, Reply[T]], *args: *Ts) -> T:
        with self._awaiting(remote_of(method).span):
            return await self._passed(method.__name__, lambda: self.executor.call(method, *args))

    async def _passed(self, method: str, call: Callable[[], Awaitable[Reply[T]]]) -> T:
        """Return the value of a call's reply once it has passed the gate."""

        async def work() -> T:
            reply = await call()
            for w in reply.work:
                role = SWAPS if w.beside else self.role
                self.tracer.add(role, w.name, w.start_s, w.end_s, **w.attributes)
            return reply.value

        return await self.gate.outcome(self.member, method, work, self.answer)

    def _awaiting(self, span: str) -> AbstractContextManager[None]:
        return self.tracer.awaiting(self.role, span) if span else nullcontext()


@dataclass(eq=False)
class FollowerClient(Client):
    """A client of a role that may follow a trained model."""

    sync: Load | None = None  # called instead of the service's method

    async def restart(self) -> None:
        await self.gate.outcome(self.member, "restart", self.executor.restart)

    async def load(self, weights: WeightsRef) -> None:
        if self.sync is None:
            await self._call(FollowerService.load, weights)
        else:
            await self.loaded(partial(self.sync, weights))

    async def loaded(self, load: Callable[[], Awaitable[Reply[Loaded]]]) -> None:
        with self._awaiting("load"):
            await self._passed("load", load)


@dataclass(eq=False)
class GeneratorClient(FollowerClient):
    """A generator on an executor. See :class:`~stretto.protocols.Generator`."""

    kv_router: KVRouter | None = None  # if KV caches are sent between processes

    def __post_init__(self) -> None:
        if self.kv_router:
            self.kv_router.add(self.member, self.executor)

    async def admit(self, responses: Sequence[Response]) -> None:
        await self._call(GeneratorService.admit, responses)

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        return await self._call(GeneratorService.decode, max_tokens, stop_after)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        await self._call(GeneratorService.release, rollout_ids)

    async def hold(self, rollout_ids: Sequence[int], how: Hold) -> None:
        await self._call(GeneratorService.hold, rollout_ids, how)

    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[KVTransfer]:
        return await self._call(GeneratorService.export, rollout_ids, with_cache)

    async def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        if self.kv_router is None:
            await self._call(GeneratorService.accept, responses, transfers)
            return
        accept = partial(self.kv_router.accept, self.member, responses, transfers)
        with self._awaiting("migrate"):
            await self._passed("accept", accept)


@dataclass(eq=False, kw_only=True)
class ScorerClient(FollowerClient):
    """A scorer on an executor. See :class:`~stretto.protocols.Scorer`."""

    info: ScorerInfo  # initial, replaced by calls that return a ScorerInfo

    def _awaiting(self, span: str) -> AbstractContextManager[None]:
        reads = span in ("prefill", "score")
        return super()._awaiting(f"{span}/{short_name(self.info.name)}" if reads else span)

    async def admit(self, responses: Sequence[Response]) -> None:
        self.info = await self._call(ScorerService.admit, responses)

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        self.info = await self._call(ScorerService.extend, chunks)

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        return await self._call(ScorerService.finish, rollout_ids)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        self.info = await self._call(ScorerService.release, rollout_ids)


class LearnerClient(Client):
    """A learner on an executor. See :class:`~stretto.protocols.Learner`."""

    async def train(self, batch: TrainBatch) -> TrainStepOutput:
        return await self._call(LearnerService.train, batch)

    async def accumulate(self, batch: TrainBatch) -> None:
        await self._call(LearnerService.accumulate, batch)

    async def publish(self) -> Mapping[str, WeightsRef]:
        return await self._call(LearnerService.publish)


class CodeAnswer:
    """Records scores of a reward function. Calls without scores return ``info``."""

    def __init__(self, info: ScorerInfo | None) -> None:
        self._info = info

    def plain(self, value: Any) -> Any:
        if value is None or isinstance(value, ScorerInfo):
            return None
        return [{**_fields_of(score), "values": score.values.tolist()} for score in value]

    def value(self, plain: Any) -> Any:
        return self._info if plain is None else [from_plain(Score, score) for score in plain]


class ObservationAnswer:
    """Records an environment's answer to a response."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def plain(self, value: Observation) -> Any:
        prompt = value.prompt and [value.prompt.tokens, value.prompt.text, value.prompt.messages]
        return {**_fields_of(value), "tokens": value.tokens.tolist(), "prompt": prompt}

    def value(self, plain: Any) -> Observation:
        prompt = None
        if plain["prompt"] is not None:
            tokens, text, messages = plain["prompt"]
            prompt = replace(
                self._response.prompt,
                tokens=tuple(tokens),
                text=text,
                messages=None if messages is None else tuple(messages),
            )
        return from_plain(Observation, plain, prompt=prompt)


def _fields_of(message: Score | Observation) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(message)}


class EnvironmentClient:
    """An environment behind a gate. See :class:`~stretto.protocols.Environment`."""

    def __init__(self, environment: Environment, gate: EventGate) -> None:
        self._environment = environment
        self._outcome = partial(gate.outcome, ENVIRONMENT)

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        work = partial(self._environment.open, response, log)
        return await self._outcome("open", work, ObservationAnswer(response))

    async def step(self, response: Response) -> Observation:
        work = partial(self._environment.step, response)
        return await self._outcome("step", work, ObservationAnswer(response))

    async def release(self, rollout_ids: Sequence[int]) -> None:
        await self._outcome(
            "release", partial(self._environment.release, rollout_ids), CodeAnswer(None)
        )


class KVRouter:
    """Makes givers send bundles when tickets reach a taker."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._count = meeting, 0
        self._groups: dict[tuple[str, str], tuple[int, tuple[int, int]]] = {}
        self._generators: dict[str, Executor] = {}
        self._takers: dict[str, asyncio.Lock] = {}

    def add(self, name: str, generator: Executor) -> None:
        self._generators[name] = generator
        self._takers[name] = asyncio.Lock()

    async def accept(
        self, name: str, responses: Sequence[Response], transfers: Sequence[KVTransfer]
    ) -> Reply[None]:
        """Let the taker ``name`` accept rollouts while the givers send their bundles."""
        # A giver sends in the order in which the taker asks, because its bundles share a channel.
        by_giver: dict[str, dict[int, list[Route]]] = {}
        routed_transfers = []
        for transfer in transfers:
            if (ticket := transfer.cache) is not None:
                bundles = by_giver.setdefault(ticket.giver, {})
                if ticket.bundle not in bundles:
                    bundles[ticket.bundle] = self._routes(ticket.giver, name)
                ticket = replace(ticket, route=bundles[ticket.bundle][1])
            routed_transfers.append(replace(transfer, cache=ticket))
        async with self._takers[name]:
            shipping = [
                asyncio.to_thread(self._ship, name, *shipment) for shipment in by_giver.items()
            ]
            accepted = self._generators[name].call(
                GeneratorService.accept, responses, routed_transfers
            )
            reply, _ = await asyncio.gather(accepted, asyncio.gather(*shipping))
        return reply

    def bytes_per_s(self, giver: str, taker: str) -> float:
        """Measure the bandwidth from one generator to another. Blocks."""
        ways, seconds = self._routes(giver, taker), 0.0
        for _ in range(2):  # the first also sets up the group
            bundle, what = self._generators[giver].ask(GeneratorService.sample)
            with ThreadPoolExecutor(1) as pool:
                shipped = pool.submit(self._ship, taker, giver, {bundle: ways})
                seconds = self._generators[taker].ask(GeneratorService.measure, ways[1], what)
                shipped.result()
        return SAMPLE_BYTES / seconds

    def _ship(self, taker: str, giver: str, bundles: Mapping[int, Sequence[Route]]) -> None:
        limit_s = self._meeting.timeout_s + 1.0
        for bundle, (route, _) in bundles.items():
            try:
                self._generators[giver].aside_on_all(
                    GeneratorService.ship, bundle, route, timeout_s=limit_s
                )
            except (RankError, TransferError):
                self._groups.pop((giver, taker), None)  # the next bundle uses a new group

    def _routes(self, giver: str, taker: str) -> list[Route]:
        """Return the giver's and taker's routes. Their group lasts until one of them restarts."""
        one, two = self._generators[giver], self._generators[taker]
        lives = one.generation, two.generation
        epoch, before = self._groups.get((giver, taker), (0, None))
        if lives != before:
            self._count += 1
            epoch = self._count
            self._groups[giver, taker] = epoch, lives
        pairs = [([g], {"taker": [t]}) for g, t in zip(one.facts, two.facts, strict=True)]
        wires = {choose_wires(*pair)["taker"][0] for pair in pairs}
        wire = wires.pop() if len(wires) == 1 else "gloo"
        sends, takes = self._meeting.routes(f"bundles/{giver}/{taker}", epoch, 2, wire)
        return [sends, replace(takes, beside=(0,))]
