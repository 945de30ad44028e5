"""The services of generators and scorers: on a thread of the run's process, or in their own.

Where roles have processes of their own, each loads its models itself, and the trained weights come
from the learner. A model's fingerprint, of all its parameters, proves that both hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stretto.assembly.models import (
    made_ready,
    make_actor,
    make_critic,
    with_adapters,
)
from stretto.assembly.parts import check_rewards, critic_rewards, open_prompts, warmed_up
from stretto.assembly.roles import (
    load_reward,
    make_engine,
    model_scorers,
    reward_scorer,
    scorer_slots,
)
from stretto.config.sections import reward_source
from stretto.errors import EngineError
from stretto.models.backend import pick_device
from stretto.models.lora import trained_names
from stretto.models.mapped import take
from stretto.models.offload import OffloadedTensors
from stretto.models.pieces import Layout, wholes_of
from stretto.models.tensor_parallel import Slices, cut_linears, plan_cuts
from stretto.models.weights import fingerprint
from stretto.protocols import Generator, Scorer
from stretto.rollout.base import Engine
from stretto.rollout.registry import ENGINES
from stretto.runtime.kv_transfer import KVStore
from stretto.runtime.messages import (
    OUTBOX,
    Loaded,
    Rates,
    Ready,
    Setting,
    frozen_mark,
    loading,
    on_host,
)
from stretto.runtime.placement import learner_layout
from stretto.scoring.base import ModelScorer
from stretto.scoring.functions import FunctionScorer
from stretto.tasks.prompts import PromptSource
from stretto.types import (
    FloatArray,
    IntArray,
    KVTransfer,
    Prompt,
    Reply,
    Response,
    ScorerInfo,
    WeightsRef,
    short_name,
)
from stretto.weights.broadcast import WeightReceiver
from stretto.weights.buckets import Plan
from stretto.weights.resharding import Resharding
from stretto.weights.transfer import Route
from stretto.workers.services import Service

Receiver = WeightReceiver | Resharding
"""The end of a weight channel between processes, at the follower."""


class Follower(Service):
    """A service that may follow a trained model.

    Attributes:
        inbox: receives the weights; ``None`` for a service that follows no model, or reads the
            learner's tensors in its own process.
    """

    inbox: Receiver | None = None

    def expect(self, ref: WeightsRef, marks: Sequence[str], routes: Sequence[Route]) -> None:
        """Prepare to receive weights; on the side, on all ranks.

        Args:
            marks: of the plans by which they travel.
            routes: of the first rank, to each rank of the learner.
        """
        assert isinstance(self.inbox, WeightReceiver)
        own = [replace(route, rank=route.rank + dist.get_rank()) for route in routes]
        self.inbox.expect(ref, marks, own)

    def abort(self) -> None:
        """Break off what is being received; on the side."""
        if isinstance(self.inbox, WeightReceiver):
            self.inbox.abort()

    def load(self, weights: WeightsRef) -> Reply[Loaded]:
        """Load weights, and return what proves that they came."""

        def load() -> Loaded:
            self.worker.load(weights)
            return self._loaded()

        return self._timed("load", load, lambda _: {"version": weights.version})

    def _loaded(self, probe: FloatArray | None = None) -> Loaded:
        moved = self.inbox.moved if isinstance(self.inbox, Resharding) else 0
        return Loaded(self.inbox.mark if self.inbox else "", probe, moved)


class GeneratorService(Follower):
    """An engine.

    Args:
        inbox: see :class:`Follower`.
        kv_store: keeps keys and values for other processes; ``None`` where generators share one.
        probe: token ids [n, t] that are read after each weight sync; ``None`` for no proof.
    """

    role = Generator

    def __init__(
        self,
        engine: Engine,
        inbox: Receiver | None = None,
        kv_store: KVStore | None = None,
        probe: IntArray | None = None,
    ) -> None:
        super().__init__(engine)
        self.inbox, self._kv_store, self._probe = inbox, kv_store, probe

    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Reply[Sequence[KVTransfer]]:
        """Let go of rollouts; keys and values stay here until they are sent."""

        def export() -> Sequence[KVTransfer]:
            found: Sequence[KVTransfer] = self.worker.export(rollout_ids, with_cache)
            return self._kv_store.keep(found) if self._kv_store else found

        return self._timed("migrate", export, lambda _: {"rollouts": list(rollout_ids)})

    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> Reply[None]:
        """Go on with rollouts, once their keys and values have come."""

        def accept() -> None:
            came = self._kv_store.fetch(transfers) if self._kv_store else transfers
            self.worker.accept(responses, came)

        return self._timed("migrate", accept, lambda _: {"rollouts": [r.id for r in responses]})

    def ship(self, bundle: int, route: Route) -> None:
        """Send keys and values that are kept here; on the side."""
        assert self._kv_store
        self._kv_store.ship(bundle, route)

    def sample(self) -> tuple[int, Plan]:
        """Keep a sample of bytes to be sent."""
        assert self._kv_store
        return self._kv_store.sample()

    def measure(self, route: Route, what: Plan) -> float:
        """Return how long a sample takes to come here, in seconds."""
        assert self._kv_store
        return self._kv_store.measure(route, what)

    def rates(self) -> Rates:
        """Measure what the rule for migration asks for."""
        if self._probe is not None:  # bytes are known once something was read
            self.worker.logprobs(self._probe)
        moves = self.worker.capabilities.moves_cache
        rate: float = self.worker.prefill_tokens_per_s()
        return Rates(rate, self.worker.kv_bytes_per_token if moves else 0)

    def _loaded(self, probe: FloatArray | None = None) -> Loaded:
        return super()._loaded(None if self._probe is None else self.worker.logprobs(self._probe))

    def _about(self, name: str, args: tuple[Any, ...], value: Any) -> Mapping[str, Any]:
        if name != "decode":
            return {}
        return {
            "rollouts": [c.rollout_id for c in value.chunks],
            "tokens": sum(len(c.tokens) for c in value.chunks),
            "steps": value.steps,
            "version": self.worker.version,
        }

    def _counts(self) -> Mapping[str, int]:
        return {"context": self.worker.context_tokens, "prefilled": self.worker.prefilled_tokens}


class ScorerService(Follower):
    """A scorer; one that follows a trained model may have weights of its own.

    The facts that a schedule needs may change, as when memory runs out. So calls that could have
    changed them return them.

    Args:
        said: lines for people.
        inbox: see :class:`Follower`.
        marks: fingerprints of the reference; see :meth:`require`.
        offloaded: see :class:`~stretto.workers.services.Service`.
    """

    role = Scorer

    def __init__(
        self,
        scorer: ModelScorer | FunctionScorer,
        said: Sequence[str] = (),
        inbox: Receiver | None = None,
        marks: tuple[str, str] = ("", ""),
        offloaded: OffloadedTensors | None = None,
    ) -> None:
        super().__init__(scorer)
        self.inbox, self._said, self._marks, self.offloaded = inbox, said, marks, offloaded

    @property
    def light(self) -> frozenset[str]:
        whole = set() if self.worker.info.streams else {"admit", "extend"}
        return super().light | {"ready", "require"} | whole

    def info(self) -> ScorerInfo:
        """Return the facts about the scorer that a schedule needs."""
        info: ScorerInfo = self.worker.info
        return info

    def ready(self) -> tuple[ScorerInfo, Sequence[str]]:
        """Return the facts about the scorer, and lines for people."""
        return self.info(), self._said

    def require(self, ready: Ready) -> None:
        """See that the reference is the learner's actor as training starts.

        Raises:
            EngineError: it is another model.
        """
        theirs = (ready.frozen, ready.refs["actor"].fingerprint if self._marks[1] else "")
        if self._marks != theirs:
            raise EngineError(
                "the reference is not the actor that training starts from: its process has loaded "
                "other weights; see whether all machines hold the same model files"
            )

    def _span(self, name: str) -> str:
        return f"{name}/{short_name(self.worker.info.name)}"

    def _about(self, name: str, args: tuple[Any, ...], value: Any) -> Mapping[str, Any]:
        ids = args[0] if name == "finish" else [chunk.rollout_id for chunk in args[0]]
        return {"rollouts": list(ids)}

    def _counts(self) -> Mapping[str, int]:
        read = getattr(self.worker, "read_tokens", None)
        return {} if read is None else {"tokens": read}

    def _answer(self, reply: Reply[Any]) -> Reply[Any]:
        return reply if reply.value is not None else Reply(self.info(), reply.work)


# -- in processes of their own -------------------------------------------------------------------


def generator(setting: Setting, name: str, probe: IntArray) -> GeneratorService:
    """Make a generator's service, in its process."""
    setting.prepare()
    config, given = setting.config, setting.given
    own_weights = ENGINES[config.rollout.engine].own_weights
    model, prompts = loaded_actor(on_host(setting) if own_weights else setting)
    inbox = follow_whole(model, setting) if own_weights else follow(model, setting)
    engine = make_engine(
        config,
        model,
        prompts.tokenizer,
        config.most_in_flight,
        given.end_tokens,
        inbox,
        overridden=given.actor is not None,
        threads=setting.threads,
    )
    device = next(model.parameters()).device
    if own_weights:
        device = pick_device(config.model.device)
    kv_store = KVStore(name, device, dist.get_rank())
    return GeneratorService(engine, inbox, kv_store, probe)


def reference(setting: Setting) -> ScorerService:
    """Make the reference's service, in its process: the reference is the actor at the start."""
    setting.prepare()
    config, said = setting.config, list[str]()
    model = setting.given.reference
    if model is not None:
        model = made_ready(model, config.model.device, "the reference").requires_grad_(False)
    else:
        model, _ = loaded_actor(setting)
    marks = _marks_of(model)
    (scorer,) = model_scorers(config, cut(model, setting), None, None, said.append)
    offloaded = setting.offloaded("reference", scorer.model.parameters)
    return ScorerService(scorer, said, marks=marks, offloaded=offloaded)


def critic(setting: Setting) -> ScorerService:
    """Make the service of the critic as a scorer, in its process."""
    setting.prepare()
    config, said = setting.config, list[str]()
    model = _critic(loading(setting))
    inbox = follow(model, setting)
    (scorer,) = model_scorers(config, None, model, inbox, said.append)
    return ScorerService(
        scorer, said, inbox, offloaded=setting.offloaded("critic", model.parameters)
    )


def reward_model(setting: Setting, source: str, prompts: Sequence[Prompt]) -> ScorerService:
    """Make a reward model's service, in its process.

    Args:
        source: as in ``reward.sources``.
        prompts: some of the run's, to check that the model can read them.
    """
    setting.prepare()
    config, given, said = setting.config, setting.given, list[str]()
    here = loading(setting)
    tokenizer = open_prompts(config, given, _quiet).tokenizer
    where = config if source in given.reward_models else here.config
    loaded = load_reward(reward_source(source), where.model, here.given, said.append)
    assert loaded is not None
    cut(loaded[0], setting)
    slots = scorer_slots(config, loaded[0], said.append)
    scorer = reward_scorer(source, config, tokenizer, said.append, loaded, slots=slots)
    check_rewards(config, [scorer], prompts)
    return ScorerService(scorer, said, offloaded=setting.offloaded(source, scorer.model.parameters))


def follow_whole(model: nn.Module, setting: Setting) -> WeightReceiver:
    """Make the inbox that receives an unsharded copy of the model's weights.

    Args:
        model: as training starts; only shapes and types of its parameters are looked at.
    """
    config = setting.config
    theirs, trained = learner_layout(config.cluster), trained_names(model)
    dims = plan_cuts(model, theirs.tp).dims if theirs.tp > 1 else {}
    wholes = {n: whole for n, whole in wholes_of(model, dims).items() if n in trained}
    return WeightReceiver(
        {n: torch.empty(w.shape, dtype=w.dtype, device="meta") for n, w in wholes.items()},
        pick_device(config.model.device),
        config.cluster.bucket_mb << 20,
        [theirs.own(wholes, rank) for rank in range(theirs.ranks)],
    )


def follow(model: nn.Module, setting: Setting) -> Receiver:
    """Cut a model into slices, if there are several ranks; make the end that receives its weights.

    Args:
        model: whole, as training starts; it is changed in place.

    Raises:
        ModelError: it cannot be cut into that many slices.
    """
    config = setting.config
    theirs, here = learner_layout(config.cluster), Layout(tp=dist.get_world_size())
    dims = plan_cuts(model, max(theirs.tp, here.tp)).dims
    trained = trained_names(model)
    wholes = {n: whole for n, whole in wholes_of(model, dims).items() if n in trained}
    cut(model, setting)
    bucket_bytes = config.cluster.bucket_mb << 20
    if OUTBOX in setting.shared:
        device = next(model.parameters()).device
        return Resharding(setting.shared[OUTBOX], wholes, theirs, here, bucket_bytes, device)
    own = {n: here.box(replace(w, by_rows=False), dist.get_rank()) for n, w in wholes.items()}
    return WeightReceiver(
        {n: p for n, p in model.named_parameters() if n in trained},
        next(model.parameters()).device,
        bucket_bytes,
        [theirs.own(wholes, rank) for rank in range(theirs.ranks)],
        own,
    )


def cut(model: nn.Module, setting: Setting) -> nn.Module:
    """Cut a model into slices in place, if there are several ranks; return it.

    A slice goes to the device of the setting; see :func:`~stretto.runtime.messages.loading`.

    Raises:
        ModelError: it cannot be cut into that many.
    """
    ranks = dist.get_world_size()
    if ranks > 1:
        cut_linears(model, plan_cuts(model, ranks), Slices())
        take(model, pick_device(setting.config.model.device))
    return model


def loaded_actor(setting: Setting) -> tuple[nn.Module, PromptSource]:
    """Load the actor as training starts, in its adapters where it has any."""
    setting = loading(setting)
    model, prompts = _starting_actor(setting)
    m, seed = setting.config.model, setting.config.seed
    return with_adapters(model, m, seed, "CAUSAL_LM", None), prompts


def _critic(setting: Setting) -> nn.Module:
    config, given = setting.config, setting.given
    actor, prompts = _starting_actor(setting)
    tokenizer, m = prompts.tokenizer, config.model
    rewards = critic_rewards(config, prompts, given, _quiet)
    model = make_critic(m, config.critic.init, actor, tokenizer, rewards, given, _quiet)
    return with_adapters(model, m, config.seed, "SEQ_CLS", None)


def _starting_actor(setting: Setting) -> tuple[nn.Module, PromptSource]:
    """Load the actor as training starts, warmed up, without adapters; the critic may be made of it.

    What of either is not trained never travels: the learner has made it of the same weights.
    """
    config, given = setting.config, setting.given
    prompts = open_prompts(config, given, _quiet)
    model = make_actor(config.model, given, _quiet)
    warmed_up(model, config, prompts, given, _quiet)
    return model, prompts


def _marks_of(model: nn.Module) -> tuple[str, str]:
    """Return fingerprints of what is not trained, and of all where everything is.

    Adapters are drawn at random, and make no difference before they have learned.
    """
    whole = all(p.requires_grad for p in model.parameters())
    return frozen_mark(model), fingerprint(model.named_parameters()) if whole else ""


def _quiet(_: str) -> None:
    """Say nothing: the learner's process has said it."""
