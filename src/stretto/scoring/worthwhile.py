"""The number of tokens that makes a model scorer's call worth its fixed cost. No torch here."""

from __future__ import annotations

STREAMED_SHARE = 16
"""The part of a forward pass, 1 / 16, from which a streaming scorer's call is worth its fixed cost.

That is 64 tokens on a CPU, where a call costs as much as 25 to 150 tokens in it, by the size of the
model (docs/schedules.md). A constant, not measured at the start, so that a run repeats itself.
"""


def worthwhile_tokens(token_budget: int, *, streaming: bool) -> int:
    """Return the tokens that make a call worth its fixed cost.

    They are half of what fits into a forward pass, as whole responses are best read in full passes.
    While a scorer streams they are fewer: tokens that are not read beside decoding are read at the
    end, when everyone waits.

    Args:
        streaming: whether responses are read while they are being decoded.
    """
    return token_budget // (STREAMED_SHARE if streaming else 2)
