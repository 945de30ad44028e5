"""Generalised advantage estimation (Schulman et al. 2016) and whitening. B responses, T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.algorithms.deferred import torch
from stretto.algorithms.reductions import masked_mean, masked_var

if TYPE_CHECKING:
    from torch import Tensor

WHITEN_EPS = 1e-8
"""Added to the variance in :func:`whiten`, as TRL and verl do."""


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (equations 11-16 of the paper).

    ::

        delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
        A_t     = sum_l (gamma lam)^l delta_{t+l}
        R_t     = A_t + V(s_t)

    The state after the last response token is terminal: its value is 0. The sum over l is a scan
    by doubling: after k rounds A_t holds its first 2^k terms, so it takes log2(T) rounds.

    Args:
        rewards: [B, T], the reward for token t.
        values: [B, T], V(s_t) before token t.
        mask: [B, T] bool, left-aligned.

    Returns:
        advantages and returns, each [B, T], 0 outside the mask; padding columns change no bit.
    """
    zero = values.new_zeros(())
    pad = torch.nn.functional.pad
    values = torch.where(mask, values, zero)
    next_values = pad(values[:, 1:], (0, 1))
    delta = torch.where(mask, rewards + gamma * next_values - values, zero)

    advantages, discount, terms = delta, gamma * lam, 1
    while terms < mask.shape[1]:
        advantages = advantages + discount * pad(advantages[:, terms:], (0, terms))
        discount, terms = discount * discount, 2 * terms
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)``, mean and Bessel-corrected variance under the mask.

    Args:
        x: [B, T].
        mask: [B, T] bool; all tokens of the whole batch, never of a part of it.
        shift_mean: bring the mean to 0; otherwise it is put back after scaling.

    Returns:
        [B, T], 0 outside the mask.
    """
    x = torch.where(mask, x, 0.0)
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0)
