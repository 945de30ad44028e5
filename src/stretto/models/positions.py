"""How long a sequence a model can read."""

from __future__ import annotations

from typing import Any

from torch import nn

from stretto.models.forward import unwrapped


def positions(model: nn.Module, *, generating: bool = False) -> int | None:
    """Tokens that a sequence of this model may have; ``None`` where its config sets no limit.

    Args:
        model: of transformers, with or without adapters.
        generating: whether its keys and values are kept while the sequence grows.
    """
    config: Any = unwrapped(model).config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    limits = [limit] if limit and limit > 0 else []
    for name, table in model.named_modules():
        # RoBERTa's kind counts positions from behind the padding token's id.
        is_table = isinstance(table, nn.Embedding) and name.endswith("position_embeddings")
        if is_table and table.padding_idx is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if generating and rope.get("rope_type") in ("longrope", "dynamic"):
        # Beyond these positions the frequencies follow the longest sequence in the batch.
        limits += filter(None, [rope.get("original_max_position_embeddings")])
    return min(map(int, limits), default=None)
