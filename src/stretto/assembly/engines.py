"""The engine that generates, and the slots of scorers."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.checks import check_engine
from stretto.assembly.controls import most_in_flight
from stretto.config import Config
from stretto.errors import EngineError, ModelError
from stretto.models.backend import backend_of
from stretto.models.cached import slots_within
from stretto.models.forward import backbone, unwrapped
from stretto.models.load import end_token_ids
from stretto.models.tensor_parallel import slices_of
from stretto.rollout.engine import TorchEngine
from stretto.rollout.stop import StopStrings
from stretto.weights.channel import WeightChannel

MEMORY_SHARE = 0.15
"""Share of the free memory that the keys and values of one scorer may take."""


def make_engine(
    config: Config,
    actor: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    end_tokens: frozenset[int] | None = None,
    channel: WeightChannel | None = None,
) -> TorchEngine:
    """Make Stretto's own generation engine, over the actor's own weights.

    Args:
        rows: rollouts decoded at a time, at most.
        end_tokens: that end a response; without them the model's and the tokenizer's do.
        channel: where new weights come from, if any do.
    """
    check_engine(config, TorchEngine.capabilities)
    ends = end_token_ids(unwrapped(actor), tokenizer) if end_tokens is None else end_tokens
    stop = StopStrings(config.rollout.stop, tokenizer) if config.rollout.stop else None
    return TorchEngine(
        actor,
        config.rollout,
        end_tokens=ends,
        seed=config.seed,
        stop=stop,
        slots=config.rollout.slots or rows,
        carry=config.schedule.carry,
        channel=channel,
    )


def scorer_slots(config: Config, model: nn.Module, say: Callable[[str], None]) -> int:
    """Return how many rollouts a scorer can follow within its share of free memory.

    It is 0 where no scorer streams.
    """
    if not config.schedule.knobs.streams:
        return 0
    parameter = next(model.parameters())
    free_bytes = backend_of(parameter.device).free_bytes()
    positions = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    budget = int(MEMORY_SHARE * free_bytes)
    try:
        fit = slots_within(model, positions, budget)
    except (EngineError, ModelError):  # the scorer will say so
        return most_in_flight(config)
    slices, _ = slices_of(model)
    if slices:  # what is free differs from rank to rank, and all must read the same rollouts
        fit = slices.least(fit, parameter.device)
    if not fit:
        say(
            f"no response of up to {positions} tokens fits into a scorer's share of free memory "
            f"({budget >> 20} MiB): whole responses are scored, once they have ended"
        )
    return min(most_in_flight(config), fit)


@torch.inference_mode()
def prefill_tokens_per_s(model: nn.Module, tokens: int = 256) -> float:
    """Measure how fast the model reads, on one sequence; the first pass is a rehearsal."""
    device = next(model.parameters()).device
    ids = torch.ones(1, tokens, dtype=torch.long, device=device)
    seconds = 0.0
    for _ in range(2):
        start_s = time.perf_counter()
        backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0, -1, 0].item()
        seconds = time.perf_counter() - start_s
    return tokens / seconds
