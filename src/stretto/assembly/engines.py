"""The engine that generates, and the slots of scorers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import psutil
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.checks import check_engine
from stretto.config import Config
from stretto.errors import EngineError, ModelError
from stretto.models.cached import slots_within
from stretto.models.forward import unwrapped
from stretto.models.load import end_token_ids, pick_device, pick_dtype
from stretto.models.lora import trained_names
from stretto.models.resolve import resolve
from stretto.models.tensor_parallel import slices_of
from stretto.models.weights import fingerprint_of
from stretto.rollout.base import Engine, EngineSettings, StopStrings
from stretto.rollout.registry import ENGINES
from stretto.types import WeightsRef
from stretto.weights.channel import SharedChannel, WeightChannel

MEMORY_SHARE = 0.15
"""Share of the free memory that the keys and values of one scorer may take."""


def make_engine(
    config: Config,
    actor: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    end_tokens: frozenset[int] | None = None,
    channel: WeightChannel | None = None,
    *,
    brought: bool = False,
    threads: int = 0,
) -> Engine:
    """Make the engine that the settings name, with the actor's weights.

    Args:
        actor: on the CPU, for an engine with weights of its own.
        rows: rollouts decoded at a time, at most.
        end_tokens: that end a response; without them the model's and the tokenizer's do.
        channel: where new weights come from, if any do. An engine with weights of its own has no
            others before the first :meth:`~stretto.rollout.base.Engine.load`; without a channel,
            it has the actor's.
        brought: the actor is an object of the caller's, and not what the settings name.
        threads: of the CPU, for an engine that decides about them; 0 leaves its choice.
    """
    r, kind = config.rollout, ENGINES[config.rollout.engine]
    check_engine(config, kind.capabilities)
    device = pick_device(config.model.device)
    given = SharedChannel() if kind.own_weights and channel is None else None
    with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
        settings = EngineSettings(
            rollout=r,
            seed=config.seed,
            end_tokens=(
                end_token_ids(unwrapped(actor), tokenizer) if end_tokens is None else end_tokens
            ),
            stop=StopStrings(r.stop, tokenizer) if r.stop else None,
            rows=r.slots or rows,
            carry=config.schedule.carry,
            channel=given or channel,
            longest=config.task.max_prompt_tokens + r.max_new_tokens,
            folder=_config_folder(config, actor, scratch, brought) if kind.own_weights else "",
            dtype=(
                pick_dtype(config.model.dtype, device)
                if kind.own_weights
                else next(actor.parameters()).dtype
            ),
            device=device,
            threads=threads,
            trust_remote_code=config.model.trust_remote_code,
        )
        engine = kind.open(actor, settings)
    if given:
        trained = trained_names(actor)
        ref = WeightsRef("actor", 0, fingerprint_of(actor), given.name)
        given.put(ref, {n: p.detach() for n, p in actor.named_parameters() if n in trained})
        engine.load(ref)
    return engine


def _config_folder(config: Config, model: nn.Module, scratch: str, brought: bool) -> str:
    """Return a folder with the model's config: its own, or that of a model which is an object."""
    if not brought:
        return str(resolve(config.model.name, lambda _: None))
    plain = unwrapped(model)
    plain.config.architectures = [type(plain).__name__]
    plain.config.save_pretrained(scratch)
    return scratch


def scorer_slots(config: Config, model: nn.Module, say: Callable[[str], None]) -> int:
    """Return how many rollouts a scorer can follow within its share of free memory.

    It is 0 where no scorer streams.
    """
    if not config.schedule.knobs.streams:
        return 0
    parameter = next(model.parameters())
    free_bytes = (
        torch.cuda.mem_get_info(parameter.device)[0]
        if parameter.device.type == "cuda"
        else psutil.virtual_memory().available
    )
    positions = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    budget = int(MEMORY_SHARE * free_bytes)
    try:
        fit = slots_within(model, positions, budget)
    except (EngineError, ModelError):  # the scorer will say so
        return config.most_in_flight
    slices, _ = slices_of(model)
    if slices:  # what is free differs from rank to rank, and all must read the same rollouts
        fit = slices.least(fit, parameter.device)
    if not fit:
        say(
            f"no response of up to {positions} tokens fits into a scorer's share of free memory "
            f"({budget >> 20} MiB): whole responses are scored, once they have ended"
        )
    return min(config.most_in_flight, fit)
