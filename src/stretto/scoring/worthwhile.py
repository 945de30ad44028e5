"""How many tokens make a call of a model scorer worth its fixed cost. No torch here."""

from __future__ import annotations

STREAMED_SHARE = 16
"""While a scorer streams, a call is worth its fixed cost from 1 / 16 of a forward pass on.

That is 64 tokens on a CPU, where a call costs as much as 25 to 150 tokens in it, by the size of the
model (docs/schedules.md). A constant, not measured at the start, so that a run repeats itself.
"""


def worthwhile_tokens(token_budget: int, *, streaming: bool) -> int:
    """Half of what fits into a forward pass, as whole responses are best read in full passes.

    While a scorer streams, a part of that: what is not read beside decoding is read at the end,
    when everyone waits.

    Args:
        token_budget: tokens of one forward pass.
        streaming: whether responses are read while they are being decoded.
    """
    return token_budget // (STREAMED_SHARE if streaming else 2)
