"""Services of generators and scorers, on a thread of the run's process or in other processes.

In another process a role loads its models itself and receives trained weights from the learner. The
fingerprint of all parameters proves that both hold the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from stretto.assembly.parts import open_prompts, warmed_up
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import make_actor, with_adapters
from stretto.config import Config
from stretto.errors import EngineError
from stretto.layout import FullParameter, Layout, Owners
from stretto.models.backend import pick_device
from stretto.models.forward import unwrapped
from stretto.models.layer_shards import divided_parameters, slice_model
from stretto.models.lora import trained_names
from stretto.models.mapped import take
from stretto.pipelines.executor.stages import StageOwners, layout_of
from stretto.rollout.base import Engine
from stretto.runtime.kv_transfer import KVStore
from stretto.runtime.process_messages import SENDER, Loaded, MoveRates, Ready, RoleSetup
from stretto.saying import silent
from stretto.scoring.base_scorer import ModelScorer
from stretto.scoring.streaming import CodeScorer
from stretto.tasks.prompts import PromptSource
from stretto.types import (
    Chunk,
    Decoded,
    FloatArray,
    Hold,
    IntArray,
    KVTransfer,
    Reply,
    Response,
    Score,
    ScorerInfo,
    WeightsRef,
    Work,
    short_name,
)
from stretto.weights.broadcast import WeightReceiver
from stretto.weights.buckets import BucketPlan
from stretto.weights.resharding import Resharding
from stretto.weights.transfer import Route
from stretto.workers.services import Remote, Service, Timed

Receiver = WeightReceiver | Resharding
"""The follower's end of a weight channel between processes."""


@dataclass(eq=False)
class FollowerService(Service):
    """A service that may follow a trained model. Weights from other processes need a receiver."""

    receiver: Receiver | None = None

    @Remote(task="weight sync")
    def expect(self, ref: WeightsRef, mark: str, route: Route) -> None:
        """Prepare to receive by a plan and the first rank's route. On the side, on all ranks."""
        assert isinstance(self.receiver, WeightReceiver)
        sender_ranks = route.beside[self.rank : self.rank + 1]
        own_route = replace(route, rank=route.rank + self.rank, beside=sender_ranks)
        self.receiver.expect(ref, mark, own_route)

    @Remote(task="weight sync")
    def abort(self) -> None:
        if isinstance(self.receiver, WeightReceiver):
            self.receiver.abort()

    def forget(self) -> None:
        """Drop all rollouts, like a new process in place of a lost one."""
        self.worker.release(self.worker.rollout_ids)

    @Remote("load", task="weight sync", own_deadline=True)
    def load(self, weights: WeightsRef) -> Reply[Loaded]:
        with self._timed("load") as timed:
            self.worker.load(weights)
            loaded = Loaded(self.receiver.mark if self.receiver else "", self._probed())
            if isinstance(self.receiver, Resharding):
                loaded = replace(loaded, moved=self.receiver.moved)
            timed.attributes = {"version": weights.version}
        return Reply(loaded, timed.work)

    def _probed(self) -> FloatArray | None:
        return None


@dataclass(eq=False)
class GeneratorService(FollowerService):
    """The service of an engine."""

    worker: Engine
    kv_store: KVStore | None = None  # sends KV caches between processes
    probe: IntArray | None = None  # token ids [n, t], scored after each weight sync

    @Remote(light=True)
    def admit(self, responses: Sequence[Response]) -> Reply[None]:
        self.worker.admit(responses)
        return Reply(None)

    @Remote("gen", task="decoding", alike=True, size=lambda max_tokens, stop_after: max_tokens)
    def decode(self, max_tokens: int, stop_after: int) -> Reply[Decoded]:
        with self._timed("gen") as timed:
            decoded = self.worker.decode(max_tokens, stop_after)
            timed.attributes = {
                "rollouts": [c.rollout_id for c in decoded.chunks],
                "version": self.worker.version,
            }
        (work,) = timed.work
        return Reply(decoded, tuple(self._parts(work)))

    def _parts(self, work: Work) -> Iterator[Work]:
        """Split a call's work at the engine's marks, because their costs differ."""
        start_s = work.start_s
        for before, after in pairwise(self.worker.marks):
            end_s = work.end_s if after is self.worker.marks[-1] else max(start_s, after.at_s)
            counts = {name: count - before.counts[name] for name, count in after.counts.items()}
            yield Work("gen", start_s, end_s, {**work.attributes, **counts})
            start_s = end_s

    @Remote(light=True)
    def release(self, rollout_ids: Sequence[int]) -> Reply[None]:
        self.worker.release(rollout_ids)
        return Reply(None)

    @Remote(task="migration", light=True)
    def hold(self, rollout_ids: Sequence[int], how: Hold) -> Reply[None]:
        self.worker.hold(rollout_ids, how)
        return Reply(None)

    @Remote("migrate", task="migration")
    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Reply[Sequence[KVTransfer]]:
        with self._timed("migrate") as timed:
            transfers = self.worker.export(rollout_ids, with_cache)
            if self.kv_store:
                transfers = self.kv_store.keep(transfers)
            timed.attributes = {"rollouts": list(rollout_ids)}
        return Reply(transfers, timed.work)

    @Remote("migrate", task="migration")
    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> Reply[None]:
        with self._timed("migrate") as timed:
            if self.kv_store:
                transfers = self.kv_store.fetch(transfers)
            self.worker.accept(responses, transfers)
            timed.attributes = {"rollouts": [r.id for r in responses]}
        return Reply(None, timed.work)

    @Remote(task="migration")
    def ship(self, bundle: int, route: Route) -> None:
        """Send a bundle of KV caches. Called on the side."""
        assert self.kv_store
        self.kv_store.ship(bundle, route)

    @Remote(task="measuring")
    def sample(self) -> tuple[int, BucketPlan]:
        assert self.kv_store
        return self.kv_store.sample()

    @Remote(task="measuring")
    def measure(self, route: Route, what: BucketPlan) -> float:
        assert self.kv_store
        return self.kv_store.measure(route, what)

    def rates(self) -> MoveRates:
        """Measure costs for the rules of migration and of parked episodes."""
        if self.probe is not None:  # kv_bytes_per_token is known after a forward pass
            self.worker.logprobs(self.probe)
        moves = self.worker.capabilities.moves_cache
        rate = self.worker.prefill_tokens_per_s()
        size = self.worker.kv_bytes_per_token if moves else 0
        return MoveRates(rate, size, self.worker.host_bytes_per_s())

    def _probed(self) -> FloatArray | None:
        return None if self.probe is None else self.worker.logprobs(self.probe)


@dataclass(eq=False)
class ScorerService(FollowerService):
    """The service of a scorer. Calls without a value of their own return its ScorerInfo."""

    worker: ModelScorer | CodeScorer
    notes: Sequence[str] = ()  # lines for the log
    marks: tuple[str, str] = ("", "")  # fingerprints of the reference
    give_back: Callable[[], None] = lambda: None  # called after responses were read

    @property
    def streams(self) -> bool:
        return self.worker.info.streams

    @Remote(reads=True, queues=True)
    def admit(self, responses: Sequence[Response]) -> Reply[ScorerInfo]:
        self.worker.admit(responses)
        return Reply(self._ended())

    @Remote("prefill", task="scoring", reads=True, queues=True)
    def extend(self, chunks: Sequence[Chunk]) -> Reply[ScorerInfo]:
        with self._read("prefill", [chunk.rollout_id for chunk in chunks]) as timed:
            self.worker.extend(chunks)
        return Reply(self._ended(), timed.work)

    @Remote("score", task="scoring", reads=True, alike=True)
    def finish(self, rollout_ids: Sequence[int]) -> Reply[Sequence[Score]]:
        with self._read("score", rollout_ids) as timed:
            scores = self.worker.finish(rollout_ids)
        self._ended()
        return Reply(scores, timed.work)

    @Remote(light=True)
    def release(self, rollout_ids: Sequence[int]) -> Reply[ScorerInfo]:
        self.worker.release(rollout_ids)
        return Reply(self._ended())

    def info(self) -> ScorerInfo:
        return self.worker.info

    @Remote(light=True)
    def ready(self) -> tuple[ScorerInfo, Sequence[str]]:
        return self.info(), self.notes

    @Remote(light=True)
    def require(self, ready: Ready) -> None:
        """Raise EngineError if the reference differs from the learner's initial actor."""
        theirs = (ready.frozen, ready.refs["actor"].fingerprint if self.marks[1] else "")
        if self.marks != theirs:
            raise EngineError(
                "the reference is not the actor that training starts from: its process has loaded "
                "other weights; see whether all machines hold the same model files",
                "reference-differs",
            )

    @contextmanager
    def _read(self, span: str, rollout_ids: Sequence[int]) -> Iterator[Timed]:
        """Measure how the scorer reads responses, with the tokens that it counts, if it does."""
        before = getattr(self.worker, "read_tokens", None)
        with self._timed(f"{span}/{short_name(self.worker.info.name)}") as timed:
            yield timed
            timed.attributes = {"rollouts": list(rollout_ids)}
            if before is not None:
                timed.attributes["tokens"] = getattr(self.worker, "read_tokens", 0) - before

    def _ended(self) -> ScorerInfo:
        if not self.worker.info.streams:  # a streaming scorer needs the memory again
            self.give_back()
        return self.worker.info


# -- in other processes ----------------------------------------------------------------------------


def generator(setup: RoleSetup, name: str, probe: IntArray) -> GeneratorService:
    """Make a generator's service in its process."""
    setup.prepare()
    config, overrides = setup.config, setup.overrides
    own_weights = config.rollout.capabilities.own_weights
    model, prompts = loaded_actor(setup.on_host() if own_weights else setup)
    receiver = follow_whole(model, setup) if own_weights else follow(model, setup)
    engine = RoleFactory(config, silent).make_engine(
        model,
        prompts.tokenizer,
        config.most_in_flight,
        overrides.end_tokens,
        receiver,
        overridden=overrides.actor is not None,
        threads=setup.threads,
    )
    default_device = pick_device(config.model.device)
    device = default_device if own_weights else next(model.parameters()).device
    return GeneratorService(engine, receiver, KVStore(name, device, setup.rank), probe)


def follow_whole(model: nn.Module, setup: RoleSetup) -> WeightReceiver:
    """Make a receiver of the unsharded trained weights of a model like this one."""
    theirs = _owners(model, setup.config)
    wholes = _trained_wholes(model, theirs)
    return WeightReceiver(
        {n: torch.empty(w.shape, dtype=w.dtype, device="meta") for n, w in wholes.items()},
        pick_device(setup.config.model.device),
        setup.config.cluster.bucket_mb << 20,
        [theirs.own(wholes, rank) for rank in range(theirs.ranks)],
    )


def follow(model: nn.Module, setup: RoleSetup) -> Receiver:
    """Shard a model in place if there are several ranks, and make the receiver of its weights."""
    theirs, slices = _owners(model, setup.config), Layout.independent(len(setup.ranks))
    wholes = _trained_wholes(model, theirs, slices)
    cut(model, setup)
    device, bucket_bytes = next(model.parameters()).device, setup.config.cluster.bucket_mb << 20
    if SENDER in setup.shared:
        copies = replace(slices, dp=dist.get_world_size() // slices.ranks)
        return Resharding(setup.shared[SENDER], wholes, theirs, copies, bucket_bytes, device)
    return WeightReceiver(
        {n: p for n, p in model.named_parameters() if n in wholes},
        device,
        bucket_bytes,
        [theirs.own(wholes, rank) for rank in range(theirs.ranks)],
        {name: slices.bounds(parameter, setup.rank) for name, parameter in wholes.items()},
    )


def _owners(model: nn.Module, config: Config) -> Owners:
    """Return who trains and sends which parts of a model: shards, or pipeline stages."""
    if not config.pipeline.ranks:
        return config.learner_layout
    is_actor = unwrapped(model).get_output_embeddings() is not None
    return StageOwners.of(model, "actor" if is_actor else "critic", layout_of(config.pipeline))


def _trained_wholes(model: nn.Module, *owners: Owners) -> dict[str, FullParameter]:
    trained, wholes = trained_names(model), divided_parameters(model, *owners)
    return {name: parameter for name, parameter in wholes.items() if name in trained}


def cut(model: nn.Module, setup: RoleSetup) -> None:
    """Shard a model in place, on the setup's device, if there are several ranks."""
    if len(setup.ranks) > 1:
        slice_model(model, setup.group())
        take(model, pick_device(setup.config.model.device))


def loaded_actor(setup: RoleSetup) -> tuple[nn.Module, PromptSource]:
    """Load the initial actor, with its adapters if it has any."""
    setup = setup.for_loading()
    model, prompts = starting_actor(setup)
    m, seed = setup.config.model, setup.config.seed
    return with_adapters(model, m, seed, "CAUSAL_LM", None), prompts


def starting_actor(setup: RoleSetup) -> tuple[nn.Module, PromptSource]:
    """Load the initial actor without adapters. The critic may be made from it."""
    config, overrides = setup.config, setup.overrides
    prompts = open_prompts(config, overrides, silent)
    model = make_actor(config.model, overrides, silent, merged=False)
    warmed_up(model, config, prompts, overrides, silent)
    return model, prompts
