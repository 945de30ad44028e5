"""The learner's service in its process, from which all weights travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.assembly.learner import make_learner
from stretto.assembly.parts import critic_rewards, open_task, trained_models
from stretto.config.cluster import LEARNER
from stretto.errors import StateError
from stretto.models.load import pick_device
from stretto.models.shelf import Shelf
from stretto.runtime.groups.loading import loading
from stretto.runtime.groups.messages import OUTBOX, Offer, Ready, Setting, frozen_mark
from stretto.runtime.groups.placement import learner_layout
from stretto.runtime.state import BackgroundWriter, claim_of, fit
from stretto.tasks.prompts import PromptSource
from stretto.training import shard_files
from stretto.training.grid import Grid
from stretto.training.learner import PolicyLearner
from stretto.training.trained import TrainedModel
from stretto.types import FloatArray, IntArray, Prompt, Reply, Response, WeightsRef
from stretto.weights.broadcast import Outbox
from stretto.weights.transfer import Route
from stretto.workers.services import LearnerService

T = TypeVar("T")


WARMUP = timedelta(days=7)
"""What a warm-up may take, at most."""


class GroupLearner(LearnerService):
    """The learner, and the weights that travel from it."""

    reads = frozenset({"stage"})

    def __init__(
        self,
        learner: PolicyLearner,
        outbox: Outbox,
        prompts: PromptSource,
        ready: Ready,
        probe: IntArray,
    ) -> None:
        super().__init__(learner)
        self._learner, self._outbox, self._prompts, self._ready = learner, outbox, prompts, ready
        self._probe = [
            Response(i, i, Prompt(i, (int(row[0]),), ""), row[1:]) for i, row in enumerate(probe)
        ]
        self._probed: dict[int, FloatArray] = {}
        self._writer = BackgroundWriter()

    @property
    def light(self) -> frozenset[str]:
        return super().light | {"ready", "write", "written", "kept"}

    def ready(self) -> Ready:
        """Return what the others must know."""
        return self._ready

    def publish(self) -> Reply[Mapping[str, WeightsRef]]:
        """Publish, and read the probe with the new weights."""

        def publish() -> Mapping[str, WeightsRef]:
            refs = self._learner.publish()
            self.probe(refs["actor"].version)
            return refs

        return self._timed("publish", publish, lambda _: {})

    def probe(self, version: int) -> None:
        """Read the probe with the weights as they are, which are of that version."""
        logprobs = self._learner.logprobs(self._probe)
        newest = [*sorted(self._probed), version][-4:]
        self._probed = {v: self._probed[v] for v in newest if v in self._probed}
        self._probed[version] = logprobs

    def offer(self, ref: WeightsRef) -> Offer:
        """Say by which plan a version travels; on the side."""
        mark, size = self._outbox.plan(ref)
        return Offer(mark, size, self._probed.get(ref.version) if ref.model == "actor" else None)

    def send(self, ref: WeightsRef, routes: Sequence[Route]) -> str:
        """Send this rank's parts of a version; on the side, while training may go on.

        Args:
            routes: of each rank.
        """
        return self._outbox.send(ref, routes[dist.get_rank()])

    def stage(self, copy: bool) -> Reply[tuple[bool, int]]:
        """Stage this rank's pieces of the learner's state, copied if all ranks have room.

        Returns:
            Whether they are ``live``, see :class:`~stretto.runtime.state.Staged`; and the bytes of
            all ranks' pieces.
        """
        state = shard_files.packed(
            self._learner.state_dict(), dist.get_rank(), dist.get_world_size()
        )
        claims = _of_all(claim_of(state))
        copy = copy and fit(claims)
        self._writer.stage(state, copy=copy)
        return Reply((not copy, sum(claim.size for claim in claims)))

    def write(self, folder: Path) -> Reply[None]:
        """Begin to write what was staged, each rank a file of its own."""
        name = shard_files.file_name(dist.get_rank(), dist.get_world_size())
        self._writer.begin(folder / name)
        return Reply(None)

    def written(self) -> Reply[bool]:
        """Return whether all ranks' files are written.

        Raises:
            StorageError: this rank's could not be, and no rank writes any more.
        """
        ended = all(_of_all(self._writer.ended))
        if ended:
            self._writer.finish()
        return Reply(ended)

    def kept(self, refs: Sequence[WeightsRef]) -> Reply[list[dict[str, torch.Tensor]]]:
        """Return the tensors of versions that are kept, which the first rank gathers."""
        found = ((ref.model, self._outbox.get(ref)) for ref in refs)
        return Reply([dict(self._learner.gathered(*tensors)) for tensors in found])

    def load(
        self,
        path: Path,
        kept: Sequence[tuple[WeightsRef, Mapping[str, torch.Tensor]]],
    ) -> Reply[Mapping[str, WeightsRef]]:
        """Go on from a state; return tickets for the weights as they are then.

        Args:
            path: of the learner's state; see :func:`~stretto.training.shard_files.read`.
            kept: versions of other weights that followers hold, or wait for.

        Raises:
            StateError: a rank cannot read it.
        """
        state = _read_by_all(path)
        self._learner.load_state_dict(state)
        for ref, tensors in kept:
            self._outbox.put(ref, self._learner.divided(ref.model, tensors))
        return Reply(self.offered())

    def offered(self) -> Mapping[str, WeightsRef]:
        """Offer the weights as they are, as the version that they have."""
        refs = self._learner.offer()
        self.probe(refs["actor"].version)
        return refs

    def trained(self) -> Reply[dict[str, dict[str, torch.Tensor]]]:
        """Return the trained weights of all models, by model and name."""
        return Reply(self._learner.weights())

    def end_updates(self) -> bool:
        """Let no update begin any more; return whether the weights are whole.

        On the side, on all ranks.
        """
        return self._learner.end_updates()

    def save(self, folder: Path) -> None:
        """Write the trained model; on the side, on all ranks."""
        self._learner.save(folder, self._prompts.tokenizer)


def learner(setting: Setting, probe: IntArray) -> GroupLearner:
    """Make the learner's service, in its process, or in each of its ranks."""
    setting.prepare()
    device, ranks = pick_device(setting.config.model.device), dist.get_world_size()
    setting = loading(setting)
    config, given = setting.config, setting.given
    stack, said = ExitStack(), list[str]()
    tokenizer, task, prompts = open_task(config, given, said.append)
    rewards = critic_rewards(config, tokenizer, said.append, in_files=given.in_files)
    first = dist.get_rank() == 0
    # The first rank warms up, the others read its outcome: they wait longer than for collectives.
    waiting = dist.new_group(backend="gloo", timeout=WARMUP) if config.warmup_examples else None
    if waiting and not first:
        dist.barrier(waiting)
    models = trained_models(config, task, prompts, rewards, stack, said.append, given)
    if waiting and first:
        dist.barrier(waiting)
    trained = ["actor", "critic"] if models.critic else ["actor"]
    frozen = frozen_mark(models.actor)
    bucket_bytes = config.cluster.bucket_mb << 20
    keep = 1 if setting.lends else config.schedule.knobs.lag + 2
    outbox = setting.shared[OUTBOX] = Outbox(device, bucket_bytes, keep)
    made, _ = make_learner(
        config,
        models.actor,
        models.critic,
        stack,
        snapshots=trained,
        channel=outbox,
        threads=setting.threads or torch.get_num_threads(),
        lends=setting.lends,
        grid=Grid(device.type, learner_layout(config)) if ranks > 1 else None,
    )
    ready = Ready({}, frozen, said)
    service = GroupLearner(made, outbox, prompts, ready, probe)
    service.shelf = _shelf(made, setting)
    service._ready = replace(ready, refs=service.offered())
    return service


def _of_all(value: T) -> list[T]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _shelf(learner: PolicyLearner, setting: Setting) -> Shelf | None:
    """Return the shelf of what only updates need, for which each first update of a step waits."""
    models = [model for model in learner.trained.values() if isinstance(model, TrainedModel)]
    shelf = setting.shelf(LEARNER, lambda: chain.from_iterable(m.of_updates() for m in models))
    if shelf:
        for model in models:
            model.before_update = shelf.ready
    return shelf


def _read_by_all(path: Path) -> dict[str, Any]:
    """Read a learner's state; raise on all ranks what any raised, as the others would wait."""
    state, error = dict[str, Any](), None
    try:
        state = shard_files.read(path)
    except StateError as raised:
        error = raised
    if found := next(filter(None, _of_all(error)), None):
        raise found
    return state
