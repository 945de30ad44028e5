"""Micro-batches, their losses and metrics, in one process or on the last stage of a pipeline.

Shapes: b responses and T columns of a micro-batch, L padded tokens, N sampled tokens, flattened, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from stretto.algorithms import policy
from stretto.algorithms.correction import settled
from stretto.algorithms.experience import LossInputs, LossTerm
from stretto.algorithms.registry import call, functions_of
from stretto.config import AlgorithmConfig
from stretto.models import forward
from stretto.models.heads import apply_scalar_head
from stretto.models.logits import OutputHead, token_logprobs
from stretto.types import Prompt, Response

CPU = torch.device("cpu")


def copied_at_once(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device in one transfer, because the host waits for each copy to a GPU."""
    # Largest elements first, so that each tensor starts at a multiple of its element size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    parts = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in order]
    pieces = torch.cat(parts).to(device).split([len(part) for part in parts])
    at = dict(zip(order, pieces, strict=True))
    return [at[i].view(t.dtype).view(t.shape) for i, t in enumerate(tensors)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Responses of a mini-batch as tensors, ready for passes in any process. A response's last
    token is never an input, as nothing is predicted from it.
    """

    tokens: Tensor  # [b, L] ids of prompts and responses, right-padded
    places: Tensor  # [N] indices among b * L states of those that predict sampled tokens
    targets: Tensor  # [N], the sampled tokens
    inputs: LossInputs  # of the same responses
    lengths: tuple[int, ...]  # lengths of the rows of tokens

    @classmethod
    def of(cls, responses: Sequence[Response], of_losses: LossInputs) -> MicroBatch:
        """Build a micro-batch on the CPU."""
        rows = forward.inputs(responses)
        tokens = forward.pad_right(rows, CPU)
        row_places = [forward.predicting_response(r) for r in responses]
        places = forward.flat_places(row_places, tokens.shape[1])
        targets = forward.response_tokens(responses, CPU)
        return cls(tokens, places, targets, of_losses.located(), tuple(map(len, rows)))

    @classmethod
    def blank(cls, like: MicroBatch) -> MicroBatch:
        """Build one shaped like ``like`` with no response, so that losses and gradients are 0."""
        response = Response(0, 0, Prompt(0, (0,), ""), np.zeros(0, np.int32))
        return cls.of([response], like.inputs.each(lambda tensor: torch.zeros_like(tensor[:1])))

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch on another device, by one copy."""
        if device == self.tokens.device:
            return self
        input_tensors: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            input_tensors.append(tensor)
            return tensor

        self.inputs.each(noted)
        index_tensors = (self.tokens, self.places, self.targets)
        tokens, places, targets, *input_copies = copied_at_once(
            (*index_tensors, *input_tensors), device
        )
        copies = iter(input_copies)
        inputs = self.inputs.each(lambda _: next(copies))
        return replace(self, tokens=tokens, places=places, targets=targets, inputs=inputs)

    def with_advantages(self, value: float) -> MicroBatch:
        """Return the same micro-batch with one advantage for all response tokens."""
        advantages = self.inputs.mask.to(self.inputs.advantages.dtype) * value
        return replace(self, inputs=replace(self.inputs, advantages=advantages))

    def states(self, hidden: Tensor) -> Tensor:
        """Select the states [N, H] that predict sampled tokens from all [b, L, H]."""
        return hidden.flatten(0, 1)[self.places]

    def read(self, model: nn.Module) -> Tensor:
        """Run a model's forward pass and return the states [N, H] that predict sampled tokens."""
        if not forward.packs(model):
            decoder = forward.backbone(model)
            return self.states(forward.plain_states(decoder, input_ids=self.tokens))
        packing = forward.Packing.of(self.lengths, self.tokens.shape[1]).to(self.tokens.device)
        states = packing.states(model, self.tokens)
        return states[torch.searchsorted(packing.kept, self.places)]


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a run, for responses sampled at ``temperature``."""

    algorithm: AlgorithmConfig
    temperature: float

    def of_actor(
        self, head: OutputHead, states: Tensor, batch: MicroBatch, kl_coef: float
    ) -> LossTerm:
        """Return the algorithm's loss from the states [N, H] before each sampled token. Includes
        the entropy bonus and, if configured there, the KL. The metrics include the policy's drift
        from the old policy and the disagreement of engine and learner.
        """
        a = self.algorithm
        both = token_logprobs(head, states, batch.targets, self.temperature)
        logprobs, entropy = (_at_responses(flat, batch.inputs) for flat in both)
        of_losses, metrics = settled(batch.inputs, logprobs.detach(), a)
        metrics += policy.drift(logprobs, of_losses) + policy.disagreement(logprobs, of_losses)
        metrics += policy.response_ratios(logprobs, of_losses)
        term = call(a, functions_of(a).policy_loss, LossTerm, logprobs, of_losses)
        token_mean = a.entropy_aggregation == "token_mean"
        term += policy.entropy_bonus(entropy, of_losses, a.entropy_coef, token_mean=token_mean)
        if a.kl_place == "loss" and a.kl_coef:
            term += policy.kl_penalty(logprobs, of_losses, kl_coef, a)
        return LossTerm(term.loss, term.metrics + metrics)

    @property
    def of_policy(self) -> Losses:
        """The same losses without terms that have no advantages."""
        off = {"entropy_coef": 0.0, "kl_coef": 0.0}
        return replace(self, algorithm=self.algorithm.model_copy(update=off))

    def of_critic(self, critic: nn.Module, states: Tensor, batch: MicroBatch) -> LossTerm:
        """Return the algorithm's value loss from the states [N, H] before each sampled token."""
        value_loss = functions_of(self.algorithm).value_loss
        assert value_loss is not None
        values = _at_responses(apply_scalar_head(critic, states), batch.inputs)
        return call(self.algorithm, value_loss, LossTerm, values, batch.inputs)


def _at_responses(flat: Tensor, inputs: LossInputs) -> Tensor:
    """Scatter one number per sampled token, [N], to [b, T], with 0 outside the mask."""
    mask, places = inputs.mask, inputs.places
    assert places is not None
    return flat.new_zeros(mask.numel()).index_copy(0, places, flat).view(mask.shape)
