"""Distance of a policy from the model that it started from.

Shapes: N response tokens of a micro-batch; T tokens of one response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import nn

from stretto.assembly.models import load_actor
from stretto.config import ModelConfig
from stretto.config.training import token_budget
from stretto.errors import ConfigError
from stretto.evaluation.rates import standard_error
from stretto.models.forward import (
    microbatches,
    output_head,
    response_hidden,
    response_tokens,
)
from stretto.models.load import load_tokenizer
from stretto.models.logits import token_logprobs
from stretto.models.resolve import resolve
from stretto.observe.progress import on_stderr
from stretto.schedules.rollout import Rollout
from stretto.scoring.models import same_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class KlToSft:
    """A policy's drift from an SFT model, measured on the policy's samples.

    Attributes:
        sft: the model.
        perplexity: of the SFT model on the samples, at temperature 1: exp of the mean negative
            log-likelihood of a response token (what Noukhovitch et al. 2024 measure the KL by).
        kl: mean over responses of log pi(y) - log pi_sft(y), in nats a response, both at the
            sampling temperature: an unbiased estimate of the KL.
        standard_error: of the KL.
    """

    sft: str
    perplexity: float
    kl: float
    standard_error: float


def require_tokenizer(sft: str, trust: bool, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make sure that the SFT model reads the policy's tokens.

    Raises:
        ConfigError: it has another tokenizer.
        ModelError: it cannot be found.
    """
    own = load_tokenizer(resolve(sft, on_stderr), trust, on_stderr)
    if not same_tokenizer(own, tokenizer):
        raise ConfigError(
            f"the KL is a sum over tokens, and the SFT model '{sft}' has another tokenizer than "
            "the policy; give the model that the policy was trained from"
        )


def drift(
    model: ModelConfig,
    rollouts: Sequence[Rollout],
    own: Sequence[float],
    temperature: float,
    microbatch_tokens: int,
) -> KlToSft:
    """The KL of responses to the SFT model.

    Args:
        model: the SFT model.
        temperature: that they were sampled at.
        microbatch_tokens: see ``training.microbatch_tokens``.
        own: the policy's log-probability of each at that temperature, by :func:`logprob_sums`. The
            same forward passes give the SFT model's, so that rounding does not look like drift, as
            it would against the log-probabilities of a decoding engine.

    Raises:
        ModelError: the SFT model cannot be loaded.
    """
    temperatures = (1.0, temperature)
    loaded = load_actor(model, on_stderr)
    at_one, as_sampled = logprob_sums(loaded, rollouts, temperatures, microbatch_tokens)
    kls = [policy - reference for policy, reference in zip(own, as_sampled, strict=True)]
    return KlToSft(
        sft=model.name,
        perplexity=math.exp(-math.fsum(at_one) / sum(len(r) for r in rollouts)),
        kl=fmean(kls),
        standard_error=standard_error(kls),
    )


@torch.no_grad()
def logprob_sums(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    temperatures: Sequence[float],
    microbatch_tokens: int,
) -> list[list[float]]:
    """Log-probability of each response in nats, one list a temperature.

    Args:
        rollouts: with responses of at least one token.
        microbatch_tokens: bounds a forward pass; see ``training.microbatch_tokens``.
    """
    head = output_head(model)
    device = next(model.parameters()).device
    budget = token_budget(microbatch_tokens, device)
    responses = [r.response() for r in rollouts]
    sums = [[0.0] * len(responses) for _ in temperatures]
    for chosen in microbatches(responses, budget):
        part = [responses[i] for i in chosen]
        hidden = response_hidden(model, part)
        tokens = response_tokens(part, hidden.device)
        for of_temperature, temperature in zip(sums, temperatures, strict=True):
            logprobs, _ = token_logprobs(head, hidden, tokens, temperature)
            for i, own in zip(chosen, logprobs.split([len(r) for r in part]), strict=True):
                of_temperature[i] = own.double().sum().item()
    return sums
