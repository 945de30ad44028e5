"""Responses that a scorer of whole responses keeps until they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from stretto.errors import LifecycleError
from stretto.types import Chunk, FinishReason, Response, sampled_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Pending:
    """Responses that a scorer was told of, by rollout id; they grow chunk by chunk."""

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._responses: dict[int, Response] = {}

    def admit(self, responses: Sequence[Response]) -> None:
        """Learn of responses; tokens that one already has are kept."""
        self._responses.update((r.id, r) for r in responses)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Add tokens.

        Raises:
            LifecycleError: the rollout is unknown, has ended, or the chunk leaves a gap.
        """
        for chunk in chunks:
            known = self._responses.get(chunk.rollout_id)
            if known is None or known.finish or chunk.start != len(known):
                raise LifecycleError(
                    f"scorer '{self._scorer}' cannot take tokens {chunk.start} and on of rollout "
                    f"{chunk.rollout_id}: it was not admitted, has ended, or has a gap there"
                )
            mixed = known.sampled is not None or chunk.sampled is not None
            self._responses[known.id] = replace(
                known,
                tokens=np.concatenate([known.tokens, chunk.tokens]),
                version=chunk.version,
                finish=chunk.finish,
                sampled=np.concatenate([sampled_of(known), sampled_of(chunk)]) if mixed else None,
            )

    def __getitem__(self, rollout_id: int) -> Response:
        """A response as it is now."""
        return self._responses[rollout_id]

    def take(self, rollout_ids: Sequence[int]) -> list[Response]:
        """Hand out responses that have ended, and forget them.

        Raises:
            LifecycleError: one is unknown or has not ended; nothing is forgotten then.
        """
        for rollout_id in rollout_ids:
            known = self._responses.get(rollout_id)
            if known is None or known.finish is None:
                raise LifecycleError(
                    f"scorer '{self._scorer}' cannot score rollout {rollout_id}: it was not "
                    "admitted, or its last chunk has not come"
                )
        return [self._responses.pop(rollout_id) for rollout_id in rollout_ids]

    def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget responses; unknown ids are ignored."""
        for rollout_id in rollout_ids:
            self._responses.pop(rollout_id, None)


def response_text(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    finish: FinishReason | None,
    stop: Sequence[str] = (),
) -> str:
    """Decode a response without special tokens, cut before the stop string that ended it.

    Args:
        tokens: token ids of the response, the end-of-sequence token included if there is one.
        finish: why it ended; only a stopped response can have ended in a stop string.
        stop: the stop strings it was generated with.
    """
    text = cast(
        str,
        tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
    )
    if finish is not FinishReason.STOP:
        return text
    # A response ends with the first stop string it holds, so there is none before that one.
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(found)] if found else text


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
