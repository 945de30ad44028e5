"""The services of roles in their processes, made from the settings.

Each process loads its models itself, and the trained weights come from the learner. A model's
fingerprint, of all its parameters, proves that both hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stretto.assembly.checks import check_rewards
from stretto.assembly.controls import most_in_flight
from stretto.assembly.engines import make_engine, prefill_tokens_per_s, scorer_slots
from stretto.assembly.learner import make_learner
from stretto.assembly.models import (
    Given,
    load_reward_model,
    made_ready,
    make_actor,
    make_critic,
    prepare_torch,
    with_adapters,
)
from stretto.assembly.parts import critic_rewards, open_task, trained_models
from stretto.assembly.scorers import MODEL, model_scorers, reward_scorer
from stretto.assembly.warmup import warmed_up
from stretto.config import Config
from stretto.errors import EngineError
from stretto.models.weights import fingerprint
from stretto.rollout.engine import TorchEngine
from stretto.runtime.groups.migration import Parcels
from stretto.runtime.state import BackgroundWriter
from stretto.scoring.base import ModelScorer
from stretto.tasks.prompts import PromptSource
from stretto.training.learner import PolicyLearner
from stretto.types import (
    FloatArray,
    IntArray,
    KVTransfer,
    Prompt,
    Reply,
    Response,
    ScorerInfo,
    WeightsRef,
)
from stretto.weights.broadcast import Inbox, Outbox
from stretto.weights.buckets import Plan
from stretto.weights.transfer import Route
from stretto.workers.services import GeneratorService, LearnerService, ScorerService

PROBE_ROWS, PROBE_TOKENS = 4, 17
"""Sequences of the probe, and tokens of each; all but the first are looked at: 64 tokens."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The facts from which every process of a run starts.

    Attributes:
        config: of the run; ``model.device`` is the process's own.
        given: what the caller brings.
        threads: of torch in this process.
    """

    config: Config
    given: Given
    threads: int

    def prepare(self) -> None:
        """Set memory, threads and torch's seed."""
        prepare_torch(self.config.model_copy(update={"threads": self.threads}))


@dataclass(frozen=True, slots=True)
class Ready:
    """The message of the learner's process to the others, once its models are loaded.

    Attributes:
        refs: tickets for the trained weights, as training starts.
        frozen: fingerprint of the actor's parameters that are not trained.
        said: lines for people.
    """

    refs: Mapping[str, WeightsRef]
    frozen: str
    said: Sequence[str]


@dataclass(frozen=True, slots=True)
class Offer:
    """The message of the learner before its weights travel.

    Attributes:
        mark: of the plan by which they do.
        size: bytes.
        probe: log-probs of the probe under them, [n, t]; ``None`` where it is not the actor.
    """

    mark: str
    size: int
    probe: FloatArray | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The message of a follower that has loaded weights.

    Attributes:
        mark: of what was received.
        probe: log-probs of the probe under them, [n, t]; ``None`` where it is no engine.
    """

    mark: str
    probe: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """The message of a generator about what moving rollouts costs.

    Attributes:
        prefill_tokens_per_s: how fast it prefills.
        kv_bytes: of keys and values of one token.
    """

    prefill_tokens_per_s: float
    kv_bytes: int


def probe_of(prompts: Sequence[Prompt]) -> IntArray:
    """Cut a probe [:data:`PROBE_ROWS`, :data:`PROBE_TOKENS`] out of the run's first prompts."""
    tokens = [token for prompt in prompts for token in prompt.tokens]
    return np.resize(np.array(tokens, np.int32), (PROBE_ROWS, PROBE_TOKENS))


class GroupLearner(LearnerService):
    """The learner, and the weights that travel from it."""

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

    def send(self, ref: WeightsRef, route: Route) -> str:
        """Send a version; on the side, while training may go on."""
        return self._outbox.send(ref, route)

    def abort(self) -> None:
        """Break off what is being sent; on the side."""
        self._outbox.abort()

    def stage(self, copy: bool) -> Reply[bool]:
        """Stage the learner's state; see :class:`~stretto.runtime.state.BackgroundWriter`."""
        return Reply(self._writer.stage(self._learner.state_dict(), copy=copy))

    def write(self, file: Path) -> Reply[None]:
        """Begin to write what was staged."""
        self._writer.begin(file)
        return Reply(None)

    def written(self) -> Reply[bool]:
        """Return whether the file is written."""
        return Reply(self._writer.written())

    def kept(self, refs: Sequence[WeightsRef]) -> Reply[list[dict[str, torch.Tensor]]]:
        """Return the tensors of versions that are kept."""
        return Reply([dict(self._outbox.get(ref)) for ref in refs])

    def load_state_dict(
        self,
        state: dict[str, Any],
        kept: Sequence[tuple[WeightsRef, Mapping[str, torch.Tensor]]],
    ) -> Reply[Mapping[str, WeightsRef]]:
        """Go on from a state; return tickets for the weights as they are then.

        Args:
            state: of the learner.
            kept: versions of other weights that followers hold, or wait for.
        """
        self._learner.load_state_dict(state)
        for ref, tensors in kept:
            self._outbox.put(ref, tensors)
        return Reply(self.offered())

    def offered(self) -> Mapping[str, WeightsRef]:
        """Offer the weights as they are, as the version that they have."""
        refs = self._learner.offer()
        self.probe(refs["actor"].version)
        return refs

    def save(self, folder: Path) -> None:
        """Write the trained model."""
        self._learner.save(folder, self._prompts.tokenizer)


def learner(setting: Setting, probe: IntArray) -> GroupLearner:
    """Make the learner's service, in its process."""
    setting.prepare()
    config, given = setting.config, setting.given
    stack, said = ExitStack(), list[str]()
    tokenizer, task, prompts = open_task(config, given, said.append)
    rewards = critic_rewards(config, tokenizer, said.append)
    models = trained_models(config, task, prompts, rewards, stack, said.append, given)
    trained = ["actor", "critic"] if models.critic else ["actor"]
    device = next(models.actor.parameters()).device
    bucket_bytes = config.cluster.bucket_mb << 20
    outbox = Outbox(device, bucket_bytes, keep=config.schedule.knobs.lag + 2)
    made, _ = make_learner(
        config,
        models.actor,
        models.critic,
        stack,
        snapshots=trained,
        channel=outbox,
        threads=setting.threads or torch.get_num_threads(),
    )
    ready = Ready({}, _frozen(models.actor), said)
    service = GroupLearner(made, outbox, prompts, ready, probe)
    service._ready = replace(ready, refs=service.offered())
    return service


class Follower:
    """The part of a service that receives weights.

    Args:
        model: that they go to.
        config: of the run.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        travelling = {n: p for n, p in model.named_parameters() if p.requires_grad}
        device = next(model.parameters()).device
        self.inbox = Inbox(travelling, device, config.cluster.bucket_mb << 20)


class GroupGenerator(GeneratorService):
    """An engine over weights of its own, which come from the learner."""

    def __init__(
        self, engine: TorchEngine, follower: Follower, parcels: Parcels, probe: IntArray
    ) -> None:
        super().__init__(engine)
        self._engine, self._inbox, self._probe = engine, follower.inbox, probe
        self._parcels = parcels

    def expect(self, ref: WeightsRef, mark: str, route: Route) -> Reply[None]:
        """Prepare to receive weights."""
        self._inbox.expect(ref, mark, route)
        return Reply(None)

    def load(self, weights: WeightsRef) -> Reply[Loaded]:  # type: ignore[override]
        """Load weights, and read the probe with them."""

        def load() -> Loaded:
            self._engine.load(weights)
            return Loaded(self._inbox.mark, self._engine.logprobs(self._probe))

        return self._timed("load", load, lambda _: {"version": weights.version})

    def abort(self) -> None:
        """Break off what is being received; on the side."""
        self._inbox.abort()

    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Reply[Sequence[KVTransfer]]:
        """Let go of rollouts; keys and values stay here until they are sent."""
        reply = super().export(rollout_ids, with_cache)
        return Reply(self._parcels.keep(reply.value), reply.work)

    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> Reply[None]:
        """Go on with rollouts, once their keys and values have come."""
        about = {"rollouts": [r.id for r in responses]}

        def accept() -> None:
            self._engine.accept(responses, self._parcels.fetch(transfers))

        return self._timed("migrate", accept, lambda _: about)

    def ship(self, parcel: int, route: Route) -> None:
        """Send keys and values that are kept here; on the side."""
        self._parcels.ship(parcel, route)

    def sample(self) -> tuple[int, Plan]:
        """Keep a sample of bytes to be sent."""
        return self._parcels.sample()

    def measure(self, route: Route, what: Plan) -> float:
        """Return how long a sample takes to come here, in seconds."""
        return self._parcels.measure(route, what)

    def rates(self) -> Rates:
        """Measure what the rule for migration asks for."""
        self._engine.logprobs(self._probe)
        return Rates(prefill_tokens_per_s(self._engine.model), self._engine.kv_bytes_per_token)


class GroupScorer(ScorerService):
    """A model scorer; one that follows a trained model has weights of its own."""

    def __init__(
        self, scorer: ModelScorer, said: Sequence[str], follower: Follower | None = None
    ) -> None:
        super().__init__(scorer)
        self._scorer, self._said, self._follower = scorer, said, follower

    def ready(self) -> tuple[ScorerInfo, Sequence[str]]:
        """Return the facts about the scorer, and lines for people."""
        return self.info(), self._said

    def require(self, ready: Ready) -> None:
        """See that the reference is the learner's actor as training starts.

        Raises:
            EngineError: it is another model.
        """
        _check_reference(self._scorer.model, ready)

    def expect(self, ref: WeightsRef, mark: str, route: Route) -> Reply[None]:
        """Prepare to receive weights."""
        assert self._follower is not None
        self._follower.inbox.expect(ref, mark, route)
        return Reply(None)

    def load(self, weights: WeightsRef) -> Reply[Loaded]:  # type: ignore[override]
        """Load weights."""
        follower, reply = self._follower, super().load(weights)
        assert follower is not None
        return Reply(Loaded(follower.inbox.mark), reply.work)

    def abort(self) -> None:
        """Break off what is being received; on the side."""
        if self._follower is not None:
            self._follower.inbox.abort()


def generator(setting: Setting, name: str, probe: IntArray) -> GroupGenerator:
    """Make a generator's service, in its process; parcels bear its name."""
    setting.prepare()
    config = setting.config
    model, prompts = _actor(setting)
    follower = Follower(model, config)
    rows = most_in_flight(config)
    ends = setting.given.end_tokens
    engine = make_engine(config, model, prompts.tokenizer, rows, ends, follower.inbox)
    device = next(model.parameters()).device
    return GroupGenerator(engine, follower, Parcels(name, device), probe)


def reference(setting: Setting) -> GroupScorer:
    """Make the reference's service, in its process: the reference is the actor at the start."""
    setting.prepare()
    config, said = setting.config, list[str]()
    model = setting.given.reference
    if model is not None:
        model = made_ready(model, config, "the reference").requires_grad_(False)
    else:
        model, _ = _actor(setting)
    (scorer,) = model_scorers(config, model, None, None, said.append)
    return GroupScorer(scorer, said)


def critic(setting: Setting) -> GroupScorer:
    """Make the service of the critic as a scorer, in its process."""
    setting.prepare()
    config, given, said = setting.config, setting.given, list[str]()
    tokenizer, _, _ = open_task(config, given, _quiet)
    rewards = critic_rewards(config, tokenizer, _quiet)
    actor = make_actor(config, given, _quiet)
    model = make_critic(config, actor, tokenizer, rewards, given, _quiet)
    assert model is not None
    model = with_adapters(model, config, "SEQ_CLS", ExitStack(), brought=False)
    follower = Follower(model, config)
    (scorer,) = model_scorers(config, None, model, follower.inbox, said.append)
    return GroupScorer(scorer, said, follower)


def reward_model(setting: Setting, source: str, prompts: Sequence[Prompt]) -> GroupScorer:
    """Make a reward model's service, in its process.

    Args:
        setting: of the process.
        source: as in ``reward.sources``.
        prompts: some of the run's, to check that the model can read them.
    """
    setting.prepare()
    config, given, said = setting.config, setting.given, list[str]()
    tokenizer, _, _ = open_task(config, given, _quiet)
    loaded = given.reward_models.get(source)
    if loaded is None:
        loaded = load_reward_model(config, source.removeprefix(MODEL), said.append)
    else:
        made_ready(loaded[0], config, f"reward model '{source}'").requires_grad_(False)
    slots = scorer_slots(config, loaded[0], said.append)
    scorer = reward_scorer(source, config, tokenizer, said.append, loaded=loaded, slots=slots)
    check_rewards(config, [scorer], prompts)
    return GroupScorer(scorer, said)


def _actor(setting: Setting) -> tuple[nn.Module, PromptSource]:
    """Load the actor as training starts, in its adapters where it has any.

    In the learner's order, as some of it draws random numbers.
    """
    config, given = setting.config, setting.given
    tokenizer, task, prompts = open_task(config, given, _quiet)
    critic_rewards(config, tokenizer, _quiet)
    model = make_actor(config, given, _quiet)
    warmed_up(model, config, task, prompts, given, _quiet)
    return with_adapters(model, config, "CAUSAL_LM", ExitStack(), brought=False), prompts


def _check_reference(model: nn.Module, ready: Ready) -> None:
    """See that the reference is the learner's actor as training starts, but for adapters."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    frozen = len(trained) < len(list(model.parameters()))
    whole = fingerprint(model.named_parameters())
    if _frozen(model) != ready.frozen or (not frozen and whole != ready.refs["actor"].fingerprint):
        raise EngineError(
            "the reference is not the actor that training starts from: its process has loaded "
            "other weights; see whether all machines hold the same model files"
        )


def _frozen(model: nn.Module) -> str:
    """Return the fingerprint of the parameters that are not trained."""
    return fingerprint((n, p) for n, p in model.named_parameters() if not p.requires_grad)


def _quiet(_: str) -> None:
    """Say nothing: the learner's process has said it."""
