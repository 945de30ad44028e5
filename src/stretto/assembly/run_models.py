"""Models of a run: the caller's overrides, or loaded by their names in the settings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.teachers import reads_tokens
from stretto.config import Config, ModelConfig
from stretto.errors import ConfigError
from stretto.models import mapped
from stretto.models.backend import backend_of, keep_freed_memory, pick_device, pick_dtype
from stretto.models.forward import freeze_unread, unwrapped
from stretto.models.heads import critic_from_actor
from stretto.models.load import (
    let_gradients_through,
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
)
from stretto.models.lora import add_lora, merge_lora, trained_names
from stretto.models.resolve import adapter_folder, resolve
from stretto.models.weights import require_finite, require_trainable
from stretto.saying import Say, format_size, working
from stretto.scoring.model_scorers import RewardModelScorer
from stretto.tasks import Task
from stretto.tasks.encode import same_tokenizer
from stretto.tasks.prompts import PromptSource

Device = Literal["auto", "cpu", "cuda"]
Reward = tuple[nn.Module, PreTrainedTokenizerBase]
"""A reward model or teacher, and its tokenizer."""


@dataclass(frozen=True)
class Overrides:
    """Objects of the caller in place of names in the settings. All are optional.

    Attributes:
        actor: the policy, trained in place.
        tokenizer: the actor's.
        reference: reference of the KL, by default a copy of the initial actor.
        critic: a model with a scalar head, trained in place.
        opened: the task in the settings, if it is already open.
        functions: reward functions by their names in ``reward.sources``.
        environment: tools or an environment by their names in ``environment.sources``.
        reward_models: model and tokenizer by their names in ``reward.sources``.
        end_tokens: replace those of the tokenizer and the generation config.
        warmup: file with the warm-up's measurements. It is read if it exists and written otherwise.
        looks_at: called with the run's prompts, before any model is loaded.
        exports: called on a thread with the step and folder of each checkpoint on disk, and a
            function that writes that step's model.
        in_files: whether loaded models stay in their files (:mod:`stretto.models.mapped`).
    """

    actor: nn.Module | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    reference: nn.Module | None = None
    critic: nn.Module | None = None
    task: Task | None = None
    opened: Task | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    reward_models: Mapping[str, Reward] = field(default_factory=dict)
    end_tokens: frozenset[int] | None = None
    warmup: Path | None = None
    looks_at: Callable[[PromptSource], None] | None = None
    exports: Callable[[int, Path, Callable[[Path], None]], None] | None = None
    in_files: bool = False

    @property
    def objects(self) -> list[str]:
        """Names of the objects that only the caller can pass in again."""
        attributes = ("actor", "tokenizer", "reference", "critic", "task")
        objects = [name for name in attributes if getattr(self, name) is not None]
        return [*objects, *self.functions, *self.environment, *self.reward_models]


NO_OVERRIDES = Overrides()


def starts_adapted(config: ModelConfig, actor: nn.Module | None) -> bool:
    if actor is None:
        return adapter_folder(config.name) is not None
    return hasattr(actor, "peft_config")


def prepare_torch(seed: int, threads: int) -> None:
    """Set the allocator, threads (0: torch's default) and the seed of newly initialized weights."""
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)


@contextmanager
def drawing_apart(name: str, device: torch.device) -> Iterator[None]:
    """Seed torch's generator by a name, so that models can be loaded in any order and process."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1)
        yield


def make_actor(
    config: ModelConfig, overrides: Overrides, say: Say, *, merged: bool = True
) -> nn.Module:
    """Return the caller's actor, or load the settings' one, with its adapter if ``merged``."""
    if overrides.actor is None:
        return load_actor(config, say, in_files=overrides.in_files, merged=merged)
    if config.load_in_4bit and not getattr(overrides.actor, "is_loaded_in_4bit", False):
        raise ConfigError(
            "model.load_in_4bit = true is for a model that is loaded by its name, and this one was "
            "loaded before, not in 4 bits; leave it out, or give the name",
            "4bit-of-loaded",
        )
    return made_ready(overrides.actor, config.device, trained=True)


def made_ready(
    model: nn.Module, device: Device, what: str = "the model", *, trained: bool = False
) -> nn.Module:
    """Prepare a caller's model like a loaded one: on the device, in evaluation mode, without
    dropout, with the attention for short sequences. Raises ModelError if the weights are not
    finite, or ``trained`` and of a type that cannot be trained. ``what`` names it in messages.
    """
    require_finite(model, what)
    if trained:
        require_trainable(model, what)
    model.to(pick_device(device)).eval()
    let_gradients_through(model)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    freeze_unread(model)
    plain = unwrapped(model)
    backend_of(plain.device).use_fastest_attention(plain)
    return model


def load_actor(
    config: ModelConfig, say: Say, *, in_files: bool = False, merged: bool = True
) -> nn.Module:
    load = partial(load_causal_lm, load_in_4bit=config.load_in_4bit, merged=merged)
    return _loaded(load, resolve(config.name, say), config, say, in_files)


def _loaded(
    load: Callable[..., nn.Module], path: Path | str, config: ModelConfig, say: Say, in_files: bool
) -> nn.Module:
    device = pick_device(config.device)
    dtype, trust = pick_dtype(config.dtype, device), config.trust_remote_code
    with working(say, f"loading {path}"):
        model = load(path, dtype, device, trust, in_files=in_files)
    if in_files:
        if config.lora_rank:  # adapters take the dtype of the base weights
            mapped.convert(model)
        if size := mapped.held_bytes(model):
            say(
                f"every rank loads {format_size(size)} of '{path}' before it keeps its part: "
                "weights of another type or form than in the files cannot be left there"
            )
    return model


def frozen_copy(model: nn.Module) -> nn.Module:
    return mapped.copied(model).requires_grad_(False)


def load_reward_model(
    config: ModelConfig, name: str, say: Say, *, in_files: bool = False
) -> Reward:
    path = resolve(name, say)
    model = _loaded(load_sequence_classifier, path, config, say, in_files)
    return model.requires_grad_(False), load_tokenizer(path, config.trust_remote_code, say)


def load_teacher(
    config: Config, name: str, actor_tokenizer: PreTrainedTokenizerBase, say: Say, *, in_files: bool
) -> Reward:
    """Load a teacher by the name of its scorer. Its tokenizer comes first, because it may be
    refused, and weights take long to load.
    """
    m = config.model
    path = resolve(config.algorithm.teacher_models[name], say)
    tokenizer = load_tokenizer(path, m.trust_remote_code, say)
    reads_tokens(config, name, tokenizer, actor_tokenizer)
    return _loaded(load_causal_lm, path, m, say, in_files).requires_grad_(False), tokenizer


def load_draft(
    config: ModelConfig, name: str, tokenizer: PreTrainedTokenizerBase, say: Say
) -> nn.Module:
    check_draft(config, name, tokenizer, say)
    return _loaded(load_causal_lm, resolve(name, say), config, say, False).requires_grad_(False)


def check_draft(
    config: ModelConfig, name: str, tokenizer: PreTrainedTokenizerBase, say: Say
) -> None:
    """Raise ConfigError if the draft model's tokenizer differs from the actor's."""
    draft_tokenizer = load_tokenizer(resolve(name, say), config.trust_remote_code, say)
    if not same_tokenizer(draft_tokenizer, tokenizer):
        raise ConfigError(
            f"rollout.engine_args: speculative_model = '{name}' has another tokenizer than the "
            "actor, to which it is to propose tokens; choose a model of the actor's family, or "
            "leave it out, and texts of the same prompt propose them",
            "draft-of-other-tokenizer",
        )


def make_critic(
    config: ModelConfig,
    init: str,
    actor: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[RewardModelScorer],
    overrides: Overrides,
    say: Say,
) -> nn.Module:
    """Build the value model. ``init`` is ``critic.init``."""
    if overrides.critic is not None:
        return made_ready(overrides.critic, config.device, "the critic", trained=True)
    if init == "actor":
        return critic_from_actor(actor, shares=config.lora_rank > 0)
    path = "" if init == "reward" else resolve(init, say)
    if path:
        same = same_tokenizer(load_tokenizer(path, config.trust_remote_code, say), tokenizer)
    else:
        same = rewards[0].same_tokenizer
    if not same:
        raise ConfigError(
            f"critic.init = '{init}' names a model with another tokenizer than the actor, whose "
            "tokens the critic must read; set critic.init = 'actor'",
            "critic-of-other-tokenizer",
        )
    if path:
        return _loaded(load_sequence_classifier, path, config, say, overrides.in_files)
    return mapped.copied(rewards[0].model).requires_grad_(True)


def with_adapters(
    model: nn.Module,
    config: ModelConfig,
    seed: int,
    kind: Literal["CAUSAL_LM", "SEQ_CLS"],
    stack: ExitStack | None,
) -> nn.Module:
    """Add LoRA adapters to a trained model, if the settings request them.

    An actor that the settings name continues with its PEFT adapter. A caller's model becomes plain
    at the end of ``stack``, when the adapters are merged.
    """
    if not config.lora_rank:
        return model
    trained = trained_names(model)
    with drawing_apart(f"{seed} adapters {kind}", pick_device(config.device)):
        from_settings = stack is None and kind == "CAUSAL_LM"
        wrapped = add_lora(
            model, config, kind, adapter_folder(config.name) if from_settings else None
        )
    if stack is not None:
        stack.callback(merge_lora, wrapped, trained)
    return wrapped
