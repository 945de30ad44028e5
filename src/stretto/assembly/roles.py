"""Builds engines, scorers and the learner from the settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.environments import turn_ends
from stretto.assembly.run_models import (
    Overrides,
    Reward,
    load_draft,
    load_reward_model,
    load_teacher,
    made_ready,
)
from stretto.assembly.teachers import is_taught_by, reads_tokens
from stretto.config import Config, ModelConfig
from stretto.config.sections import RewardSource
from stretto.config.training_config import token_budget
from stretto.errors import EngineError, ModelError
from stretto.models.backend import backend_of, pick_device, pick_dtype
from stretto.models.cached import slots_within
from stretto.models.forward import backbone, positions, text_config, unwrapped
from stretto.models.layer_shards import GatheredPasses, Grid
from stretto.models.load import end_token_ids, named_ends
from stretto.models.lora import trained_tensors
from stretto.models.resolve import adapter_base, resolve
from stretto.models.row_products import use_row_products
from stretto.models.shards import peers_of
from stretto.models.weights import fingerprint_of
from stretto.pipelines.executor.stages import Name
from stretto.rollout.base import Engine, EngineSettings, StopStrings
from stretto.rollout.engine_registry import engine_of
from stretto.saying import Say, silent
from stretto.scoring.base_scorer import ModelScorer
from stretto.scoring.cross_tokenizer import CrossTokenizerScorer, TeacherReader
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.model_scorers import (
    RewardModelScorer,
    critic_scorer,
    reference_scorer,
)
from stretto.scoring.streaming import CodeScorer, StreamingReward, StreamingScorer
from stretto.tasks.prompts import PromptSource
from stretto.training.backprop import Backprop, LocalBackprop
from stretto.training.learner import PolicyLearner
from stretto.training.losses import Losses
from stretto.training.trained import LearningRate, TrainedModel
from stretto.types import Prompt, WeightsRef
from stretto.weights.channel import SharedChannel, WeightChannel

MEMORY_SHARE = 0.15
"""Share of the free memory for the KV cache of one scorer."""

_NO_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({})


def load_reward(
    source: RewardSource, config: ModelConfig, overrides: Overrides, say: Say
) -> Reward | None:
    """Return a frozen reward model and its tokenizer, ``None`` if the source is not a model."""
    if reward := overrides.reward_models.get(source.name):
        made_ready(reward[0], config.device, f"reward model '{source.name}'").requires_grad_(False)
        return reward
    if not source.kind.is_model:
        return None
    return load_reward_model(config, source.model, say, in_files=overrides.in_files)


class RoleFactory:
    """Builds the roles of a run from its settings, and prints notes on them for the user."""

    def __init__(self, config: Config, say: Say) -> None:
        self.config, self._say = config, say
        if config.model.cudnn_attention:
            backend_of(pick_device(config.model.device)).use_cudnn_attention()

    @cached_property
    def _budget(self) -> int:
        device = pick_device(self.config.model.device)
        return token_budget(self.config.training.microbatch_tokens, device)

    def make_engine(
        self,
        actor: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        rows: int,
        end_tokens: frozenset[int] | None = None,
        channel: WeightChannel | None = None,
        *,
        overridden: bool = False,
        threads: int = 0,
    ) -> Engine:
        """Build the engine in the settings, with the actor's weights.

        Args:
            actor: on the CPU, for an engine that keeps its own weights.
            rows: maximum number of rollouts decoded at a time.
            end_tokens: end a response. By default those of the model and the tokenizer.
            channel: delivers new weights. With one, an engine with its own weights has none until
                the first :meth:`~stretto.rollout.base.Engine.load`, otherwise the actor's.
            overridden: whether the actor is the caller's object instead of the one in the settings.
            threads: CPU threads, for engines that manage their own. 0 is the engine's default.
        """
        config, r = self.config, self.config.rollout
        kind = engine_of(r)
        able = kind.capabilities
        device = pick_device(config.model.device)
        moves = config.schedule.knobs.migrates(r.engines)
        lags = config.schedule.knobs.lag
        # An evaluation runs between a weight sync and the round.
        synced = channel is not None and not (lags or moves or config.observe.eval_every)
        first = SharedChannel() if able.own_weights and channel is None else None
        self._match(actor)
        draft = None
        if r.speculative_model and not able.own_weights:
            draft = load_draft(config.model, r.speculative_model, tokenizer, silent)
        if config.model.use_liger_kernel and not able.own_weights:
            backend_of(device).use_liger_kernel(actor)  # repeated if it is the learner's
        with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
            plain = unwrapped(actor)
            folder = ""
            dtype = next(actor.parameters()).dtype
            if able.own_weights:
                dtype = pick_dtype(config.model.dtype, device)
                below = adapter_base(resolve(config.model.name, silent)) or config.model.name
                folder = scratch if overridden else str(resolve(below, silent))
                if overridden:
                    plain.config.architectures = [type(plain).__name__]
                    plain.config.save_pretrained(scratch)
            if end_tokens is None:
                end_tokens = end_token_ids(plain, tokenizer) | turn_ends(config, tokenizer)
            settings = EngineSettings(
                rollout=r,
                seed=config.seed,
                end_tokens=end_tokens,
                stop=StopStrings(r.stop, tokenizer),
                rows=r.slots or rows,
                carry=config.schedule.carry,
                channel=first or channel,
                longest=config.longest,
                folder=folder,
                dtype=dtype,
                device=device,
                threads=threads,
                trust_remote_code=config.model.trust_remote_code,
                draft=draft,
                sleep_level=2 if synced else 1,
            )
            engine = kind.open(actor, settings)
        if first:
            ref = WeightsRef("actor", 0, fingerprint_of(actor), first.name)
            first.put(ref, trained_tensors(actor))
            engine.load(ref)
        return engine

    def _match(self, actor: nn.Module) -> None:
        """Let engine and learner compute the same sums, if configured."""
        if self.config.training.match_engine:
            use_row_products(unwrapped(actor), backbone(actor))

    def scorer_slots(
        self, model: nn.Module, name: str = "", gathered: GatheredPasses | None = None
    ) -> int:
        """Return how many rollouts fit in a scorer's share of memory, 0 without streaming."""
        config = self.config
        if not config.schedule.knobs.streams:
            return 0
        if gathered:
            self._say(
                f"'{name}' scores rollouts whole, at their end: the ranks that hold its shards "
                "must run all passes together"
            )
            return 0
        device = next(model.parameters()).device
        budget = int(MEMORY_SHARE * backend_of(device).free_bytes())
        try:
            fit = slots_within(model, config.longest, budget)
        except (EngineError, ModelError):  # the scorer will raise it
            return config.most_in_flight
        if peers := peers_of(model):  # free memory differs, and all must read the same rollouts
            fit = peers.least(fit, device)
        if not fit:
            self._say(
                f"no response of up to {config.longest} tokens fits into a scorer's share of free "
                f"memory ({budget >> 20} MiB): whole responses are scored, once they have ended"
            )
        return min(config.most_in_flight, fit)

    def open_function(
        self,
        source: RewardSource,
        columns: Collection[str],
        tokenizer: PreTrainedTokenizerBase,
        stack: ExitStack,
        functions: Mapping[str, Callable[..., Any]] = _NO_FUNCTIONS,
        *,
        environment: bool = False,
    ) -> CodeScorer:
        """Open a reward source that is code. Functions given by name run in their own process.

        ``columns`` are the dataset's. ``environment``: whether an environment can score, too.
        ConfigError if the function is missing or unusable, TaskError if the task has no verifier.
        """
        config, function = self.config, functions.get(source.name)
        if source.kind.streams or isinstance(function, StreamingReward):
            return StreamingScorer(source, function, tokenizer)
        scorer = FunctionScorer(
            source,
            config.task,
            config.seed,
            tokenizer,
            stop=config.rollout.stop,
            timeout_s=config.reward.timeout_s,
            columns=columns,
            function=function,
            max_steps=config.steps,
            environment=environment,
        )
        stack.callback(scorer.close)
        return scorer

    def open_functions(
        self, prompts: PromptSource, stack: ExitStack, overrides: Overrides
    ) -> list[CodeScorer]:
        """Open all reward sources of a run that are code. See :meth:`open_function`."""
        columns, tokenizer = prompts.task.first.data.keys(), prompts.tokenizer
        how: Any = {"environment": bool(self.config.environment.sources)}
        return [
            self.open_function(source, columns, tokenizer, stack, overrides.functions, **how)
            for source in self.config.reward.parsed
            if source.kind.is_code and source.name not in overrides.reward_models
        ]

    def reward_scorer(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        loaded: Reward,
        *,
        slots: int = 0,
        ends: frozenset[int] = frozenset(),
        gathered: GatheredPasses | None = None,
    ) -> RewardModelScorer:
        """Build a reward model's scorer, which streams ``slots`` rollouts. Passed-in responses end
        with ``ends``. Raises ModelError without a scalar head.
        """
        stop = self.config.rollout.stop
        return RewardModelScorer(
            name,
            *loaded,
            tokenizer,
            self._budget,
            stop,
            slots=slots,
            given_ends=ends,
            episodes=bool(self.config.environment.sources),
            gathered=gathered,
            say=self._say,
        )

    def reward_models(
        self, tokenizer: PreTrainedTokenizerBase, overrides: Overrides
    ) -> list[list[RewardModelScorer]]:
        """Build the reward models' scorers for each replica. Replicas share the models."""
        engines = self.config.rollout.engines
        count = engines if self.config.schedule.knobs.hosts_scorers(engines) else 1
        replicas: list[list[RewardModelScorer]] = [[] for _ in range(count)]
        for source in self.config.reward.parsed:
            if loaded := load_reward(source, self.config.model, overrides, self._say):
                slots = self.scorer_slots(loaded[0])
                for replica in replicas:
                    scorer = self.reward_scorer(source.name, tokenizer, loaded, slots=slots)
                    replica.append(scorer)
        return replicas

    def critic_rewards(
        self, tokenizer: PreTrainedTokenizerBase, overrides: Overrides
    ) -> list[RewardModelScorer]:
        """Return the reward model that initializes the critic, if any."""
        config = self.config
        if config.critic.init != "reward" or not config.algorithm.definition.critic:
            return []
        name, model = config.reward.models[0].name, config.reward.models[0].model
        in_files = overrides.in_files
        loaded = load_reward_model(config.model, model, self._say, in_files=in_files)
        return [self.reward_scorer(name, tokenizer, loaded)]

    def check_rewards(
        self, rewards: Iterable[RewardModelScorer], prompts: Sequence[Prompt]
    ) -> None:
        """Raise ConfigError or ModelError for a reward model with too few positions.

        With its own tokenizer, a model may split a response into more tokens than the actor, and
        how many is unknown beforehand. A response that then does not fit fails by itself.
        """
        for reward in rewards:
            if reward.same_tokenizer:
                limit = positions(reward.model)
                self.config.require_positions(f"reward model '{reward.name}'", limit)
            else:
                reward.require_room(prompts)

    def teacher_scorer(
        self,
        name: str,
        loaded: Reward,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        gathered: GatheredPasses | None = None,
    ) -> ModelScorer:
        """Build a teacher's scorer. Raises ConfigError or ModelError if it has too few positions,
        or a tokenizer that cannot be read by.
        """
        model, own_tokenizer = loaded
        has_others = bool(self.config.algorithm.teachers)
        options: dict[str, Any] = {
            "applies": partial(is_taught_by, name) if has_others else None,
            "slots": self.scorer_slots(model, name, gathered),
            "say": self._say,
        }
        if same := reads_tokens(self.config, name, own_tokenizer, tokenizer):
            self.config.require_positions(f"the {name}", positions(model))
            options["vocabulary"] = text_config(model).vocab_size
        else:
            ends = named_ends(text_config(model), own_tokenizer)
            stop = self.config.rollout.stop
            options["scorer"] = CrossTokenizerScorer
            options["reader"] = TeacherReader(name, own_tokenizer, tokenizer, stop, ends)
        temperature = self.config.rollout.temperature
        scorer = reference_scorer(model, temperature, self._budget, gathered, name, **options)
        if not same:
            scorer.require_room(prompts)
        return scorer

    def teachers(
        self, overrides: Overrides, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, Reward]:
        """Load all teachers, by the names of their scorers, for an actor with this tokenizer."""
        return {
            name: load_teacher(self.config, name, tokenizer, self._say, in_files=overrides.in_files)
            for name in self.config.algorithm.teacher_models
        }

    def model_scorers(
        self,
        reference: nn.Module | None,
        critic: nn.Module | None,
        channel: WeightChannel | None,
        gathered: GatheredPasses | None = None,
    ) -> list[ModelScorer]:
        """Build the scorers of reference and critic. The channel delivers weights to the critic.
        ``gathered`` runs the passes of a model in shards.
        """
        options: dict[str, Any] = {"say": self._say, "gathered": gathered}
        scorers = list[ModelScorer]()
        if reference is not None:
            options["slots"] = self.scorer_slots(reference, "reference", gathered)
            temperature = self.config.rollout.temperature
            scorers.append(reference_scorer(reference, temperature, self._budget, **options))
        if critic is not None:
            options["slots"] = self.scorer_slots(critic, "critic", gathered)
            scorers.append(critic_scorer(critic, self._budget, channel=channel, **options))
        return scorers

    def make_learner(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        *,
        snapshots: Sequence[str],
        channel: SharedChannel,
        lends: bool = False,
        grid: Grid | None = None,
        stages_on: torch.device | None = None,
    ) -> PolicyLearner:
        """Build the learner, or a rank's part of it.

        Args:
            snapshots: models that the channel copies to the roles that follow them.
            channel: receives the weights.
            lends: whether roles that follow read shards themselves instead of copies.
            grid: the ranks that hold shards of the models, including this process, if any.
            stages_on: this rank's device, if ranks hold pipeline stages of the models.
        """
        config = self.config
        t = config.training
        updates, warmup = config.steps * t.updates, t.warmup_steps * t.updates
        frozen = min(config.critic.freeze_steps, config.steps) * t.updates
        rates: dict[Name, LearningRate] = {
            "actor": LearningRate(t.lr, updates - frozen, warmup),
            "critic": LearningRate(t.critic_lr, updates, warmup),
        }
        losses = Losses(config.algorithm, config.rollout.temperature)
        backend = backend_of(pick_device(config.model.device))
        self._match(actor)
        for model in filter(None, (actor, critic)):
            if config.model.use_liger_kernel:
                backend.use_liger_kernel(model)
            if config.model.torch_compile:
                backend.compile_layers(model)
        first: TrainedModel
        second: TrainedModel | None
        backprop: Backprop
        if stages_on is not None and critic is not None:
            # Imported here, because planning loads a compiler that nothing else needs.
            from stretto.training import pipelined

            staged = pipelined.make(actor, critic, config, rates, stages_on)
            first, second = staged.models["actor"], staged.models["critic"]
            backprop = staged
        elif grid is not None:
            from stretto.training.sharded import ShardedBackprop, ShardedModel

            actor_shards = ShardedModel(actor, grid, rates["actor"], t, lends=lends)
            critic_shards = (
                ShardedModel(critic, grid, rates["critic"], t, lends=lends) if critic else None
            )
            first, second = actor_shards, critic_shards
            backprop = ShardedBackprop(actor_shards, critic_shards, losses, t.microbatch_tokens)
        else:
            actor_model = TrainedModel(actor, rates["actor"], t, may_be_frozen=not config.steps)
            critic_model = TrainedModel(critic, rates["critic"], t) if critic else None
            first, second = actor_model, critic_model
            backprop = LocalBackprop(actor_model, critic_model, losses, t.microbatch_tokens)
        factors = config.reward.factors
        return PolicyLearner(
            first, second, backprop, config, factors, snapshots=snapshots, channel=channel
        )
