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

from stretto import files
from stretto.assembly.parts import critic_rewards, open_prompts, trained_models
from stretto.assembly.roles import make_learner
from stretto.config.cluster import LEARNER
from stretto.errors import StateError
from stretto.models.backend import pick_device
from stretto.models.offload import OffloadedTensors
from stretto.protocols import Learner
from stretto.runtime.messages import OUTBOX, Offer, Ready, Setting, frozen_mark, loading
from stretto.runtime.placement import learner_layout
from stretto.runtime.state import claim_of, copied, fit
from stretto.tasks.prompts import PromptSource
from stretto.training import shard_files
from stretto.training.learner import PolicyLearner
from stretto.training.sharded import Grid
from stretto.training.trained import TrainedModel
from stretto.types import FloatArray, IntArray, Prompt, Reply, Response, WeightsRef
from stretto.weights.broadcast import WeightSender
from stretto.weights.channel import SharedChannel
from stretto.weights.transfer import Route
from stretto.workers.services import Service

T = TypeVar("T")


WARMUP = timedelta(days=7)
"""What a warm-up may take, at most."""


class LearnerService(Service):
    """The learner, and the weights and the state that travel from it.

    Args:
        channel: keeps published weights.
        prompts: whose tokenizer is saved with the model.
        ready: the message to the other processes.
        probe: token ids [n, t] that are read with each version's weights; ``None`` for no proof.
        rank, ranks: of this process, of those that hold shards of the models.
    """

    role = Learner
    reads = frozenset({"stage"})

    def __init__(
        self,
        learner: PolicyLearner,
        channel: SharedChannel,
        prompts: PromptSource,
        ready: Ready,
        probe: IntArray | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(learner)
        self._learner, self._channel, self._prompts, self._ready = learner, channel, prompts, ready
        self._probe = [
            Response(i, i, Prompt(i, (int(row[0]),), ""), row[1:])
            for i, row in enumerate([] if probe is None else probe)
        ]
        self._probed: dict[int, FloatArray] = {}
        self._rank, self._ranks = rank, ranks
        self._staged: dict[str, Any] | None = None

    @property
    def light(self) -> frozenset[str]:
        return super().light | {"ready", "kept"}

    def ready(self) -> Ready:
        """Return what the others must know."""
        return self._ready

    def publish(self) -> Reply[Mapping[str, WeightsRef]]:
        """Publish, and read the probe with the new weights."""

        def publish() -> Mapping[str, WeightsRef]:
            refs = self._learner.publish()
            self._read_probe(refs["actor"].version)
            return refs

        return self._timed("publish", publish, lambda _: {})

    def _read_probe(self, version: int) -> None:
        """Read the probe with the weights as they are, which are of that version."""
        if not self._probe:
            return
        logprobs = self._learner.logprobs(self._probe)
        newest = [*sorted(self._probed), version][-4:]
        self._probed = {v: self._probed[v] for v in newest if v in self._probed}
        self._probed[version] = logprobs

    def offer(self, ref: WeightsRef) -> Offer:
        """Say by which plan a version travels; on the side."""
        assert isinstance(self._channel, WeightSender)
        mark, size = self._channel.plan(ref)
        return Offer(mark, size, self._probed.get(ref.version) if ref.model == "actor" else None)

    def send(self, ref: WeightsRef, routes: Sequence[Route]) -> str:
        """Send this rank's parts of a version; on the side, while training may go on.

        Args:
            routes: of each rank.
        """
        assert isinstance(self._channel, WeightSender)
        return self._channel.send(ref, routes[self._rank])

    def stage(self, copy: bool) -> Reply[tuple[bool, int]]:
        """Stage this rank's pieces of the learner's state, copied if all ranks have room.

        Returns:
            Whether they are ``live``, see :class:`~stretto.runtime.state.Staged`; and the bytes of
            all ranks' pieces.
        """
        state = shard_files.packed(self._learner.state_dict(), self._rank, self._ranks)
        claims = self._of_all(claim_of(state))
        copy = copy and fit(claims)
        self._staged = copied(state) if copy else state
        return Reply((not copy, sum(claim.size for claim in claims)))

    def write(self, folder: Path) -> None:
        """Write what was staged, each rank a file of its own; on the side, on all ranks.

        Raises:
            StorageError: it could not be written.
        """
        state, self._staged = self._staged, None
        assert state is not None
        file = folder / shard_files.file_name(self._rank, self._ranks)
        with files.explained(file):
            shard_files.write(file, state)

    def kept(self, refs: Sequence[WeightsRef]) -> Reply[list[Mapping[str, torch.Tensor]]]:
        """Return the tensors of versions that are kept, which the first rank gathers.

        In the learner's own process they are good as long as their mapping is held.
        """
        found = ((ref.model, self._channel.kept(ref)) for ref in refs)
        return Reply([self._learner.gathered(*tensors) for tensors in found])

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
        self._learner.load_state_dict(self._read(path))
        refs = self.offered()
        for ref, tensors in kept:  # the newest version, too, if weights have changed since
            self._channel.put(ref, self._learner.divided(ref.model, tensors))
        return Reply(refs)

    def offered(self) -> Mapping[str, WeightsRef]:
        """Offer the weights as they are, as the version that they have."""
        refs = self._learner.offer()
        self._read_probe(refs["actor"].version)
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

    def _about(self, name: str, args: tuple[Any, ...], value: Any) -> Mapping[str, Any]:
        (batch,) = args
        return {"rollouts": batch.ids.tolist(), "tokens": batch.total_tokens}

    def _read(self, path: Path) -> dict[str, Any]:
        """Read a state; raise on all ranks what any raised, as the others would wait."""
        state, error = dict[str, Any](), None
        try:
            state = shard_files.read(path)
        except StateError as raised:
            error = raised
        if found := next(filter(None, self._of_all(error)), None):
            raise found
        return state

    def _of_all(self, value: T) -> list[T]:
        found: list[Any] = [value] * self._ranks
        if self._ranks > 1:
            dist.all_gather_object(found, value)
        return found


def learner(setting: Setting, probe: IntArray) -> LearnerService:
    """Make the learner's service, in its process, or in each of its ranks."""
    setting.prepare()
    device, ranks = pick_device(setting.config.model.device), dist.get_world_size()
    setting = loading(setting)
    config, given = setting.config, setting.given
    stack, said = ExitStack(), list[str]()
    prompts = open_prompts(config, given, said.append)
    rewards = critic_rewards(config, prompts, given, said.append)
    first = dist.get_rank() == 0
    # The first rank warms up, the others read its outcome: they wait longer than for collectives.
    waiting = dist.new_group(backend="gloo", timeout=WARMUP) if config.warmup_examples else None
    if waiting and not first:
        dist.barrier(waiting)
    models = trained_models(config, prompts, rewards, stack, said.append, given)
    if waiting and first:
        dist.barrier(waiting)
    trained = ["actor", "critic"] if models.critic else ["actor"]
    frozen = frozen_mark(models.actor)
    bucket_bytes = config.cluster.bucket_mb << 20
    keep = 1 if setting.lends else config.schedule.knobs.lag + 2
    outbox = setting.shared[OUTBOX] = WeightSender(device, bucket_bytes, keep)
    made, _ = make_learner(
        config,
        models.actor,
        models.critic,
        stack,
        snapshots=trained,
        channel=outbox,
        threads=setting.threads or torch.get_num_threads(),
        lends=setting.lends,
        grid=Grid(device.type, learner_layout(config.cluster)) if ranks > 1 else None,
    )
    ready = Ready({}, frozen, said)
    service = LearnerService(made, outbox, prompts, ready, probe, dist.get_rank(), ranks)
    service.offloaded = _offloaded(made, setting)
    service._ready = replace(ready, refs=service.offered())
    return service


def _offloaded(learner: PolicyLearner, setting: Setting) -> OffloadedTensors | None:
    """Offload what only updates need; the first update of each step waits for it."""
    models = [model for model in learner.trained.values() if isinstance(model, TrainedModel)]
    offloaded = setting.offloaded(
        LEARNER, lambda: chain.from_iterable(m.of_updates() for m in models)
    )
    if offloaded:
        for model in models:
            model.before_update = offloaded.wait
    return offloaded
