"""Supervised runs: from settings to a run directory with a trained model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from stretto.tasks.responses import Example, PromptLayout
from stretto.tasks.supervised import (
    PairTokens,
    attempt,
    example_of,
    read_demonstrations,
    read_pairs,
    tokens_of,
)
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

    A run that is stopped after an update saves the model as it is then.

    Args:
        run_dir: where records and the model go.

    Raises:
        StrettoError: a setting, the model, the data or the numbers are at fault.
    """
    found = _prepare(config, progress, read_demonstrations, example_of, lambda e: len(e.tokens))
    model, held = found.model, found.held
    if config.model.lora_rank:
        model = add_lora(model, config.model, "CAUSAL_LM")
    objective = CrossEntropy.of(model, config)

    def measure() -> Stats:
        loss = objective.measure(held)
        return {"held_out/loss": loss, "held_out/perplexity": math.exp(loss)}

    run = _Run(config, model, found.tokenizer, run_dir, progress, measure if held else None)
    run.go(found.train, objective)
    loss, perplexity = (run.last.get(f"held_out/{name}") for name in ("loss", "perplexity"))
    if held:
        progress.note(f"held out: {loss:.4f} nats a token, perplexity {perplexity:.3f}")
    return SftResult(
        model=run_dir.model,
        steps=run.done,
        loss=run.last["train/loss"],
        held_out_loss=loss,
        perplexity=perplexity,
    )


def train_reward_model(
    config: RewardModelConfig, *, run_dir: RunDirectory, progress: Progress
) -> RewardModelResult:
    """Train a reward model on preferences, and save it.

    A run that is stopped after an update saves the model as it is then.

    Args:
        run_dir: where records and the model go.

    Raises:
        StrettoError: a setting, the model, the data or the numbers are at fault.
    """
    found = _prepare(config, progress, read_pairs, tokens_of, lambda p: p.longest)
    tokenizer, ends, held = found.tokenizer, found.ends, found.held
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
    measured: list[Preferences] = []

    def measure() -> Stats:
        measured.append(objective.measure(held))
        return measured[-1].stats("held_out")

    run = _Run(config, model, tokenizer, run_dir, progress, measure if held else None)
    run.go(found.train, objective)
    seen = "held_out" if measured else "train"
    if measured:
        progress.note(
            f"held out ({measured[-1].pairs} pairs): accuracy {measured[-1].accuracy:.4f}, margin "
            f"{measured[-1].margin:.4f}, mean reward {measured[-1].reward_mean:.4f}, "
            f"standard deviation {measured[-1].reward_std:.4f}"
        )
    return RewardModelResult(
        model=run_dir.model,
        steps=run.done,
        loss=run.last["train/loss"],
        held_out=measured[-1] if measured else None,
        reward_mean=run.last[f"{seen}/reward_mean"],
        reward_std=run.last[f"{seen}/reward_std"],
    )


@dataclass
class _Run:
    """The updates of a run, recorded.

    Attributes:
        measure: metrics of the held-out part, where there is one.
        done: updates taken.
        last: metrics of the last one.
    """

    config: SupervisedConfig
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    run_dir: RunDirectory
    progress: Progress
    measure: Callable[[], Stats] | None
    done: int = 0
    last: Stats = field(default_factory=dict)

    def go(self, rows: Sequence[T], objective: Objective[T]) -> None:
        """Measure, train, and save."""
        total = updates(self.config, len(rows))
        set_checkpointing(self.model, self.config.model)
        with Recorder(self.config, self.run_dir, self.progress, total=total) as recorder:
            if self.measure:
                with self.progress.working("measuring the held-out rows"):
                    recorder.step(0, self.measure())
            since_s = time.perf_counter()

            def after(step: int, metrics: Stats) -> None:
                nonlocal since_s
                took_s = time.perf_counter() - since_s
                self.done = step
                self.last = {
                    **metrics,
                    "timing_s/step": took_s,
                    "perf/throughput": metrics["data/tokens"] / took_s,
                    **(self.measure() if self.measure and self._due(step, total) else {}),
                }
                recorder.step(step, self.last)
                since_s = time.perf_counter()

            with saved_at_the_end(
                self.run_dir.model,
                lambda: save_model(self.model, self.tokenizer, self.run_dir.model),
                lambda: f"update {self.done}" if self.done else "",
                lambda: end_updates(self.model),
                recorder.note,
            ):
                train(self.model, rows, objective, self.config, after)

    def _due(self, step: int, total: int) -> bool:
        every = self.config.measure_every
        return step == total or bool(every and step % every == 0)


@dataclass(frozen=True, slots=True)
class _Prepared(Generic[T]):
    """A run's model and its data.

    Attributes:
        ends: tokens that end a response.
        train, held: tokenised rows to train on, and to measure on.
    """

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
        dropped: list[str]
        reasons: list[str]
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
    unused: list[str] = dropped + reasons
    if unused:
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
    """Return the rows of at most ``data.max_tokens`` tokens.

    A longer row would lose its end, and so could not show where a response ends, or why it is the
    better one.

    Raises:
        TaskError: all rows are longer.
    """
    kept = [row for row in rows if length(row) <= data.max_tokens]
    if not kept:
        raise TaskError(
            f"all {len(rows)} rows are longer than data.max_tokens = {data.max_tokens} (the "
            f"shortest has {min(map(length, rows))} tokens); raise that limit"
        )
    if len(kept) < len(rows):
        progress.note(
            f"{len(rows) - len(kept)} of {len(rows)} rows are longer than data.max_tokens = "
            f"{data.max_tokens} and left out"
        )
    return kept
