"""Supervised runs: from settings to a run directory with a trained model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.models import prepare_torch
from stretto.config import RewardModelConfig, RowsConfig, SftConfig, SupervisedConfig
from stretto.errors import TaskError
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.forward import text_config, unwrapped
from stretto.models.heads import reward_model_from, set_padding
from stretto.models.load import (
    end_token_ids,
    load_causal_lm,
    load_tokenizer,
    save_model,
    set_checkpointing,
)
from stretto.models.lora import add_lora
from stretto.models.resolve import resolve
from stretto.observe import Progress, Recorder, RunDirectory
from stretto.runs.ending import saved_at_the_end
from stretto.saying import Saying
from stretto.tasks.conversations import example_of, read_demonstrations
from stretto.tasks.pairs import PairTokens, read_pairs, tokens_of
from stretto.tasks.responses import Example, PromptLayout, attempt
from stretto.training.supervised import (
    BradleyTerry,
    CrossEntropy,
    Objective,
    Preferences,
    hold_out,
    train,
    updates,
)
from stretto.training.trained import end_updates
from stretto.types import Stats

T = TypeVar("T", Example, PairTokens)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SftResult:
    """The outcome of supervised fine-tuning.

    Attributes:
        model: folder of the trained model, in Hugging Face format.
        steps: updates taken.
        loss: of the last update's batch, before that update; nats a learned token.
        held_out_loss: at the end, likewise; ``None`` where nothing was held out.
        perplexity: its exponential.
    """

    model: Path
    steps: int
    loss: float
    held_out_loss: float | None
    perplexity: float | None


@dataclass(frozen=True, slots=True)
class RewardModelResult:
    """The outcome of a reward model's training.

    Attributes:
        model: folder of the reward model, a sequence classifier with one label.
        steps: updates taken.
        loss: of the last update's batch, before that update; nats a pair.
        held_out: metrics of the pairs held out, at the end; ``None`` without any.
        reward_mean: mean of its rewards on the pairs held out, or without any on the last update's
            batch.
        reward_std: their standard deviation.
    """

    model: Path
    steps: int
    loss: float
    held_out: Preferences | None
    reward_mean: float
    reward_std: float


def sft(config: SftConfig, *, run_dir: RunDirectory, progress: Progress) -> SftResult:
    """Fine-tune a language model on demonstrations, and save it.

    A run that is stopped after an update saves the model as it is then. Raises a StrettoError if a
    setting, the model, the data or the numbers are at fault.

    Args:
        run_dir: where records and the model go.
    """
    found = _prepare(config, progress, read_demonstrations, example_of, lambda e: len(e.tokens))
    model = found.model
    if config.model.lora_rank:
        model = add_lora(model, config.model, "CAUSAL_LM")
    objective = CrossEntropy.of(model, config)

    def measure() -> Stats:
        loss = objective.measure(found.held)
        return {"held_out/loss": loss, "held_out/perplexity": math.exp(loss)}

    steps, last = _take_updates(config, model, found, objective, measure, run_dir, progress)
    loss, perplexity = (last.get(f"held_out/{name}") for name in ("loss", "perplexity"))
    if found.held:
        progress.note(f"held out: {loss:.4f} nats a token, perplexity {perplexity:.3f}")
    return SftResult(run_dir.model, steps, last["train/loss"], loss, perplexity)


def train_reward_model(
    config: RewardModelConfig, *, run_dir: RunDirectory, progress: Progress
) -> RewardModelResult:
    """Train a reward model on preferences, and save it; otherwise as :func:`sft`."""
    found = _prepare(config, progress, read_pairs, tokens_of, lambda p: p.longest)
    tokenizer, ends = found.tokenizer, found.ends
    model = reward_model_from(found.model, config.seed)
    if ends:  # a classifier is saved without a generation config, which may alone have named them
        for part in (unwrapped(model).config, text_config(model)):
            part.eos_token_id = sorted(ends)
    if not set_padding(model, tokenizer, ends):
        progress.note(
            "the tokenizer has no special token that could pad beside the end of a response; "
            "transformers will score the saved model one sequence at a time"
        )
    if config.model.lora_rank:
        model = add_lora(model, config.model, "SEQ_CLS")
    objective = BradleyTerry.of(model, config)
    held_out: Preferences | None = None

    def measure() -> Stats:
        nonlocal held_out
        held_out = objective.measure(found.held)
        return held_out.stats("held_out")

    steps, last = _take_updates(config, model, found, objective, measure, run_dir, progress)
    if held_out:
        progress.note(
            f"held out ({held_out.pairs} pairs): accuracy {held_out.accuracy:.4f}, margin "
            f"{held_out.margin:.4f}, mean reward {held_out.reward_mean:.4f}, "
            f"standard deviation {held_out.reward_std:.4f}"
        )
    seen = "held_out" if held_out else "train"
    return RewardModelResult(
        model=run_dir.model,
        steps=steps,
        loss=last["train/loss"],
        held_out=held_out,
        reward_mean=last[f"{seen}/reward_mean"],
        reward_std=last[f"{seen}/reward_std"],
    )


def _take_updates(
    config: SupervisedConfig,
    model: nn.Module,
    found: _Prepared[T],
    objective: Objective[T],
    measure: Callable[[], Stats],
    run_dir: RunDirectory,
    progress: Progress,
) -> tuple[int, Stats]:
    """Measure, train, record and save; return the updates taken, and metrics of the last one.

    Args:
        measure: returns metrics of the rows held out; called where there are any.
    """
    total, every = updates(config, len(found.train)), config.measure_every
    done = 0
    last: Stats = {}
    set_checkpointing(model, config.model)
    with Recorder(config, run_dir, progress, total=total) as recorder:
        if found.held:
            with progress.working("measuring the held-out rows"):
                recorder.step(0, measure())
        since_s = time.perf_counter()

        def after(step: int, metrics: Stats) -> None:
            nonlocal done, last, since_s
            took_s = time.perf_counter() - since_s
            due = found.held and (step == total or (every and step % every == 0))
            done = step
            last = {
                **metrics,
                "timing_s/step": took_s,
                "perf/throughput": metrics["data/tokens"] / took_s,
                **(measure() if due else {}),
            }
            recorder.step(step, last)
            since_s = time.perf_counter()

        with saved_at_the_end(
            run_dir.model,
            lambda: save_model(model, found.tokenizer, run_dir.model),
            lambda: f"update {done}" if done else "",
            lambda: end_updates(model),
            recorder.note,
        ):
            train(model, found.train, objective, config, after)
    return done, last


@dataclass(frozen=True, slots=True)
class _Prepared(Generic[T]):
    """A run's model, the tokens that end a response, and tokenised rows to train and measure on."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    train: list[T]
    held: list[T]


def _prepare(
    config: SupervisedConfig,
    progress: Progress,
    read: Callable[[Any], tuple[list[R], list[str]]],
    tokenise: Callable[[R, PromptLayout], T],
    length: Callable[[T], int],
) -> _Prepared[T]:
    """Read the rows, load the model, and tokenise, filter and split the rows."""
    with progress.working(f"reading {config.data.name}"):
        rows, dropped = read(config.data)
    prepare_torch(config.seed, config.threads)
    m = config.model
    path, device = resolve(m.name, Saying(progress)), pick_device(m.device)
    with progress.working(f"loading {path}"):
        tokenizer = load_tokenizer(path, m.trust_remote_code)
        model = load_causal_lm(path, pick_dtype(m.dtype, device), device, m.trust_remote_code)
    ends = end_token_ids(model, tokenizer)
    layout = PromptLayout(tokenizer, ends, config.data)
    with progress.working("tokenising the rows"):
        made, reasons = attempt(rows, lambda row: tokenise(row, layout), config.data)
    if unused := dropped + reasons:
        progress.note(
            f"{len(unused)} of {len(rows) + len(dropped)} rows cannot be used and are left out; "
            f"the first: {unused[0]}"
        )
    if layout.found:
        progress.note(
            f"rows spell control tokens ({', '.join(sorted(layout.found))}), which are read as "
            "text; conversations are lists of messages, and every response gets its end by itself"
        )
    made = _fitting(made, length, config.data, progress)
    train, held = hold_out(made, lambda row: row.prompt, config.data.held_out, config.seed)
    progress.note(
        f"training on {len(train)} rows, {updates(config, len(train))} updates; "
        f"{len(held)} rows are held out"
    )
    return _Prepared(model, tokenizer, ends, train, held)


def _fitting(
    rows: Sequence[T], length: Callable[[T], int], data: RowsConfig, progress: Progress
) -> list[T]:
    """Return the rows of at most ``data.max_tokens`` tokens: a longer one would lose its end, and
    could not show where a response ends, or why it is the better one."""
    kept = [row for row in rows if length(row) <= data.max_tokens]
    if not kept:
        raise TaskError(
            f"all {len(rows)} rows are longer than data.max_tokens = {data.max_tokens} (the "
            f"shortest has {min(map(length, rows))} tokens); raise that limit",
            "all-rows-too-long",
        )
    if len(kept) < len(rows):
        progress.note(
            f"{len(rows) - len(kept)} of {len(rows)} rows are longer than data.max_tokens = "
            f"{data.max_tokens} and left out"
        )
    return kept
