"""A model that is whole in this process, whoever trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stretto.config.training import token_budget
from stretto.models.forward import (
    microbatches,
    output_head,
    response_hidden,
    response_tokens,
)
from stretto.models.load import save_model
from stretto.models.logits import OutputHead, token_logprobs
from stretto.models.weights import fingerprint
from stretto.training.gate import end_updates, new_gate
from stretto.types import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class WholeModel:
    """A model as the learner uses it, besides training it.

    Args:
        model: with or without adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._gate = model, new_gate(model)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return next(self.model.parameters()).dtype

    @torch.no_grad()
    def logprobs(
        self, responses: Sequence[Response], mask: Tensor, temperature: float, budget: int = 0
    ) -> Tensor:
        """Log-probs [B, T] of response tokens, 0 outside the mask, on the CPU in float32.

        Args:
            mask: [B, T] bool, true where there is a response token.
            budget: tokens of a forward pass, padding counted; 0 takes what suits the device.
        """
        logprobs = torch.zeros(mask.shape)
        for rows in microbatches(responses, token_budget(budget, self.device)):
            part = [responses[row] for row in rows]
            hidden = response_hidden(self.model, part)
            targets = response_tokens(part, hidden.device)
            flat = token_logprobs(self._head, hidden, targets, temperature)[0].float().cpu()
            here = mask[rows]
            logprobs[rows] = torch.zeros(here.shape).masked_scatter(here, flat)
        return logprobs

    @cached_property
    def _head(self) -> OutputHead:
        return output_head(self.model)  # which checks it with a small pass

    def fingerprint(self) -> str:
        """A short hash of all parameters, frozen ones too."""
        return fingerprint(self.model.named_parameters())

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a snapshot, which is whole."""
        return tensors

    def divided(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole tensors, all of which are this process's."""
        return tensors

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, whole or not at all."""
        save_model(self.model, tokenizer, folder)

    def end_updates(self) -> bool:
        """End the updates; return whether the weights are whole, and stay as they are."""
        return end_updates(self.model)
