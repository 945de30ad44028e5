"""Models and policies of runs that answer requests, for chats and servers."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import load_actor, prepare_torch, with_adapters
from stretto.checks import check_measured
from stretto.config import Config, ModelConfig, RolloutConfig, TaskConfig, recipes
from stretto.config.sections import NonNegativeInt, Seed
from stretto.errors import ConfigError, EngineError, StateError
from stretto.interfaces import in_python
from stretto.models.backend import with_dtype
from stretto.models.forward import positions
from stretto.models.load import load_tokenizer
from stretto.models.lora import trained_tensors
from stretto.models.resolve import is_known, resolve, trained_model
from stretto.models.weights import fingerprint
from stretto.observe.lock import in_use
from stretto.observe.progress import on_stderr
from stretto.observe.run_directory import RunDirectory
from stretto.rollout.base import Engine
from stretto.rollout.engine_registry import engine_of
from stretto.runs import checkpoint
from stretto.runtime.state import LEARNER
from stretto.saying import CHECKING, silent, working
from stretto.serving.texts import GrowingText
from stretto.tasks import TaskRow
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import render
from stretto.training import shard_files, warmup
from stretto.types import Message, Prompt, Response, Sampling, WeightsRef
from stretto.weights.channel import SharedChannel

LONGEST = 4096
"""Default limit of prompt and answer tokens, or the model's positions if fewer. It is bounded
because the KV cache takes memory for as many tokens.
"""


@dataclass
class Policy:
    """A model that answers, and the source of its newer weights.

    Attributes:
        name: display name of the model or run.
        longest: token limit of prompt and answer.
        run: the run whose checkpoints have the weights, ``None`` for a fixed model.
        step: training step of the newest weights.
        template_arguments: arguments of the chat template in every conversation.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    longest: int
    run: RunDirectory | None
    step: int
    template_arguments: Mapping[str, Any]
    _actor: nn.Module
    _channel: SharedChannel = field(repr=False)

    def newer(self) -> WeightsRef | None:
        """Return a reference to weights newer than the last ones, if a checkpoint has any."""
        if self.run is None or checkpoint.newest(self.run.checkpoints) <= self.step:
            return None
        try:
            step, tensors = _read(self.run)
        except (StateError, OSError):  # removed meanwhile, or damaged. Another will follow
            return None
        if step <= self.step:
            return None
        self.step = step
        return self.offer(tensors)

    def offer(self, tensors: dict[str, Tensor]) -> WeightsRef:
        """Put trained weights into the channel. Return their reference."""
        params = dict(self._actor.named_parameters())
        new = {name: t.to(params[name].device, params[name].dtype) for name, t in tensors.items()}
        weights = {name: new.get(name, p.detach()) for name, p in params.items()}
        ref = WeightsRef("actor", self.step, fingerprint(weights.items()), self._channel.name)
        self._channel.put(ref, new)
        return ref

    def label(self, version: int) -> str | None:
        return f"step-{version}" if self.run else None


class Conversation:
    """A conversation through a policy's chat template, or else one text continued in turns."""

    def __init__(self, policy: Policy, rollout: RolloutConfig, seed: int, system: str = "") -> None:
        """Start a conversation. ``rollout`` and ``seed`` determine how answers are sampled."""
        self._policy = policy
        self._rollout = rollout
        self._seed = seed
        self._encoder = Encoder(policy.tokenizer, policy.template_arguments)
        self._turns = list[Message]()
        self._text = ""
        self._answers = 0
        self._system = ""
        self.set_system(system)

    def set_system(self, text: str) -> None:
        """Set or remove the system message from now on. ConfigError without a chat template."""
        if text and not self._policy.tokenizer.chat_template:
            message = "the model has no chat template, and so no place for a system message"
            raise ConfigError(message, "no-chat-template")
        self._system = text

    def clear(self) -> None:
        """Start again. The system message stays."""
        self._turns, self._text = [], ""

    def answer(self, said: str) -> Generator[str, None, None]:
        """Yield the answer as it is generated. A partial answer stays in the conversation if the
        generator is closed or interrupted. Raises EngineError if the context is too long.
        """
        row = TaskRow(self._text + said)
        if self._policy.tokenizer.chat_template:
            row = TaskRow((*self._turns, Message(role="user", content=said)))
        task = TaskConfig(system=self._system)
        prompt = render(row, task, self._policy.tokenizer, encoder=self._encoder)
        room = self._policy.longest - len(prompt.tokens)
        if room < 1:
            raise EngineError(
                f"the conversation has {len(prompt.tokens)} tokens, and the model takes "
                f"{self._policy.longest} with the answer; begin anew with /clear",
                "context-length",
            )
        r, limit = self._rollout, min(self._rollout.max_new_tokens, room)
        sampling = Sampling(
            limit, r.temperature, r.top_k, r.top_p, seed=(self._seed, self._answers)
        )
        text = ""
        try:
            for piece in self._pieces(prompt, sampling):
                text += piece
                yield piece
        finally:
            self._answers += 1
            self._text += f"{said}{text}\n"
            self._turns.append(Message(role="user", content=said))
            self._turns.append(Message(role="assistant", content=text))

    def _pieces(self, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
        engine, text = self._policy.engine, GrowingText(self._policy.tokenizer, self._rollout.stop)
        empty = np.empty(0, np.int32)
        try:
            engine.admit([Response(self._answers, 0, prompt, empty, sampling=sampling)])
            finish = None
            while finish is None:
                for chunk in engine.decode(1).chunks:
                    text.add(chunk.tokens.tolist())
                    finish = chunk.finish
                    yield text.take(last=finish is not None)
        finally:
            engine.release([self._answers])


@in_python
def open_policy(
    name: str,
    rollout: RolloutConfig,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    max_model_len: NonNegativeInt = 0,
    follow: bool = False,
    seed: Seed = 0,
    template_arguments: Mapping[str, Any] | None = None,
) -> Policy:
    """Load a model or a run's policy. Use the engine on this thread only.

    During training the policy is that of the newest checkpoint. Afterwards it is the saved model,
    or that of the last checkpoint.

    Args:
        rollout: engine and slots.
        max_model_len: token limit of prompt and answer. 0 takes :data:`LONGEST`, or the model's.
        follow: use the policy of checkpoints, or the initial one before the first.

    Raises:
        ConfigError: the run to follow or the device is missing, or an option is out of range.
        ModelError: the model is missing.
    """
    if max_model_len == 1:
        least = "a prompt and an answer are two tokens, at least"
        raise ConfigError(f"`max_model_len = {max_model_len}`: {least}", "too-few-positions")
    run, settings = _run_with_policies(name, follow=follow) or (None, None)
    model = _checked_model(name, settings, dtype=dtype, device=device)
    engine_of(rollout).check()
    model = with_dtype(model, on_stderr)
    prepare_torch(seed, 0)
    tokenizer = load_tokenizer(resolve(model.name, silent), model.trust_remote_code, on_stderr)
    actor_device = "cpu" if rollout.capabilities.own_weights else model.device
    actor = _load_actor(model.model_copy(update={"device": actor_device}), run, settings)
    step, tensors = _read(run) if run and checkpoint.newest(run.checkpoints) else (0, {})
    longest = _longest(actor, max_model_len)
    rollout = rollout.model_copy(update={"max_new_tokens": 1})  # requests have their own limits
    task = TaskConfig(max_prompt_tokens=longest - 1)
    config = Config.model_construct(seed=seed, model=model, rollout=rollout, task=task)
    channel = SharedChannel()
    with working(on_stderr, "starting the engine"):
        factory = RoleFactory(config, on_stderr)
        engine = factory.make_engine(actor, tokenizer, rollout.batch, channel=channel)
        policy = Policy(
            name=Path(name).resolve().name if Path(name).is_dir() else name,
            tokenizer=tokenizer,
            engine=engine,
            longest=longest,
            run=run,
            step=step,
            template_arguments=template_arguments or {},
            _actor=actor,
            _channel=channel,
        )
        if tensors or rollout.capabilities.own_weights:
            engine.load(policy.offer(tensors or trained_tensors(actor)))
    return policy


def _run_with_policies(name: str, *, follow: bool) -> tuple[RunDirectory, Config] | None:
    """Return a run whose checkpoints to use, with its settings, or ``None`` to use a model."""
    folder = Path(name).expanduser()
    if is_known(name) or not (folder / "config.toml").is_file():
        if follow:
            raise ConfigError(
                f"`follow` needs a run's folder, and '{name}' is none", "nothing-to-follow"
            )
        return None
    run = RunDirectory(folder)
    try:
        config = recipes.load(folder)
    except ConfigError:  # a run of supervised training
        if follow:
            raise
        return None
    if follow and not config.observe.checkpoints:
        raise ConfigError(
            f"the run '{name}' writes no checkpoints, which `follow` reads: observe."
            "checkpoint_minutes is 0. Set that, or checkpoint_every, when a run is started",
            "nothing-to-follow",
        )
    has_checkpoint = checkpoint.newest(run.checkpoints) > 0
    saved = run.model.is_dir() and not in_use(folder)
    if not (follow or (has_checkpoint and not saved)):
        return None
    if config.model.lora_rank and config.warmup_examples and not run.warmup.exists():
        raise ConfigError(
            f"the adapters of the run '{name}' are on weights after a warm-up, which "
            f"'{run.warmup}' has once that has ended; try again then",
            "nothing-to-follow",
        )
    return run, config


def _checked_model(name: str, settings: Config | None, **chosen: str) -> ModelConfig:
    model = settings.model if settings else ModelConfig(name=trained_model(name))
    changes = {k: v for k, v in chosen.items() if v != "auto" or not settings}
    model = model.model_copy(update=changes)
    with working(on_stderr, CHECKING):
        check_measured(Config.model_construct(model=model), model.name, rows=False)
    return model


def _load_actor(model: ModelConfig, run: RunDirectory | None, settings: Config | None) -> nn.Module:
    actor = load_actor(model, on_stderr)
    if run and settings:
        if run.warmup.exists():
            warmup.take(actor, None, run.warmup)
        actor = with_adapters(actor, model, settings.seed, "CAUSAL_LM", None)
    return actor


@torch.no_grad()
def _read(run: RunDirectory) -> tuple[int, dict[str, torch.Tensor]]:
    step, state = checkpoint.load_latest(run.checkpoints, on_stderr)
    masters = shard_files.read(state[LEARNER])["models"]["actor"]["masters"]
    return step, {name: shard.read() for name, shard in masters.items()}


def _longest(actor: nn.Module, asked: int) -> int:
    limit = positions(actor, generating=True)
    if asked and limit is not None and asked > limit:
        raise ConfigError(
            f"`max_model_len = {asked}`: the model has positions for {limit} tokens; lower it",
            "too-few-positions",
        )
    return min(asked or LONGEST, limit or asked or LONGEST)
