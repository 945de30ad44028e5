"""The shapes of models that are known without fetching anything, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    }


def _pythia(hidden: int, layers: int, heads: int, vocab: int = 50304) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
    }


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool) -> dict[str, Any]:
    return {
        **_llama(hidden, inner, layers, heads, kv, 151_936 if tied else 152_064),
        "model_type": "qwen2",
        "tie_word_embeddings": tied,
    }


_SMOLLM2_135M = {**_llama(576, 1536, 30, 9, 3, 49_152), "tie_word_embeddings": True}
_LLAMA_8B = _llama(4096, 14_336, 32, 32, 8, 128_256)
_LLAMA_70B = _llama(8192, 28_672, 80, 64, 8, 128_256)
_RHO_1B = _llama(2048, 5632, 22, 32, 4, 32_000)

_BY_NAME: Mapping[str, Mapping[str, Any]] = {
    "tiny": {**_llama(64, 192, 2, 4, 2, 259), "tie_word_embeddings": True},
    "tiny-2-heads": {**_llama(64, 192, 2, 2, 1, 259), "tie_word_embeddings": True},
    "smollm2-135m": _SMOLLM2_135M,
    "EleutherAI/pythia-410m-deduped": _pythia(1024, 24, 16),
    "EleutherAI/pythia-1b-deduped": _pythia(2048, 16, 8),
    "EleutherAI/pythia-2.8b-deduped": _pythia(2560, 32, 32),
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": _pythia(2048, 16, 8),
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": _pythia(2048, 16, 8),
    "huggyllama/llama-7b": _llama(4096, 11_008, 32, 32, 32, 32_000),
    "huggyllama/llama-13b": _llama(5120, 13_824, 40, 40, 40, 32_000),
    "huggyllama/llama-30b": _llama(6656, 17_920, 60, 52, 52, 32_000),
    "huggyllama/llama-65b": _llama(8192, 22_016, 80, 64, 64, 32_000),
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_70B,
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": _LLAMA_8B,
    "microsoft/rho-math-1b-v0.1": _RHO_1B,
    "realtreetune/rho-1b-sft-GSM8K": _RHO_1B,
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(2048, 11_008, 36, 16, 2, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 18_944, 28, 28, 4, tied=False),
}


def known(name: str) -> Mapping[str, Any] | None:
    """The config of a model by its name, or ``None`` where it is not among those known."""
    return _BY_NAME.get(name)
