"""The learner's service, which sends weights to all other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from stretto import files
from stretto.assembly.parts import open_prompts, trained_models
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import NO_OVERRIDES
from stretto.config.cluster_config import LEARNER
from stretto.errors import StateError
from stretto.files import FileSum
from stretto.models.backend import backend_of, pick_device
from stretto.models.load import save_model
from stretto.models.offload import OffloadedTensors
from stretto.models.shards import of_all_ranks
from stretto.runtime.process_messages import SENDER, TRAINED, Offer, Ready, RoleSetup, frozen_mark
from stretto.runtime.state import claim_of, copied, fit, size_of
from stretto.tasks.prompts import PromptSource
from stretto.training import shard_files
from stretto.training.divided import DividedModel
from stretto.training.learner import PolicyLearner
from stretto.types import (
    FloatArray,
    IntArray,
    Prompt,
    Reply,
    Response,
    TrainBatch,
    TrainStepOutput,
    WeightsRef,
)
from stretto.weights.broadcast import WeightSender
from stretto.weights.channel import SharedChannel
from stretto.weights.transfer import Route
from stretto.workers.services import Remote, Service

T = TypeVar("T")

WARMUP = timedelta(days=7)
"""The longest that other ranks wait for a warm-up."""


def _tokens(batch: TrainBatch) -> int:
    return max(batch.total_tokens, 1)


@dataclass(eq=False)
class LearnerService(Service):
    """The learner on one of its ranks."""

    worker: PolicyLearner
    channel: SharedChannel
    prompts: PromptSource
    message: Ready  # to the other processes
    probe: Sequence[Response] = ()  # scored for each version
    ranks: int = 1
    give_back: Callable[[], None] = lambda: None  # called when a step's work is done
    _probed: dict[int, FloatArray] = field(default_factory=dict, init=False)
    _staged: dict[str, Any] | None = field(default=None, init=False)
    _models: dict[str, nn.Module | None] = field(default_factory=dict, init=False)
    """Staged copies, by use."""

    @Remote(light=True)
    def ready(self) -> Ready:
        return self.message

    @Remote("update", task="update", waits=True, size=_tokens)
    def train(self, batch: TrainBatch) -> Reply[TrainStepOutput]:
        with self._timed("update") as timed:
            output = self.worker.train(batch)
            timed.attributes = {"rollouts": batch.ids.tolist(), "tokens": batch.total_tokens}
        return Reply(output, timed.work)

    @Remote("accumulate", task="update", reads=True, waits=True, size=_tokens)
    def accumulate(self, batch: TrainBatch) -> Reply[None]:
        with self._timed("accumulate") as timed:
            self.worker.accumulate(batch)
            timed.attributes = {"rollouts": batch.ids.tolist(), "tokens": batch.total_tokens}
        return Reply(None, timed.work)

    @Remote("publish", task="weight sync", light=True)
    def publish(self) -> Reply[Mapping[str, WeightsRef]]:
        with self._timed("publish") as timed:
            refs = self.worker.publish()
            self._read_probe(refs["actor"].version)
            self.give_back()
            timed.attributes = {"version": refs["actor"].version}
        return Reply(refs, timed.work)

    def _read_probe(self, version: int) -> None:
        if not self.probe:
            return
        logprobs = self.worker.logprobs(self.probe)
        newest = [*sorted(self._probed), version][-4:]
        self._probed = {v: self._probed[v] for v in newest if v in self._probed}
        self._probed[version] = logprobs

    @Remote(task="weight sync")
    def offer(self, ref: WeightsRef) -> Offer:
        """Return the transfer plan of a version. Called on the side."""
        assert isinstance(self.channel, WeightSender)
        plan = self.channel.plan(ref)
        probe = self._probed.get(ref.version) if ref.model == "actor" else None
        return Offer(plan.mark, plan.size, probe)

    @Remote(task="weight sync")
    def send(self, ref: WeightsRef, routes: Sequence[Route]) -> str:
        """Send this rank's parts of a version by its route. Called on the side, during training."""
        assert isinstance(self.channel, WeightSender)
        return self.channel.send(ref, routes[self.rank])

    @Remote(task="checkpoint", reads=True, collective=True)
    def stage(self, copy: bool, refs: Sequence[WeightsRef]) -> Reply[tuple[bool, int]]:
        """Stage this rank's shards and those of ``refs``, copied if all ranks have room. Return
        whether they are live (not copied), and the bytes of all ranks.
        """
        state = self._packed(refs)
        claims = self._of_all(claim_of(state))
        copy = copy and fit(claims)
        self._staged = copied(state) if copy else state
        return Reply((not copy, sum(claim.size for claim in claims)))

    @Remote(task="checkpoint")
    def stage_live(self, refs: Sequence[WeightsRef]) -> int:
        """Stage this rank's shards without a copy and return their bytes. On the side, after
        :meth:`end_updates`. Uses no collectives, because some ranks may be in a call.
        """
        self._staged = self._packed(refs)
        return size_of(self._staged)

    def _packed(self, refs: Sequence[WeightsRef]) -> dict[str, Any]:
        trained = self.worker.trained
        published = {
            (ref.model, ref.version): trained[ref.model].pieces(self.channel.kept(ref))
            for ref in refs
        }
        return shard_files.packed(self.worker.state_dict(), self.rank, self.ranks, published)

    @Remote(task="checkpoint")
    def write(self, folder: Path) -> tuple[str, FileSum]:
        """Write this rank's staged file, on the side. Return its name and checksum."""
        state, self._staged = self._staged, None
        assert state is not None
        file = folder / shard_files.file_name(self.rank, self.ranks)
        with files.explained(file):
            return file.name, shard_files.write(file, state)

    @Remote(task="return to a checkpoint", collective=True, own_deadline=True)
    def load(self, path: Path, kept: Sequence[WeightsRef]) -> Reply[Mapping[str, WeightsRef]]:
        """Load a state from files, and the versions in ``kept``. Return tickets of the weights."""
        state = self._read(path)
        self.worker.load_state_dict(state)
        refs = self.offered()
        for ref in kept:  # may include the newest version, if weights have changed since
            pieces = state[shard_files.PUBLISHED][ref.model, ref.version]
            self.channel.put(ref, self.worker.trained[ref.model].from_pieces(pieces))
        return Reply(refs)

    @Remote(task="weight sync")
    def offered(self) -> Mapping[str, WeightsRef]:
        refs = self.worker.offer()
        self._read_probe(refs["actor"].version)
        return refs

    @Remote(task="copying of the weights")
    def trained(self) -> Reply[dict[str, dict[str, torch.Tensor]]]:
        return Reply(self.worker.weights())

    @Remote(task="end of updates")
    def end_updates(self) -> bool:
        """Refuse further updates and return whether the weights are consistent. On the side."""
        return self.worker.trained["actor"].end_updates()

    @Remote(task="saving of the model")
    def save(self, folder: Path) -> None:
        self.worker.trained["actor"].save(folder, self.prompts.tokenizer)

    @Remote(task="saving of the model", reads=True, collective=True)
    def stage_model(self, use: str, ref: WeightsRef | None) -> Reply[None]:
        weights = self.channel.kept(ref) if ref else None
        self._models[use] = self.worker.trained["actor"].copied(weights)
        return Reply(None)

    @Remote(task="saving of the model")
    def save_staged(self, use: str, folder: Path) -> None:
        model = self._models.pop(use, None)
        if model is not None:
            save_model(model, self.prompts.tokenizer, folder)

    def _read(self, path: Path) -> dict[str, Any]:
        state, error = dict[str, Any](), None
        try:
            state = shard_files.read(path)
        except StateError as raised:
            error = raised
        # If one rank fails all must raise, otherwise the rest would wait for it.
        if failure := next(filter(None, self._of_all(error)), None):
            raise failure
        return state

    def _of_all(self, value: T) -> list[T]:
        return of_all_ranks(value) if self.ranks > 1 else [value]


def learner(setup: RoleSetup, probe: IntArray) -> LearnerService:
    """Make the learner's service on one of its ranks."""
    setup.prepare()
    _grow_segments(setup)
    device, ranks = pick_device(setup.config.model.device), dist.get_world_size()
    shards = ranks > 1 and not setup.config.pipeline.ranks
    grid = setup.grid(setup.config.learner_layout) if shards else None
    setup = setup.for_loading()
    config, overrides = setup.config, setup.overrides
    stack, notes = ExitStack(), list[str]()
    prompts = open_prompts(config, overrides, notes.append)
    factory = RoleFactory(config, notes.append)
    rewards = factory.critic_rewards(prompts.tokenizer, overrides)
    first = dist.get_rank() == 0
    # The first rank warms up and the rest read its outcome. That takes longer than collectives may.
    waiting = dist.new_group(backend="gloo", timeout=WARMUP) if config.warmup_examples else None
    if waiting and not first:
        dist.barrier(waiting)
    models = trained_models(config, prompts, rewards, stack, notes.append, overrides)
    if waiting and first:
        dist.barrier(waiting)
    if setup.alone and not config.pipeline.ranks:  # other roles need cached keys and values
        for module in filter(None, (models.actor, models.critic)):
            backend_of(device).pack_sequences(module)
    frozen = frozen_mark(models.actor)
    keep = 1 if setup.shares_weights else config.schedule.knobs.lag + 2
    sender = setup.shared[SENDER] = WeightSender(device, config.cluster.bucket_mb << 20, keep)
    learner_role = factory.make_learner(
        models.actor,
        models.critic,
        snapshots=["actor", "critic"] if models.critic else ["actor"],
        channel=sender,
        lends=setup.shares_weights,
        grid=grid,
        stages_on=device if config.pipeline.ranks else None,
    )
    setup.shared[TRAINED] = learner_role.trained
    for name, model in learner_role.trained.items():
        if isinstance(model, DividedModel):
            sender.divide(name, model.trained_wholes, model.division.owners)
    ready = Ready({}, frozen, notes, learner_role.trained["actor"].dtype)
    responses = [
        Response(i, i, Prompt(i, (int(row[0]),), ""), row[1:]) for i, row in enumerate(probe)
    ]
    setup = replace(setup, overrides=NO_OVERRIDES)  # frees a model that the caller brought
    service = LearnerService(
        learner_role, sender, prompts, ready, responses, ranks, setup.give_back
    )
    service.offloaded = _offloaded(learner_role, setup)
    service.message = replace(ready, refs=service.offered())
    del models, rewards, overrides  # frees models that are no longer needed
    setup.give_back()
    return service


def _grow_segments(setup: RoleSetup) -> None:
    """Use expandable segments, because batches of changing sizes fragment fixed ones.

    Skipped if other processes share the GPUs: they read the buckets of weights in place (CUDA IPC),
    which for expandable segments needs the right to trace this process. A user's setting wins.
    """
    has_user_setting = any(
        name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    )
    on_gpu = pick_device(setup.config.model.device).type == "cuda"
    if on_gpu and not setup.shares_gpus and not has_user_setting:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _offloaded(learner: PolicyLearner, setup: RoleSetup) -> OffloadedTensors | None:
    """Offload the tensors of updates. The first update of each step waits for their return."""
    models = [*learner.trained.values()]
    offloaded = setup.offloaded(
        LEARNER, lambda: chain.from_iterable(model.of_updates() for model in models)
    )
    if offloaded:
        for model in models:
            model.before_update = offloaded.wait
    return offloaded
