"""A response as the text that reward functions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from stretto.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
