"""Log-probabilities of given tokens, without ever holding a [tokens, vocabulary] matrix.

Shapes: N response tokens, H hidden size, V vocabulary, C vocabulary entries per slice.

The vocabulary is processed in slices of C entries. The forward pass keeps a running log-sum-exp
(and the running mean logit that the entropy needs). The backward pass recomputes each slice of
logits and turns it into gradients at once. Peak memory is N x C whatever V is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.models import row_products

SLICE_BYTES = {"cpu": 8 << 20}
"""Bytes of a slice of float32 logits: fits into a CPU's cache. Elsewhere 256 MiB."""

MIN_SLICE = 1024
"""Minimum width of a slice, because narrower matrix products are slow."""

SUM_BLOCK = 256
"""Vocabulary entries per block of :func:`block_sums`."""


@dataclass(frozen=True)
class OutputHead:
    """The layer that turns the last hidden state into logits.

    Attributes:
        weight, bias: [V, H] and [V], if any.
        scale: factor on the logits (Cohere's logit_scale, the inverse of Granite's logits_scaling).
        softcap: logits become cap * tanh(logits / cap) (Gemma 2). 0 is off.
        by_rows: whether logits of a token have the same bits whatever tokens are computed with it
            (:mod:`stretto.models.row_products`), and log-probabilities the engine's.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    by_rows: bool = False

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return logits of vocabulary entries ``start:stop``: [..., H] -> [..., C]."""
        if self.by_rows and (start, stop) == (0, None):
            return self.finish(row_products.linear(hidden, self.weight, self.bias))
        bias = None if self.bias is None else self.bias[start:stop]
        return self.finish(F.linear(hidden, self.weight[start:stop], bias))

    def finish(self, raw: Tensor) -> Tensor:
        """Turn the linear layer's output into logits: at least float32, scaled, capped."""
        logits = raw if raw.dtype == torch.float64 else raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def token_logprobs(
    head: OutputHead, hidden: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [N] of targets [N], and entropies [N], from hidden states [N, H]. In
    nats, float32 (float64 for float64 input). Gradients flow to hidden states and head.
    """
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, head, temperature
    )
    return logprobs, entropy


def _slices(tokens: int, vocabulary: int, device: str) -> list[tuple[int, int]]:
    width = max(MIN_SLICE, SLICE_BYTES.get(device, 256 << 20) // (4 * max(tokens, 1)))
    return [(a, min(a + width, vocabulary)) for a in range(0, vocabulary, width)]


def block_sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [n, V / 256, 256] of weights [n, V], and running sums of them in float64, of
    which the last ones are the totals.
    """
    if padding := -weights.shape[1] % SUM_BLOCK:
        weights = F.pad(weights, (0, padding))
    blocks = weights.view(len(weights), -1, SUM_BLOCK)
    return blocks, blocks.sum(-1).double().cumsum(-1)


def logprobs_of_weights(weights: Tensor, totals: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probs [n] of tokens from unnormalized probabilities [n, V] and their totals."""
    return weights.gather(1, tokens[:, None])[:, 0].log() - totals.log().float()


def _sampled_logprobs(
    head: OutputHead, hidden: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, log-sum-exps and entropies [N], in the same operations as the engine's
    sampler, so that log-probs are equal to the bit.
    """
    results = []
    rows = max(SLICE_BYTES["cpu"] // (4 * len(head.weight)), row_products.CANONICAL)
    for states, tokens in zip(hidden.split(rows), targets.split(rows), strict=True):
        shifted = head.logits(states)
        if temperature != 1:
            shifted.div_(temperature)
        top = shifted.amax(-1, keepdim=True)
        weights = shifted.sub_(top).exp()
        totals = block_sums(weights)[1][:, -1]
        logprobs = logprobs_of_weights(weights, totals, tokens)
        log_totals = totals.log().float()
        means = weights.mul_(shifted).sum(-1) / totals.float()
        results.append((logprobs, top[:, 0] + log_totals, log_totals - means))
    logprobs, lse, entropy = (torch.cat(parts) for parts in zip(*results, strict=True))
    return logprobs, lse, entropy


class _TokenLogprobs(torch.autograd.Function):
    """See :func:`token_logprobs`. With s the scaled logits, p = softmax(s), L = logsumexp(s):

    logprob = s[target] - L           d logprob / ds = onehot(target) - p
    entropy = L - sum(p * s)          d entropy / ds = -p * (s - L + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: OutputHead,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # tells missing gradients from zeros without the host
        ctx.head, ctx.temperature = head, temperature
        if head.by_rows and len(hidden):
            logprobs, lse, entropy = _sampled_logprobs(head, hidden, targets, temperature)
            ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
            return logprobs, entropy
        n, vocabulary = hidden.shape[0], weight.shape[0]
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        top = torch.full((n,), -torch.inf, dtype=dtype, device=hidden.device)
        total, weighted, target_logits = (torch.zeros_like(top) for _ in range(3))
        for start, stop in _slices(n, vocabulary, hidden.device.type):
            s = head.logits(hidden, start, stop).div_(temperature)
            new_top = torch.maximum(top, s.amax(-1))
            # All sums are relative to the largest logit so far. Initially it is -inf, over an
            # empty sum, and the clamp turns 0 * inf into 0.
            fall = (top - new_top).clamp_min(torch.finfo(dtype).min)
            shrink = fall.exp()
            s.sub_(new_top[:, None])
            e = s.exp()
            weighted = shrink * (weighted + total * fall) + (e * s).sum(-1)
            total = total * shrink + e.sum(-1)
            in_slice = (targets >= start) & (targets < stop)
            at = (targets - start).clamp(0, stop - start - 1)
            target_logits = torch.where(
                in_slice, s.gather(1, at[:, None])[:, 0], target_logits + fall
            )
            top = new_top
        log_total = total.log()
        lse = top + log_total
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        return target_logits - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = grads
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(lse)
        head, temperature = ctx.head, ctx.temperature
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros(hidden.shape, dtype=lse.dtype, device=hidden.device)
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.empty_like(bias) if bias is not None and need_bias else None
        for start, stop in _slices(hidden.shape[0], weight.shape[0], hidden.device.type):
            z = head.logits(hidden, start, stop)
            log_p = (z / temperature).sub_(lse[:, None])
            p = torch.exp(log_p)
            slope = -grad_logprob[:, None].expand_as(p)
            if grad_entropy is not None:
                slope = slope - grad_entropy[:, None] * (log_p + entropy[:, None])
            ds = p.mul_(slope)
            in_slice = ((targets >= start) & (targets < stop))[:, None]
            at = (targets - start).clamp(0, stop - start - 1)[:, None]
            target_ds = ds.gather(1, at)
            ds.scatter_(1, at, torch.where(in_slice, target_ds + grad_logprob[:, None], target_ds))
            ds.mul_(head.scale / temperature)
            if head.softcap:
                ds.mul_(1 - (z / head.softcap).square_())
            ds = ds.to(hidden.dtype)
            if need_hidden:
                d_hidden += ds @ weight[start:stop]
            if d_weight is not None:
                torch.mm(ds.T, hidden, out=d_weight[start:stop])
            if d_bias is not None:
                d_bias[start:stop] = ds.sum(0)
        return d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None
