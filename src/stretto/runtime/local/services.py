"""The services of roles in their processes, made from the settings and the learner's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.checks import check_rewards
from stretto.assembly.controls import most_in_flight
from stretto.assembly.engines import make_engine, scorer_slots
from stretto.assembly.learner import make_learner
from stretto.assembly.models import (
    NOTHING,
    Given,
    load_actor,
    load_reward_model,
    make_critic,
    prepare_torch,
    with_adapters,
)
from stretto.assembly.parts import critic_rewards, open_task, trained_models
from stretto.assembly.scorers import MODEL, model_scorers, reward_scorer
from stretto.config import Config
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.models.weights import copy_into, load_weights
from stretto.rollout.engine import TorchEngine
from stretto.runtime.state import BackgroundWriter
from stretto.scoring.base import ModelScorer
from stretto.training.learner import PolicyLearner
from stretto.types import Prompt, Reply, ScorerInfo, WeightsRef
from stretto.weights.disk import DiskChannel
from stretto.workers.services import GeneratorService, LearnerService, ScorerService


@dataclass(frozen=True, slots=True)
class Ready:
    """The message of the learner's process to the others, once its models are loaded.

    Attributes:
        refs: tickets for all weights of the trained models, as training starts.
        end_tokens: that end a response.
        said: lines for people.
    """

    refs: Mapping[str, WeightsRef]
    end_tokens: frozenset[int]
    said: Sequence[str]


class LocalLearner(LearnerService):
    """The learner, and the models that the others start from."""

    def __init__(
        self,
        learner: PolicyLearner,
        tokenizer: PreTrainedTokenizerBase,
        ready: Ready,
        stack: ExitStack,
    ) -> None:
        super().__init__(learner)
        self._learner, self._tokenizer, self._ready, self._stack = learner, tokenizer, ready, stack
        self._writer = BackgroundWriter()

    def ready(self) -> Ready:
        return self._ready

    def stage(self, copy: bool) -> Reply[bool]:
        return Reply(self._writer.stage(self._learner.state_dict(), copy=copy))

    def write(self, file: Path) -> Reply[None]:
        self._writer.begin(file)
        return Reply(None)

    def written(self) -> Reply[bool]:
        return Reply(self._writer.written())

    def load_state_dict(self, state: dict[str, Any]) -> Reply[None]:
        self._learner.load_state_dict(state)
        return Reply(None)

    def offer(self) -> Reply[Mapping[str, WeightsRef]]:
        return Reply(self._learner.offer())

    def save(self, folder: Path) -> None:
        self._learner.save(folder, self._tokenizer)


def learner(config: Config, folder: Path, threads: int, warmup: Path | None) -> LocalLearner:
    """Make the learner's service, in its process.

    Args:
        config: of the run.
        folder: of the channel.
        threads: CPU threads.
        warmup: a file that keeps the warm-up's outcome; it is read if it is there, else written.
    """
    stack, said, channel = ExitStack(), list[str](), DiskChannel(folder)
    prepare_torch(config)
    tokenizer, task, prompts = open_task(config, NOTHING, said.append)
    rewards = critic_rewards(config, tokenizer, said.append)
    given = Given(warmup=warmup)
    models = trained_models(config, task, prompts, rewards, stack, said.append, given)
    trained = {"actor": models.actor} | ({"critic": models.critic} if models.critic else {})
    made, _ = make_learner(
        config,
        models.actor,
        models.critic,
        stack,
        snapshots=tuple(trained),
        channel=channel,
        threads=threads,
    )
    refs = {}
    for name, model in trained.items():
        mark = made.fingerprint(name)
        refs[name] = WeightsRef(name, 0, mark, channel.name)
        channel.put(refs[name], dict(model.named_parameters()))
    return LocalLearner(made, tokenizer, Ready(refs, models.end_tokens, said), stack)


class LocalGenerator(GeneratorService):
    """An engine over weights of its own."""

    def __init__(self, engine: TorchEngine, model: nn.Module) -> None:
        super().__init__(engine)
        self._engine, self._model = engine, model

    def weights(self) -> Reply[dict[str, torch.Tensor]]:
        return Reply(_trained(self._model))

    def restore(self, weights: Mapping[str, torch.Tensor], version: int) -> Reply[None]:
        copy_into(self._model, weights)
        self._engine.load_state_dict({"version": version})
        return Reply(None)


def generator(config: Config, folder: Path, ready: Ready) -> LocalGenerator:
    """Make a generator's service, in its process."""
    prepare_torch(config)
    channel = DiskChannel(folder)
    model = _actor(config, ready, channel)
    tokenizer = _tokenizer(config)
    rows = most_in_flight(config)
    engine = make_engine(config, model, tokenizer, rows, ready.end_tokens, channel)
    return LocalGenerator(engine, model)


class LocalScorer(ScorerService):
    """A model scorer; one that follows a trained model has weights of its own."""

    def __init__(self, scorer: ModelScorer, said: Sequence[str]) -> None:
        super().__init__(scorer)
        self._scorer, self._said = scorer, said

    def ready(self) -> tuple[ScorerInfo, Sequence[str]]:
        return self.info(), self._said

    def weights(self) -> Reply[dict[str, torch.Tensor]]:
        return Reply(_trained(self._scorer.model))

    def restore(self, weights: Mapping[str, torch.Tensor], version: int) -> Reply[None]:
        copy_into(self._scorer.model, weights)  # a scorer has no version
        return Reply(None)


def reference(config: Config, folder: Path, ready: Ready) -> LocalScorer:
    """Make the reference's service, in its process: the reference is the actor at the start."""
    prepare_torch(config)
    said, channel = list[str](), DiskChannel(folder)
    model = _actor(config, ready, channel)
    (scorer,) = model_scorers(config, model, None, channel, said.append)
    return LocalScorer(scorer, said)


def critic(config: Config, folder: Path, ready: Ready) -> LocalScorer:
    """Make the service of the critic as a scorer, in its process."""
    prepare_torch(config)
    said, channel = list[str](), DiskChannel(folder)
    tokenizer = _tokenizer(config)
    rewards = critic_rewards(config, tokenizer, _quiet)
    actor = load_actor(config, _quiet)
    model = make_critic(config, actor, tokenizer, rewards, NOTHING, _quiet)
    assert model is not None
    model = with_adapters(model, config, "SEQ_CLS", ExitStack(), brought=False)
    ref = ready.refs["critic"]
    load_weights(model, ref, channel.get(ref), "the critic")
    (scorer,) = model_scorers(config, None, model, channel, said.append)
    return LocalScorer(scorer, said)


def reward_model(config: Config, source: str, prompts: Sequence[Prompt]) -> LocalScorer:
    """Make a reward model's service, in its process.

    Args:
        config: of the run.
        source: as in ``reward.sources``.
        prompts: some of the run's, to check that the model can read them.
    """
    prepare_torch(config)
    said = list[str]()
    tokenizer = _tokenizer(config)
    loaded = load_reward_model(config, source.removeprefix(MODEL), said.append)
    slots = scorer_slots(config, loaded[0], said.append)
    scorer = reward_scorer(source, config, tokenizer, said.append, loaded=loaded, slots=slots)
    check_rewards(config, [scorer], prompts)
    return LocalScorer(scorer, said)


def _tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the actor's tokenizer."""
    return load_tokenizer(resolve(config.model.name, _quiet), config.model.trust_remote_code)


def _actor(config: Config, ready: Ready, channel: DiskChannel) -> nn.Module:
    """Load the actor as training starts, in its adapters where it has any."""
    model = load_actor(config, _quiet)
    model = with_adapters(model, config, "CAUSAL_LM", ExitStack(), brought=False)
    ref = ready.refs["actor"]
    load_weights(model, ref, channel.get(ref), "the actor's copy")
    return model


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def _quiet(_: str) -> None:
    """Say nothing: the learner's process has said it."""
