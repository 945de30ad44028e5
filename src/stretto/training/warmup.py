"""A short supervised warm-up on the task's own answers, for models that start from scratch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from stretto.config import Config
from stretto.models.forward import output_head, response_hidden, response_tokens
from stretto.models.logits import token_logprobs
from stretto.training.trained import TrainedModel
from stretto.types import Rollout

BATCH = 32
"""Examples an update."""


def warm_up(model: nn.Module, examples: Sequence[Rollout], config: Config) -> float:
    """One pass of cross-entropy on the examples' response tokens, in batches of :data:`BATCH`.

    Args:
        model: a causal language model; trained in place.
        examples: their responses are the references, the end-of-sequence token included.
        config: of the run.

    Returns:
        The loss of the last batch, in nats a token.
    """
    batches = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    training = config.training.model_copy(update={"lr_schedule": "cosine"})
    trained = TrainedModel(model, config.warmup_lr, training, updates=len(batches), warmup=0)
    head = output_head(model)
    loss = torch.zeros(())
    for batch in batches:
        with trained.training():
            hidden = response_hidden(model, batch)
            logprobs, _ = token_logprobs(head, hidden, response_tokens(batch, hidden.device))
            loss = -logprobs.mean()
            loss.backward()
        trained.update()
    trained.close()
    return loss.item()
