"""Longest sequence that a model can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from stretto.models.forward import text_config

_FOLLOWING = ("longrope", "dynamic")


def positions(model: nn.Module, *, generating: bool = False) -> int | None:
    """Tokens that a sequence of this model may have; ``None`` where its config sets no limit.

    Args:
        model: of transformers, with or without adapters, or its text decoder.
        generating: whether its keys and values are kept while the sequence grows.
    """
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    limits = [limit] if limit and limit > 0 else []
    for name, table in model.named_modules():
        # RoBERTa's kind counts positions from behind the padding token's id.
        is_table = isinstance(table, nn.Embedding) and name.endswith("position_embeddings")
        if is_table and table.padding_idx is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    if generating:  # beyond these the frequencies follow the longest sequence in the batch
        following = (rope for rope in _ropes(config) if rope.get("rope_type") in _FOLLOWING)
        limits += filter(None, (r.get("original_max_position_embeddings") for r in following))
    return min(map(int, limits), default=None)


def following_frequencies(config: Any) -> str:
    """The kind of frequencies that follow the longest sequence of a batch; empty without any."""
    kinds = (str(rope.get("rope_type")) for rope in _ropes(config))
    return next((kind for kind in kinds if kind in _FOLLOWING), "")


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    yield rope
    yield from (part for part in rope.values() if isinstance(part, Mapping))
