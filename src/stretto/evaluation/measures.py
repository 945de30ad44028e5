"""All measures of one policy, over one set of its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto import tasks
from stretto.assembly.models import load_actor, prepare_torch
from stretto.config import Config, RowsConfig
from stretto.errors import ConfigError
from stretto.evaluation.answers import WholeScorer, answer, of_model
from stretto.evaluation.gold import (
    as_rollout,
    end_tokens_of,
    gold_scores,
    open_gold,
    reference_text,
)
from stretto.evaluation.kl import KlToSft, drift, logprob_sums, require_tokenizer
from stretto.evaluation.llm import JudgedPair, Judgement, LlmJudge, open_judge
from stretto.evaluation.rates import WinRate, compare
from stretto.evaluation.rows import measured_on, questions
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.observe.progress import on_stderr
from stretto.schedules.rollout import Rollout
from stretto.scoring.text import response_text
from stretto.tasks.responses import PromptLayout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of an evaluation; ``None`` for measures that were not asked for.

    Attributes:
        rows: what was read: a file, a hub dataset and its split, or a procedural task and its seed.
        samples: responses of the policy.
        skipped: rows left out, as their prompts are longer than ``task.max_prompt_tokens``.
        temperature: at which they were sampled.
        mean_tokens: response tokens.
        ended: share of the responses that ended before the token limit.
        win_rate: by the first source that was asked for.
        win_rates: by each source, in the order asked for.
        kl: distance from the model that the policy was trained from.
        judge: verdicts of an LLM.
        distinct: different prompts among those of the responses.
        overlap: share of the prompts that training asks too; ``None`` where that is not known.
        seen: the overlap in words.
    """

    rows: str
    samples: int
    skipped: int
    temperature: float
    mean_tokens: float
    ended: float
    win_rate: WinRate | None = None
    win_rates: tuple[WinRate, ...] = ()
    kl: KlToSft | None = None
    judge: Judgement | None = None
    distinct: int | None = None
    overlap: float | None = None
    seen: str = "not known"


def measure(
    config: Config,
    *,
    policy: str,
    samples: int,
    by: str | Sequence[str] = (),
    sft: str = "",
    judge: LlmJudge | None = None,
    reference_column: str = "",
    trained: Config | None = None,
) -> Measured:
    """Sample one response to each of ``samples`` held-out prompts, and measure them.

    Sampled at ``rollout.temperature``. What is quick to get wrong is looked at first.

    Args:
        policy: a known name, a folder, or a hub name.
        samples: prompts, at most.
        by: gold reward for a win-rate, as in ``reward.sources``, or several of them; all score the
            same responses.
        sft: model for the KL.
        judge: LLM judge for a win-rate.
        reference_column: with the responses to win against; empty takes the task's own answers.
        trained: settings that the policy was trained with, or is to be; without them ``config``.

    Raises:
        ConfigError: a KL of greedy responses is asked for, or the SFT model has another tokenizer.
        TaskError: there are no reference responses.
        RewardError, JudgeError: a reward source or the judge failed.
        ModelError: a model cannot be loaded.
    """
    sources = ((by,) if by else ()) if isinstance(by, str) else tuple(by)
    settings, config = config, of_model(measured_on(config), policy)
    with ExitStack() as stack:
        prepare_torch(config.seed, config.threads)
        path, trust = resolve(policy, on_stderr), config.model.trust_remote_code
        tokenizer = load_tokenizer(path, trust, on_stderr)
        ends = end_tokens_of(path, tokenizer, trust)
        task = tasks.load(config.task, config.seed, on_stderr)
        first = task.row(0).data
        if sources or judge:  # the others are looked at when it is known which they are
            reference_text(task, {**first, tasks.INDEX_KEY: 0}, reference_column)
        if sft:
            if not config.rollout.temperature:
                raise ConfigError(
                    "the KL is estimated from samples, and temperature 0 is greedy; give a "
                    "--temperature above 0"
                )
            require_tokenizer(sft, trust, tokenizer)
        ask = open_judge(judge) if judge else None
        golds = {s: open_gold(s, config, first.keys(), tokenizer, stack, ends) for s in sources}
        asked = questions(settings, task, tokenizer, samples, trained or settings)
        temperature, budget = config.rollout.temperature, config.training.microbatch_tokens
        actor = load_actor(config.model, on_stderr)
        answers, sums = answer(config, actor, tokenizer, asked.prompts), list[float]()
        if sft:
            sums = logprob_sums(actor, answers.rollouts, (temperature,), budget)[0]
        del actor  # which makes room for the SFT model
        own, texts = answers.rollouts, list[str]()
        if sources or judge:
            texts = [reference_text(task, r.prompt.data, reference_column) for r in own]
        rates = _win_rates(golds, own, texts, tokenizer, ends, config.rollout.batch)
        return Measured(
            rows=asked.rows,
            distinct=asked.distinct,
            overlap=asked.overlap,
            seen=asked.seen,
            samples=len(own),
            skipped=asked.skipped,
            temperature=temperature,
            mean_tokens=answers.mean_tokens,
            ended=answers.ended,
            win_rate=rates[0] if rates else None,
            win_rates=rates,
            kl=drift(of_model(config, sft).model, own, sums, temperature, budget) if sft else None,
            judge=ask(_pairs(own, texts, tokenizer, config.rollout.stop)) if ask else None,
        )


def win_rate(
    config: Config, *, policy: str, samples: int, by: str, reference_column: str = ""
) -> WinRate:
    """The win-rate alone; see :func:`measure`."""
    measured = measure(
        config, policy=policy, samples=samples, by=by, reference_column=reference_column
    )
    assert measured.win_rate
    return measured.win_rate


def kl_to_sft(config: Config, *, policy: str, samples: int, sft: str) -> KlToSft:
    """The drift from an SFT model alone; see :func:`measure`."""
    measured = measure(config, policy=policy, samples=samples, sft=sft)
    assert measured.kl
    return measured.kl


def judge(
    config: Config, *, policy: str, samples: int, by: LlmJudge, reference_column: str = ""
) -> Judgement:
    """An LLM judge's verdict alone; see :func:`measure`."""
    measured = measure(
        config, policy=policy, samples=samples, judge=by, reference_column=reference_column
    )
    assert measured.judge
    return measured.judge


def _win_rates(
    golds: Mapping[str, WholeScorer],
    own: Sequence[Rollout],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int],
    batch: int,
) -> tuple[WinRate, ...]:
    """The policy's responses against references; each source reads both, whole."""
    if not golds:
        return ()
    layout = PromptLayout(tokenizer, ends, RowsConfig())
    given = [
        as_rollout(r.id, r.prompt, layout.response(r.prompt, text))
        for r, text in zip(own, texts, strict=True)
    ]
    return tuple(
        compare(by, gold_scores(gold, by, own, batch), gold_scores(gold, by, given, batch))
        for by, gold in golds.items()
    )


def _pairs(
    own: Sequence[Rollout],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    stop: Sequence[str],
) -> list[JudgedPair]:
    return [
        JudgedPair(
            prompt=r.prompt,
            policy=response_text(tokenizer, r.tokens, r.finish, stop),
            reference=text,
        )
        for r, text in zip(own, texts, strict=True)
    ]
