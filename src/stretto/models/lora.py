"""LoRA adapters, through peft."""

from __future__ import annotations

import warnings
from typing import Literal

from torch import nn

from stretto.config import ModelConfig


def add_lora(
    model: nn.Module, config: ModelConfig, kind: Literal["CAUSAL_LM", "SEQ_CLS"]
) -> nn.Module:
    """Wrap a model in adapters of ``config.lora_rank`` (Hu et al. 2021); the rest is frozen.

    Adapters are float32 whatever the model's type. A fresh adapter changes nothing: its B matrix
    is zero.
    """
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets
    lora = LoraConfig(
        task_type=kind,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # peft divides by it: a float is fine
        lora_dropout=0.0,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        wrapped: nn.Module = get_peft_model(model, lora)
    return wrapped
