"""Supervised training runs: from settings to a run directory with a trained model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from stretto.assembly.run_models import load_actor, prepare_torch
from stretto.config import RewardModelConfig, SftConfig, SupervisedConfig
from stretto.errors import TaskError
from stretto.models import load
from stretto.models.forward import text_config, unwrapped
from stretto.models.heads import reward_model_from, set_padding
from stretto.models.lora import add_lora
from stretto.models.resolve import adapter_folder, resolve
from stretto.observe import Progress, Recorder, RunDirectory
from stretto.observe.card import write_card
from stretto.observe.notebook import html_of
from stretto.runs.ending import saved_at_the_end
from stretto.tasks.responses import Example, PromptLayout
from stretto.tasks.supervised_rows import (
    PairTokens,
    attempt,
    example_of,
    read_demonstrations,
    read_pairs,
    tokens_of,
)
from stretto.training import supervised
from stretto.training.supervised import BradleyTerry, CrossEntropy, Preferences
from stretto.training.trained import end_updates
from stretto.types import Stats

T = TypeVar("T", Example, PairTokens)
R = TypeVar("R")


class _Shown:
    """Shows a result in notebooks with its curves."""

    __slots__ = ()
    model: Path
    steps: int

    def _repr_html_(self) -> str:
        run = RunDirectory(self.model.parent)
        return html_of(run.path, f"{self.steps} updates", run.read_metrics(), self.model)


@dataclass(frozen=True, slots=True)
class SftResult(_Shown):
    """Outcome of supervised fine-tuning.

    Attributes:
        model: folder of the trained model, in Hugging Face format.
        steps: number of updates.
        loss: on the last update's batch, before that update, in nats per learned token.
        held_out_loss: final loss on the held-out rows, ``None`` without any.
        perplexity: exponential of ``held_out_loss``.
    """

    model: Path
    steps: int
    loss: float
    held_out_loss: float | None
    perplexity: float | None


@dataclass(frozen=True, slots=True)
class RewardModelResult(_Shown):
    """Outcome of reward model training.

    Attributes:
        model: folder of the reward model, a sequence classifier with one label.
        steps: number of updates.
        loss: on the last update's batch, before that update, in nats per pair.
        held_out: final metrics on the held-out pairs, ``None`` without any.
        reward_mean: mean reward on the held-out pairs, or else on the last update's batch.
        reward_std: their standard deviation.
    """

    model: Path
    steps: int
    loss: float
    held_out: Preferences | None
    reward_mean: float
    reward_std: float


def sft(config: SftConfig, *, run_dir: RunDirectory, progress: Progress) -> SftResult:
    """Fine-tune a language model on demonstrations and save it, also if stopped after an update.
    Raises a StrettoError for invalid settings, models, data or numbers.
    """
    loop = _SupervisedLoop(
        config, progress, read_demonstrations, example_of, lambda e: len(e.tokens)
    )
    model = loop.model
    if config.model.lora_rank:
        model = add_lora(model, config.model, "CAUSAL_LM", adapter_folder(config.model.name))
    objective = CrossEntropy.of(model, config)

    def measure() -> Stats:
        loss = objective.measure(loop.held)
        return {"held_out/loss": loss, "held_out/perplexity": math.exp(loss)}

    last = loop.take_updates(model, objective.learn, measure, run_dir)
    loss, perplexity = (last.get(f"held_out/{name}") for name in ("loss", "perplexity"))
    if loop.held:
        progress.note(f"held out: {loss:.4f} nats a token, perplexity {perplexity:.3f}")
    return SftResult(run_dir.model, loop.done, last["train/loss"], loss, perplexity)


def train_reward_model(
    config: RewardModelConfig, *, run_dir: RunDirectory, progress: Progress
) -> RewardModelResult:
    """Train a reward model on preferences and save it, with errors as in :func:`sft`."""
    loop = _SupervisedLoop(config, progress, read_pairs, tokens_of, lambda p: p.longest)
    tokenizer, ends = loop.tokenizer, loop.ends
    model = reward_model_from(loop.model, config.seed)
    if ends:  # a classifier is saved without the generation config, perhaps their only source
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
        held_out = objective.measure(loop.held)
        return held_out.stats("held_out")

    last = loop.take_updates(model, objective.learn, measure, run_dir)
    if held_out:
        progress.note(
            f"held out ({held_out.pairs} pairs): accuracy {held_out.accuracy:.4f}, margin "
            f"{held_out.margin:.4f}, mean reward {held_out.reward_mean:.4f}, "
            f"standard deviation {held_out.reward_std:.4f}"
        )
    mean, std = (
        last[f"{'held_out' if held_out else 'train'}/reward_{name}"] for name in ("mean", "std")
    )
    return RewardModelResult(run_dir.model, loop.done, last["train/loss"], held_out, mean, std)


class _SupervisedLoop(Generic[T]):
    """Loads model and data of a supervised run, and runs its updates on ``rows``. ``held`` are held
    out. Both are tokenized.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        progress: Progress,
        read: Callable[[Any], tuple[list[R], list[str]]],
        tokenise: Callable[[R, PromptLayout], T],
        length: Callable[[T], int],
    ) -> None:
        self._config, self._progress = config, progress
        self.done = 0  # number of updates
        data = config.data
        m = config.model
        note = progress.note
        with progress.working(f"reading {data.name}"):
            rows, dropped = read(data)
        prepare_torch(config.seed, config.threads)
        path = resolve(m.name, progress)
        self.tokenizer = load.load_tokenizer(path, m.trust_remote_code, progress)
        self.model = load_actor(m, progress, merged=not isinstance(config, SftConfig))
        self.ends = load.end_token_ids(unwrapped(self.model), self.tokenizer)
        layout = PromptLayout(self.tokenizer, self.ends, data)
        with progress.working("tokenising the rows"):
            examples, reasons = attempt(rows, lambda row: tokenise(row, layout), data)
        if unused := dropped + reasons:
            note(
                f"{len(unused)} of {len(rows) + len(dropped)} rows cannot be used and are left "
                f"out; the first: {unused[0]}"
            )
        if layout.found:
            note(
                f"rows spell control tokens ({', '.join(sorted(layout.found))}), which are read as "
                "text; conversations are lists of messages, and every response gets its end by "
                "itself"
            )
        # A cut row would lose its end, which shows the end of the response or why it is better.
        limit = f"data.max_tokens = {data.max_tokens}"
        usable_rows = [row for row in examples if length(row) <= data.max_tokens]
        if not usable_rows:
            raise TaskError(
                f"all {len(examples)} rows are longer than {limit} (the shortest has "
                f"{min(map(length, examples))} tokens); raise that limit",
                "all-rows-too-long",
            )
        if n_long := len(examples) - len(usable_rows):
            note(f"{n_long} of {len(examples)} rows are longer than {limit} and left out")
        self.rows: list[T]
        self.held: list[T]
        self.rows, self.held = supervised.hold_out(
            usable_rows, lambda row: row.prompt, data.held_out, config.seed
        )
        self._total = supervised.updates(config, len(self.rows))
        note(
            f"training on {len(self.rows)} rows, {self._total} updates; {len(self.held)} rows are "
            "held out"
        )

    def take_updates(
        self,
        model: nn.Module,
        learn: Callable[[Sequence[T]], Stats],
        measure: Callable[[], Stats],
        run_dir: RunDirectory,
    ) -> Stats:
        """Train, record and save. Return the last metrics. ``measure`` reads held-out rows."""
        config, total = self._config, self._total
        last: Stats = {}
        load.set_checkpointing(model, config.model)
        with Recorder(config, run_dir, self._progress, total=total) as recorder:
            if self.held:
                with self._progress.working("measuring the held-out rows"):
                    recorder.step(0, measure())
            since_s = time.perf_counter()

            def after(step: int, metrics: Stats) -> None:
                nonlocal last, since_s
                step_s = time.perf_counter() - since_s
                interval, self.done = config.measure_every, step
                due = self.held and (step == total or (interval and step % interval == 0))
                last = {
                    **metrics,
                    "timing_s/step": step_s,
                    "perf/throughput": metrics["data/tokens"] / step_s,
                    **(measure() if due else {}),
                }
                recorder.step(step, last)
                since_s = time.perf_counter()

            with saved_at_the_end(
                run_dir.model,
                partial(self._save, model, run_dir),
                lambda: f"update {self.done}" if self.done else "",
                lambda: end_updates(model),
                recorder.note,
            ):
                supervised.train(model, self.rows, learn, config, after)
        return last

    def _save(self, model: nn.Module, run_dir: RunDirectory) -> None:
        load.save_model(model, self.tokenizer, run_dir.model)
        method = "sft" if isinstance(self._config, SftConfig) else "reward"
        write_card(run_dir, method, len(self.rows))
