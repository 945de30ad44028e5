"""The ``tiny`` model, a small untrained Llama with a byte tokenizer, for first tries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PAD = 256
_BOS = 257
_EOS = 258
_END = 260

_CHAT = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with tool calls in Hermes format."""


def make_tiny(folder: Path, seed: int = 0, heads: int = 4, *, chat: bool = False) -> None:
    """Write a Llama of 115,200 parameters, determined by the seed, and its tokenizer to ``folder``.
    vLLM's CPU kernels need two heads, of 32 dimensions each. With ``chat`` there are two more
    tokens, which start and end turns, and a chat template.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ends = _END if chat else _EOS
    config = LlamaConfig(
        vocab_size=261 if chat else 259,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=_PAD,
        bos_token_id=_BOS,
        eos_token_id=ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        pad_token_id=_PAD, bos_token_id=_BOS, eos_token_id=ends
    )
    model.save_pretrained(folder)
    byte_tokenizer(chat=chat).save_pretrained(folder)


def byte_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token i is the byte i, followed by <pad>, <bos> and <eos>. With
    ``chat`` it also has <|im_start|> and <|im_end|>, and a ChatML template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    vocabulary = {character: byte for byte, character in sorted(characters.items())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<pad>", "<bos>", "<eos>", *(("<|im_start|>", "<|im_end|>") if chat else ())]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in marks])
    fast_tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>" if chat else "<eos>",
    )
    if chat:
        fast_tokenizer.chat_template = _CHAT
    return fast_tokenizer
