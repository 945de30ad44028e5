"""How many tokens a sequence may have, by a model's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FOLLOWING = ("longrope", "dynamic")


def longest_sequence(config: Any) -> int:
    """The positions that a model has, up to which its frequencies do not follow the sequence.

    Args:
        config: of the text decoder.
    """
    limit = getattr(config, "max_position_embeddings", None)
    longest = int(limit) if limit else 1 << 62
    for rope in _ropes(config):
        if rope.get("rope_type") in _FOLLOWING:
            longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def following_frequencies(config: Any) -> str:
    """The kind of frequencies that follow the longest sequence of a batch; empty without any."""
    kinds = (str(rope.get("rope_type")) for rope in _ropes(config))
    return next((kind for kind in kinds if kind in _FOLLOWING), "")


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of rotary embeddings: of all layers, or of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    yield rope
    yield from (part for part in rope.values() if isinstance(part, Mapping))
