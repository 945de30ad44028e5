"""Small models of several architectures, for pipeline tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.models.heads import critic_from_actor

VOCABULARY = 53


def language_model(kind: str, *, layers: int = 4, tied: bool = True, **settings: Any) -> Any:
    """A small causal language model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, **settings}
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def critic_of(actor: Any) -> Any:
    critic: Any = critic_from_actor(actor)
    nn.init.normal_(critic.score.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    return critic
