"""Tokenizers of bytes with the control tokens and the chat templates of well-known families."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from stretto.environments.bridge import Bridge
from stretto.models.load import load_tokenizer
from stretto.models.tiny import byte_tokenizer
from stretto.tasks.encode import Encoder

TEMPLATES = Path(__file__).parent / "environments" / "templates"


class Family(NamedTuple):
    """The tokens of a family: its end of a turn, its other control tokens, its added words."""

    end: str
    control: tuple[str, ...]
    words: tuple[str, ...] = ()


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOOLS = ("<tool_call>", "</tool_call>")
_RESPONSES = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
FAMILIES = {
    "chatml": Family("<|im_end|>", _CHATML),
    "qwen2.5": Family("<|im_end|>", _CHATML, _TOOLS),
    "qwen3": Family("<|im_end|>", _CHATML, _TOOLS + _RESPONSES),
    "llama3": Family("<|eot_id|>", _LLAMA + _HEADERS),
    "llama3.1": Family("<|eot_id|>", _LLAMA + _HEADERS),
    "smollm2": Family("<|im_end|>", _CHATML),
    "smollm3": Family("<|im_end|>", _CHATML, _TOOLS + _RESPONSES),
    "gemma3": Family("<end_of_turn>", ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "mistral": Family("</s>", ("<s>", "</s>", *_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Computes {name}.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("multiply", "add")
]


@cache
def tokenizer_of(family: str, template: str | None = None) -> Any:
    """The tokenizer of a family, with its template or another one."""
    end, control, words = FAMILIES[family]
    tokenizer: Any = byte_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    tokenizer.eos_token = end
    first = control[0] if family in ("llama3", "llama3.1", "gemma3", "mistral") else None
    tokenizer.bos_token = first or tokenizer.bos_token
    tokenizer.chat_template = template or (TEMPLATES / f"{family}.jinja").read_text().rstrip("\n")
    return tokenizer


@cache
def bridge_of(family: str, *, tools: bool = True) -> Bridge:
    """The bridge of a family, with the tools or without."""
    return Bridge(Encoder(tokenizer_of(family)), TOOLS if tools else ())


def chatty(tiny_folder: Path, folder: Path) -> Path:
    """The tiny model with a chat template, in which its own tokens stand for ChatML's."""
    shutil.copytree(tiny_folder, folder)
    tokenizer: Any = load_tokenizer(folder)
    template = (TEMPLATES / "chatml.jinja").read_text().rstrip("\n")
    template = template.replace("<|im_start|>", "<bos>").replace("<|im_end|>", "<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
