"""``stretto generate``: let a model answer prompts."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Literal

import tyro

from stretto.api.models import answers
from stretto.config import ModelConfig
from stretto.errors import ConfigError


def command(
    prompts: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PROMPT")] = (),
    /,
    model: str = "smollm2-135m",
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    seed: int = 0,
    chat: Literal["auto", "on", "off"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Let a model answer prompts, or the lines of standard input when none is given.

    Args:
        model: A known name, a local folder in Hugging Face format, a hub name, or a run's folder.
        temperature: Softmax temperature; 0 is greedy.
        top_k: Sample among the k likeliest tokens; 0 is off.
        top_p: Sample among the likeliest tokens that hold this much probability; 1 is off.
        stop: A string that ends an answer, besides the end-of-sequence token; may be repeated.
        chat: Apply the tokenizer's chat template. auto: where the tokenizer has one.
        dtype: Type to compute in. auto: bfloat16 where the hardware is faster in it, else float32.
        device: Device to compute on. auto: cuda when there is one.
    """
    asked = list(prompts)
    if not asked and not sys.stdin.isatty():
        asked = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not asked:
        raise ConfigError("there is no prompt; give one, or lines on standard input")
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop,
    }
    config = ModelConfig(name=model, dtype=dtype, device=device)
    try:
        for index, text in enumerate(answers(config, asked, options, seed=seed, chat=chat)):
            print(text if len(asked) == 1 else f"[{index + 1}] {text}", flush=True)
    except ConfigError as error:
        if (message := str(error)).startswith("options: "):
            message = re.sub(r"(\w+) = (\S+): ", _as_option, message.removeprefix("options: "))
        raise ConfigError(message, error.code) from error


def _as_option(match: re.Match[str]) -> str:
    return f"--{match[1].replace('_', '-')} {match[2]}: "
