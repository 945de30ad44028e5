"""Checks of what an engine is asked to decode."""

from __future__ import annotations

from collections.abc import Container

from stretto.errors import EngineError
from stretto.types import KVTransfer, Response


def check_admission(
    r: Response, here: Container[int], max_new_tokens: int, longest: int | None
) -> None:
    """Refuse a response that cannot be decoded.

    Args:
        here: rollouts that the engine holds.
        longest: tokens of prompt and response that the engine can hold; ``None`` for no limit.

    Raises:
        EngineError: it is here already, has ended, has an empty prompt, or does not fit.
    """
    if r.id in here:
        raise EngineError(f"rollout {r.id} is in the engine already; release it first")
    if not r.prompt.tokens:
        raise EngineError(f"prompt {r.prompt.id} has no tokens; put a start token before it")
    if r.finish or len(r) >= max_new_tokens:
        raise EngineError(
            f"rollout {r.id} has ended, at {len(r)} tokens; admit only those that go on"
        )
    needed = len(r.prompt.tokens) + max_new_tokens
    if longest is not None and needed > longest:
        raise EngineError(
            f"prompt {r.prompt.id} has {len(r.prompt.tokens)} tokens and may get "
            f"{max_new_tokens} more, but the model has positions for "
            f"{longest}; lower rollout.max_new_tokens or task.max_prompt_tokens"
        )


def check_transfer(r: Response, transfer: KVTransfer) -> None:
    """Refuse a transfer that is not the response's.

    Raises:
        EngineError: it is another rollout's, or covers more than the response has.
    """
    if transfer.rollout_id != r.id or transfer.cached_tokens >= r.total_tokens:
        raise EngineError(
            f"rollout {r.id} with {r.total_tokens} tokens came with the "
            f"transfer of rollout {transfer.rollout_id}, whose cache covers "
            f"{transfer.cached_tokens}; give each rollout its own transfer, and append "
            "every chunk before it moves"
        )
