"""The models of a run: brought by the caller, or loaded as the settings name them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.allocator import keep_freed_memory
from stretto.config import Config, SupervisedConfig
from stretto.errors import ConfigError
from stretto.models import mapped
from stretto.models.attention import use_short_attention
from stretto.models.forward import freeze_unread, unwrapped
from stretto.models.heads import critic_from_actor
from stretto.models.load import (
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    pick_device,
    pick_dtype,
)
from stretto.models.lora import add_lora, merge_lora, trained_names
from stretto.models.resolve import resolve
from stretto.models.weights import require_finite, require_trainable
from stretto.saying import Say, format_size, working
from stretto.scoring.models import RewardModelScorer, same_tokenizer
from stretto.tasks import Task
from stretto.tasks.prompts import PromptSource


@dataclass(frozen=True)
class Given:
    """Objects that the caller of a run brings instead of names in the settings; all are optional.

    Attributes:
        actor: the policy; it is trained in place.
        tokenizer: the actor's.
        reference: the model that the KL is measured to; without it a copy of the starting actor.
        critic: a model with a scalar head; it is trained in place.
        task: prompts, and their verifier where it has one.
        opened: the task that the settings name, where it was opened before.
        functions: reward functions by the name they have in ``reward.sources``.
        reward_models: model and tokenizer by the name they have in ``reward.sources``.
        end_tokens: that end a response; without them the tokenizer's and those of the generation
            config.
        warmup: a file that keeps the warm-up's outcome; it is read if it is there, else written.
        looks_at: called with the run's prompts, before any model is loaded.
        in_files: whether models that are loaded stay in their files, as ranks that divide them
            keep but their parts; see :mod:`stretto.models.mapped`.
    """

    actor: nn.Module | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    reference: nn.Module | None = None
    critic: nn.Module | None = None
    task: Task | None = None
    opened: Task | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    reward_models: Mapping[str, tuple[nn.Module, PreTrainedTokenizerBase]] = field(
        default_factory=dict
    )
    end_tokens: frozenset[int] | None = None
    warmup: Path | None = None
    looks_at: Callable[[PromptSource], None] | None = None
    in_files: bool = False


NOTHING = Given()
"""Nothing brought: all is as the settings say."""


def prepare_torch(config: Config | SupervisedConfig) -> None:
    """Set memory, threads and torch's seed, from which initialisation alone draws."""
    keep_freed_memory()
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)


@contextmanager
def drawing_apart(name: str, device: torch.device) -> Iterator[None]:
    """Have torch draw from a generator seeded by a name, whatever was drawn before.

    Models may then be loaded in any order, and in any process.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1)
        yield


def make_actor(config: Config, given: Given, say: Say) -> nn.Module:
    """Return the actor: brought by the caller, or as the settings name it."""
    if given.actor is None:
        return load_actor(config, say, in_files=given.in_files)
    return made_ready(given.actor, config, trained=True)


def made_ready(
    model: nn.Module, config: Config, what: str = "the model", *, trained: bool = False
) -> nn.Module:
    """Make a model that the caller brought like one that is loaded here.

    It is then on the settings' device, in evaluation mode, with no dropout, and with the attention
    for short sequences.

    Args:
        what: a name of the model, as the subject of a message.

    Raises:
        ModelError: its weights are not finite, or of a type that is not trained.
    """
    require_finite(model, what)
    if trained:
        require_trainable(model, what)
    model.to(pick_device(config.model.device)).eval()
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    freeze_unread(model)
    use_short_attention(unwrapped(model))
    return model


def load_actor(config: Config, say: Say, *, in_files: bool = False) -> nn.Module:
    """Load the actor, as the settings name it."""
    path = resolve(config.model.name, say)
    return _loaded(load_causal_lm, path, config, say, in_files)


def _loaded(
    load: Callable[..., nn.Module], path: Path | str, config: Config, say: Say, in_files: bool
) -> nn.Module:
    """Load a model by one of the loaders, in the settings' type and on their device.

    Say so if it should be left in its files, and some of it could not.
    """
    m = config.model
    device = pick_device(m.device)
    with working(say, f"loading {path}"):
        model = load(
            path, pick_dtype(m.dtype, device), device, m.trust_remote_code, in_files=in_files
        )
    if in_files:
        if m.lora_rank:  # adapters are made in the types of the weights beside them
            mapped.convert(model)
        held = mapped.held_bytes(model)
        if held:
            say(
                f"every rank loads {format_size(held)} of '{path}' before it keeps its part: "
                "weights of another type or form than in the files cannot be left there"
            )
    return model


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy that is never trained."""
    return mapped.copied(model).requires_grad_(False)


def load_reward_model(
    config: Config, name: str, say: Say, *, in_files: bool = False
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a reward model and its tokenizer by name, frozen."""
    path = resolve(name, say)
    model = _loaded(load_sequence_classifier, path, config, say, in_files)
    return model.requires_grad_(False), load_tokenizer(path, config.model.trust_remote_code, say)


def make_critic(
    config: Config,
    actor: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[RewardModelScorer],
    given: Given,
    say: Say,
) -> nn.Module | None:
    """Make the value model, for an algorithm that has one; see ``critic.init``."""
    if not config.algorithm.definition.critic:
        return None
    init = config.critic.init
    if given.critic is not None:
        critic = made_ready(given.critic, config, "the critic", trained=True)
    elif init == "actor":
        critic = critic_from_actor(actor)
    elif init == "reward":
        first = rewards[0]
        _require_same_tokenizer(init, first.same_tokenizer)
        critic = mapped.copied(first.model).requires_grad_(True)
    else:
        path = resolve(init, say)
        own = load_tokenizer(path, config.model.trust_remote_code, say)
        _require_same_tokenizer(init, same_tokenizer(own, tokenizer))
        critic = _loaded(load_sequence_classifier, path, config, say, given.in_files)
    return critic


def with_adapters(
    model: nn.Module,
    config: Config,
    kind: Literal["CAUSAL_LM", "SEQ_CLS"],
    stack: ExitStack,
    *,
    brought: bool,
) -> nn.Module:
    """Put a model that is trained into LoRA adapters, where the settings ask for them.

    Args:
        stack: at its end, however that comes, a model that the caller brought is a plain model
            again, with the adapters merged in.
    """
    if not config.model.lora_rank:
        return model
    trained = trained_names(model)
    with drawing_apart(f"{config.seed} adapters {kind}", pick_device(config.model.device)):
        wrapped = add_lora(model, config.model, kind)
    if brought:
        stack.callback(merge_lora, wrapped, trained)
    return wrapped


def make_reference(
    config: Config, base: nn.Module, actor: nn.Module, given: Given
) -> nn.Module | None:
    """Make the reference, to which the KL is measured; ``None`` where there is none.

    Args:
        base: the actor as it starts.
        actor: the same model, with adapters under LoRA: it is then its own reference, without them.
    """
    if not config.algorithm.has_reference:
        return None
    if given.reference is not None:
        return made_ready(given.reference, config, "the reference").requires_grad_(False)
    return actor if config.model.lora_rank else frozen_copy(base)


def _require_same_tokenizer(init: str, same: bool) -> None:
    if not same:
        raise ConfigError(
            f"critic.init = '{init}' names a model with another tokenizer than the actor, whose "
            "tokens the critic must read; set critic.init = 'actor'"
        )
