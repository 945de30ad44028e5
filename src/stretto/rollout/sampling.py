"""Token sampling with one uniform number per row, from a random stream per rollout.

Shapes: n rows, V vocabulary.

A token's randomness is a pure function of (run seed, rollout id, index of the token). It depends
neither on the batch nor on the time of admission, and there is no generator state to save. The
number inverts the cumulative distribution. ``torch.multinomial`` would draw V exponentials a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.models.logits import SUM_BLOCK, block_sums, logprobs_of_weights

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
BLOCK = SUM_BLOCK
"""Vocabulary entries per block of the two-level search."""


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK_64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK_64
    return x ^ (x >> 31)


def stream_seed(run_seed: int, rollout_id: int) -> int:
    return _signed(_mix((_mix(run_seed & _MASK_64) + rollout_id * _GOLDEN) & _MASK_64))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, index: Tensor) -> Tensor:
    """Return draw ``index`` [n] of streams ``seeds`` [n] by SplitMix64: float64 in (0, 1)."""
    x = seeds + (index + 1) * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift(x, 31)
    return (_shift(x, 11).double() + 0.5) * 2.0**-53


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set logits [n, V] outside top-k and top-p to -inf. Ties at the border stay in.

    Temperature must be applied before. ``top_p`` keeps the smallest set of likeliest entries with
    this much probability (Holtzman et al. 2020). ``top_k = 0`` and ``top_p = 1`` keep all entries.
    """
    if top_k and top_k < logits.shape[-1]:
        border = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < border, -torch.inf)
    if top_p < 1:
        ordered = logits.sort(-1, descending=True).values
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p  # probability of all likelier entries
        mask = before >= max(top_p, torch.finfo(p.dtype).tiny)  # never the likeliest, if 0
        border = ordered.masked_fill(mask, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < border, -torch.inf)
    return logits


def sample(
    logits: Tensor, u: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw a token per row by numbers ``u`` [n] in (0, 1). Overwrites the logits [n, V].

    Returns tokens [n] and their log-probabilities [n] under the sampled distribution, with
    temperature and truncation applied. A temperature of 0 takes the likeliest token, with its
    log-probability under the model's distribution.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    if temperature != 1:
        logits.div_(temperature)
    if top_k or top_p < 1:
        logits = truncate(logits, top_k, top_p)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()  # in place: new pages cost more
    tokens, total = _invert(weights, u)
    return tokens, logprobs_of_weights(weights, total, tokens)


def top_logprobs(
    logits: Tensor, count: int, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> list[list[tuple[int, float]]]:
    """Return at most ``count`` likeliest tokens per row, with log-probabilities under the
    distribution of :func:`sample`, without truncated tokens.
    """
    if temperature:
        logits = truncate(logits / temperature, top_k, top_p)
    values, tokens = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]), -1)
    rows = zip(tokens.tolist(), values.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -math.inf] for row in rows]


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return at which indices running sums of ``weights`` [n, V] pass ``u`` of their totals [n].

    Also returns the totals. Searches the sums of blocks, then one block, so that no running sum of
    V terms is stored.
    """
    blocks, ends = block_sums(weights)
    total = ends[:, -1]
    block, rest = _first_above(ends, u * total)
    inner = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    offset, _ = _first_above(inner, rest)
    return block * BLOCK + offset, total


def _first_above(ends: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first running sum above the target, and the target less the sum before it."""
    # Rounding must not reach the last sum, so that the entry has a weight above 0.
    target = torch.minimum(target, ends[:, -1] * (1 - 2.0**-40))
    index = torch.searchsorted(ends, target[:, None], right=True)
    before = torch.where(index > 0, ends.gather(1, (index - 1).clamp_min(0)), 0.0)
    return index[:, 0], target - before[:, 0]
