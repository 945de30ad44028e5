"""``stretto generate``: let a model answer prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import tyro
from pydantic import ValidationError

from stretto.checks import check_measured
from stretto.config import Config, ModelConfig, RolloutConfig
from stretto.errors import ConfigError
from stretto.observe.progress import on_stderr
from stretto.saying import CHECKING, LOADING, working

_MOST_AT_ONCE = 32


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
    asked = list(prompts) or _lines()
    if not asked:
        raise ConfigError("there is no prompt; give one, or lines on standard input")
    options = {
        "batch": min(len(asked), _MOST_AT_ONCE),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop,
    }
    try:
        rollout = RolloutConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":
            raise ConfigError(str(first["ctx"]["error"])) from error
        name = "--" + str(first["loc"][0]).replace("_", "-")
        rule = first["msg"].replace("Input should be", "must be")
        raise ConfigError(f"{name} {first['input']!r}: {rule}") from error

    config = ModelConfig(name=model, dtype=dtype, device=device)
    with working(on_stderr, CHECKING):
        check_measured(Config.model_construct(model=config), model, rows=False)
    with working(on_stderr, LOADING):
        from stretto.evaluation.answers import generate

    answers = generate(config, asked, rollout, seed=seed, chat=chat)
    for index, text in _in_order(answers):
        print(text if len(asked) == 1 else f"[{index + 1}] {text}", flush=True)


def _lines() -> list[str]:
    if sys.stdin.isatty():
        raise ConfigError("there is no prompt; give one, or lines on standard input")
    return [line.rstrip("\n") for line in sys.stdin if line.strip()]


def _in_order(answers: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Answers by the order of their prompts; one that came early waits for those before it."""
    waiting: dict[int, str] = {}
    turn = 0
    for index, text in answers:
        waiting[index] = text
        while turn in waiting:
            yield turn, waiting.pop(turn)
            turn += 1
