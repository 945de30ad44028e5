"""Preference labels from a gold reward, for labelled pairs or new responses.

With labels of one source for all pairs, the experiment is controlled: the reward model is trained
on the gold reward's preferences, and the gold reward then judges the result (Gao et al. 2022,
section 2, and Noukhovitch et al. 2024 for TL;DR).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from stretto import files, outside
from stretto.assembly.parts import open_prompts
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import NO_OVERRIDES, prepare_torch
from stretto.config import Config, PairsConfig, RewardModelConfig
from stretto.config.sections import reward_source
from stretto.errors import ConfigError, TaskError
from stretto.evaluation.generation import answer, open_engine
from stretto.evaluation.gold import as_rollout, end_tokens_of, open_gold, score_all
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.models.tiny import byte_tokenizer
from stretto.observe.progress import on_stderr
from stretto.schedules.rollout import Rollout
from stretto.scoring.response_buffer import response_text
from stretto.tasks.encode import utf8
from stretto.tasks.messages import Answer, text_of_answer
from stretto.tasks.responses import PromptLayout
from stretto.tasks.supervised_rows import Pair, attempt, read_pairs
from stretto.tasks.tables import Row, of_row
from stretto.types import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class LabelResult:
    """Result of labelling: the file, and the counts of its rows.

    Attributes:
        by: the source of the labels.
        out: the file.
        read: rows, or prompts answered.
        kept: rows written.
        ties: left out, because both sides have the same score or text.
        empty: left out, because a side has no text (only for responses sampled here).
        unended: left out, because fewer than two responses ended before the token limit (likewise).
        flipped: kept rows whose label was reversed. ``None`` for responses sampled here.
    """

    by: str
    out: Path
    read: int
    kept: int
    ties: int
    empty: int = 0
    unended: int = 0
    flipped: int | None = None

    @property
    def agreement(self) -> float | None:
        """Share of the kept rows whose old label the source confirms."""
        return None if self.flipped is None else 1 - self.flipped / self.kept


@outside.named_by("by")
def label_pairs(
    config: RewardModelConfig, *, by: str, out: Path, timeout_s: float = 30.0
) -> LabelResult:
    """Label a preference file again. Its rows keep their columns.

    The sides of a row are swapped if the source says so. New columns are ``chosen_score``,
    ``rejected_score`` and ``flipped``.

    Args:
        config: ``data`` names the file and its columns, and how prompts become tokens, as for
            training a reward model. ``model`` has device and dtype.
        by: 'file.py:name' or 'model:NAME'. A function gets the bytes of a response as its tokens.
        timeout_s: of a function, for 32 responses.

    Raises ConfigError if the source or the output file cannot be used, TaskError if the data cannot
    be read, is not preference data, or has only ties, and RewardError if the source failed.
    """
    if reward_source(by).kind.verifies:
        raise ConfigError(
            "'task' verifies responses to a task's own prompts, and preference data has others; "
            "label with a function ('file.py:name') or a reward model ('model:NAME')",
            "task-labels-pairs",
        )
    _check_out(out, config.data.name)
    run = Config(seed=config.seed, threads=config.threads, model=config.model)
    run = run.changed_in("reward", timeout_s=timeout_s)
    prepare_torch(run.seed, run.threads)
    pairs, left_out = read_pairs(config.data)
    _say_left_out(left_out, config.data)
    tokenizer, layout = _tokens_for(by, config)
    readable, left_out = attempt(pairs, partial(_tokenised, layout), config.data)
    _say_left_out(left_out, config.data)
    rollouts: list[Rollout] = []  # as if they had been sampled
    for number, (pair, prompt, responses) in enumerate(readable):
        numbered_prompt = Prompt(number, prompt.tokens, prompt.text, prompt.messages, pair.data)
        for tokens in responses:
            rollouts.append(as_rollout(len(rollouts), numbered_prompt, tokens))
    columns = readable[0][0].data.keys()
    with ExitStack() as stack:
        gold = open_gold(by, RoleFactory(run, on_stderr), columns, tokenizer, stack)
        scores = iter(score_all(gold, rollouts, run.rollout.batch))
    outcomes = [
        _labelled(pair, (next(scores), next(scores)), config.data) for pair, _, _ in readable
    ]
    rows = [row for row in outcomes if row]
    _write(out, rows, len(outcomes), by)
    flips = sum(row["flipped"] for row in rows)
    return LabelResult(by, out, len(outcomes), len(rows), len(outcomes) - len(rows), flipped=flips)


@outside.named_by("by")
def label_responses(
    config: Config, *, policy: str, by: str, out: Path, prompts: int, per_prompt: int = 2
) -> LabelResult:
    """Let a policy answer a task's prompts, and label its responses to each.

    The best response to a prompt becomes ``chosen`` and the worst ``rejected``. Responses cut off
    by the token limit are left out, because a reader of the file would take them for complete.

    The arguments are those of :func:`stretto.api.inference.label_responses`.

    Raises ConfigError for an unusable source or output file, TaskError for only ties or unfinished
    responses, and RewardError if the source failed.
    """
    _check_out(out, config.task.name)
    config = config.with_model(policy)
    prepare_torch(config.seed, config.threads)
    source = open_prompts(config, NO_OVERRIDES, on_stderr)
    tokenizer, columns = source.tokenizer, source.task.first.data.keys()
    with ExitStack() as stack:
        gold = open_gold(by, RoleFactory(config, on_stderr), columns, tokenizer, stack)
        engine, _ = open_engine(config, tokenizer)
        rollouts = answer(engine, source.first(prompts), per_prompt)
        finished_rollouts = [r for r in rollouts if r.finish is FinishReason.STOP]
        scores = score_all(gold, finished_rollouts, config.rollout.batch)
    by_id = {r.id: score for r, score in zip(finished_rollouts, scores, strict=True)}
    pairs, left_out = [], Counter[str]()
    for _, group in groupby(rollouts, key=lambda r: r.group):
        responses = [r for r in group if r.id in by_id]
        outcome = _of_group(responses, by_id, tokenizer, config.rollout.stop)
        if isinstance(outcome, str):
            left_out[outcome] += 1
        else:
            pairs.append(outcome)
    total = len(pairs) + left_out.total()
    if left_out["unended"] == total:
        raise TaskError(
            f"none of {total} prompts got two responses that ended within rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}; raise that limit, or `samples`",
            "no-ended-responses",
        )
    _write(out, pairs, total, by)
    counts = (left_out[why] for why in ("ties", "empty", "unended"))
    return LabelResult(by, out, total, len(pairs), *counts)


def _of_group(
    responses: Sequence[Rollout],
    scores: Mapping[int, float],
    tokenizer: PreTrainedTokenizerBase,
    stop: Sequence[str],
) -> Row | Literal["ties", "empty", "unended"]:
    if len(responses) < 2:
        return "unended"
    texts = [response_text(tokenizer, r.tokens, r.finish, stop) for r in responses]
    pair = best_and_worst(texts, [scores[r.id] for r in responses])
    if pair is None:
        return "ties"
    if not (pair["chosen"].strip() and pair["rejected"].strip()):
        return "empty"
    prompt = responses[0].prompt
    return {"prompt": list(prompt.messages) if prompt.messages else prompt.text, **pair}


def best_and_worst(
    texts: Sequence[Answer],
    scores: Sequence[float],
    cells: Sequence[Any] = (),
    columns: tuple[str, str] = ("chosen", "rejected"),
) -> dict[str, Any] | None:
    """Return the best and the worst response, or their ``cells``. ``None`` if they are equal."""
    best = max(range(len(texts)), key=lambda i: scores[i])
    worst = min(range(len(texts)), key=lambda i: scores[i])
    if scores[best] == scores[worst] or texts[best] == texts[worst]:
        return None
    sides = [(cells or texts)[i] for i in (best, worst)]
    score_cells = {"chosen_score": scores[best], "rejected_score": scores[worst]}
    return {**dict(zip(columns, sides, strict=True)), **score_cells}


def _say_left_out(reasons: Sequence[str], data: PairsConfig) -> None:
    if reasons:
        on_stderr(f"{len(reasons)} rows of '{data.name}' left out; the first: {reasons[0]}")


def _tokens_for(
    by: str, config: RewardModelConfig
) -> tuple[PreTrainedTokenizerBase, PromptLayout | None]:
    source = reward_source(by)
    if not source.kind.is_model:
        return byte_tokenizer(), None
    path, trust = resolve(source.model, on_stderr), config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust, on_stderr)
    return tokenizer, PromptLayout(tokenizer, end_tokens_of(path, tokenizer, trust), config.data)


def _tokenised(
    layout: PromptLayout | None, pair: Pair
) -> tuple[Pair, Prompt, Sequence[Sequence[int]]]:
    """Return a pair in a reward model's tokens with a layout, or as bytes for functions."""
    responses = pair.chosen, pair.rejected
    with of_row(f"row {pair.index}"):
        if layout:
            prompt = layout.prompt(pair.prompt, data=pair.data, transcript=pair.transcript)
            return pair, prompt, [layout.response(prompt, r) for r in responses]
        messages = None if isinstance(pair.prompt, str) else pair.prompt
        turns = (f"{turn['role']}: {turn['content']}" for turn in messages or ())
        text = pair.prompt if isinstance(pair.prompt, str) else "\n\n".join(turns)
        prompt = Prompt(0, tuple(utf8(text)), text, messages)
        return pair, prompt, [tuple(utf8(text_of_answer(r))) for r in responses]


def _labelled(pair: Pair, scores: tuple[float, float], data: PairsConfig) -> Row | None:
    columns = data.chosen_column, data.rejected_column
    cells = [pair.data[column] for column in columns]
    sides = best_and_worst((pair.chosen, pair.rejected), scores, cells, columns)
    return sides and {**pair.data, **sides, "flipped": scores[1] > scores[0]}


def _check_out(out: Path, source: str) -> None:
    """Check early that the output file can be written, and is not the input."""
    if out.resolve() == Path(source).expanduser().resolve():
        message = f"`out = {out}` is the file that is read; write to another"
        raise ConfigError(message, "output-is-input")
    if not out.parent.is_dir() or out.is_dir():
        reason = "is a folder" if out.is_dir() else f"needs the folder '{out.parent}'"
        message = f"`out = {out}` {reason}; name a file in an existing folder"
        raise ConfigError(message, "no-output-file")


def _write(out: Path, rows: Sequence[Row], read: int, by: str) -> None:
    if not rows:
        raise TaskError(
            f"nothing is left to write: '{by}' prefers no side in any of {read} rows. Label with "
            "another source, or more rows",
            "only-ties",
        )
    try:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        with files.explained(out):
            out.write_text("".join(lines), encoding="utf-8")
    except (TypeError, UnicodeEncodeError) as error:
        raise TaskError(
            f"the data has values that JSON Lines cannot hold: {error}; drop that column",
            "values-beyond-json",
        ) from error
