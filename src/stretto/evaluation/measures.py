"""Measures of a policy over one set of its responses.

Shapes: N response tokens of a micro-batch; T tokens of one response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stretto import tasks
from stretto.assembly.models import NO_OVERRIDES, load_actor, prepare_torch
from stretto.assembly.parts import open_prompts
from stretto.config import Config, RowsConfig
from stretto.config.training import token_budget
from stretto.errors import ConfigError
from stretto.evaluation import gold
from stretto.evaluation.answers import answer, of_model, open_engine
from stretto.evaluation.gold import Gold, WinRate, reference_text, score_all, standard_error
from stretto.evaluation.llm import Judgement, LlmJudge, open_judge
from stretto.evaluation.rows import measured_on, questions
from stretto.models.backend import pick_device
from stretto.models.forward import microbatches, output_head, response_hidden, response_tokens
from stretto.models.load import load_tokenizer
from stretto.models.logits import token_logprobs
from stretto.models.resolve import resolve
from stretto.observe.progress import on_stderr
from stretto.schedules.rollout import Rollout
from stretto.scoring.models import same_tokenizer
from stretto.scoring.responses import response_text
from stretto.tasks.base import RIGHT
from stretto.tasks.responses import PromptLayout
from stretto.types import FinishReason, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Facts about the responses of an evaluation.

    Attributes:
        rows: what was read: a file, a hub dataset and its split, or a procedural task and its seed.
        samples: responses of the policy.
        skipped: rows left out, as their prompts are longer than ``task.max_prompt_tokens``.
        mean_tokens: of a response.
        ended: share of the responses that ended before the token limit.
        distinct: different prompts among those of the responses.
        overlap: share of the prompts that training asks too; ``None`` where that is not known.
        seen: the overlap in words.
    """

    rows: str
    samples: int
    skipped: int
    mean_tokens: float
    ended: float
    distinct: int | None = None
    overlap: float | None = None
    seen: str = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult(Sampled):
    """Greedy answers, one to a prompt, scored.

    Attributes:
        pass_at_1: share of right answers: those with full credit from the verifier.
        pass_at_1_standard_error: sqrt(p (1 - p) / n).
        mean_score: mean of the verifier's scores, partial credit included.
    """

    pass_at_1: float
    pass_at_1_standard_error: float
    mean_score: float
    mean_score_standard_error: float


@dataclass(frozen=True, slots=True)
class KlToSft:
    """A policy's drift from an SFT model, measured on the policy's samples.

    Attributes:
        sft: the model.
        perplexity: of the SFT model on the samples, at temperature 1: exp of the mean negative
            log-likelihood of a response token (what Noukhovitch et al. 2024 measure the KL by).
        kl: mean over responses of log pi(y) - log pi_sft(y), in nats a response, both at the
            sampling temperature: an unbiased estimate of the KL.
        standard_error: of the KL.
    """

    sft: str
    perplexity: float
    kl: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Sampled):
    """Results of an evaluation of sampled responses; ``None`` for measures that were not asked for.

    Attributes:
        temperature: of sampling.
        win_rate: by the first source that was asked for.
        win_rates: by each source, in the order asked for.
        kl: distance from the model that the policy was trained from.
        judge: verdicts of an LLM.
    """

    temperature: float
    win_rate: WinRate | None = None
    win_rates: tuple[WinRate, ...] = ()
    kl: KlToSft | None = None
    judge: Judgement | None = None


def evaluate(
    config: Config, *, model: str, samples: int, trained: Config | None = None
) -> EvalResult:
    """Let a model answer prompts that training leaves out, one greedy answer each, and judge them.

    Args:
        model: a known name, a folder, or a hub name.
        samples: prompts, at most.
        trained: settings that the model was trained with, or is to be; without them ``config``.

    Raises:
        TaskError: the task has no verifier, or no prompts to ask.
        RewardError: the verifier failed on an answer.
        ModelError: the model cannot be loaded.
    """
    greedy = config.rollout.model_copy(update={"temperature": 0.0, "samples_per_prompt": 1})
    read = of_model(measured_on(config), model).model_copy(update={"rollout": greedy})
    with ExitStack() as stack:
        prepare_torch(read.seed, read.threads)
        source = open_prompts(read, NO_OVERRIDES, on_stderr)
        columns = source.task.row(0).data.keys()
        verifier = gold.open_gold("task", read, columns, source.tokenizer, stack)
        prompts, facts = questions(read, source, samples, trained or config)
        engine, _ = open_engine(read, source.tokenizer)
        rollouts = answer(engine, prompts)
        scores = score_all(verifier, rollouts, greedy.batch)
    right = [float(score >= RIGHT) for score in scores]
    return EvalResult(
        **facts,
        **_sampled(rollouts),
        pass_at_1=fmean(right),
        pass_at_1_standard_error=standard_error(right),
        mean_score=fmean(scores),
        mean_score_standard_error=standard_error(scores),
    )


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
        policy, samples, trained: as in :func:`evaluate`.
        by: gold reward for a win-rate, as in ``reward.sources``, or several of them; all score the
            same responses.
        sft: model for the KL.
        judge: LLM judge for a win-rate.
        reference_column: with the responses to win against; empty takes the task's own answers.

    Raises:
        ConfigError: a KL of greedy responses is asked for, or the SFT model has another tokenizer.
        TaskError: there are no reference responses.
        RewardError, JudgeError: a reward source or the judge failed.
        ModelError: a model cannot be loaded.
    """
    sources = ((by,) if by else ()) if isinstance(by, str) else tuple(by)
    read = of_model(measured_on(config), policy)
    r, trust = read.rollout, read.model.trust_remote_code
    with ExitStack() as stack:
        prepare_torch(read.seed, read.threads)
        source = open_prompts(read, NO_OVERRIDES, on_stderr)
        tokenizer, task = source.tokenizer, source.task
        ends = gold.end_tokens_of(resolve(policy, on_stderr), tokenizer, trust)
        first = task.row(0).data
        if sources or judge:  # the others are looked at when it is known which they are
            reference_text(task, {**first, tasks.INDEX_KEY: 0}, reference_column)
        if sft:
            _check_sft(sft, r.temperature, tokenizer, trust)
        ask = open_judge(judge) if judge else None
        golds = {s: gold.open_gold(s, read, first.keys(), tokenizer, stack, ends) for s in sources}
        prompts, facts = questions(read, source, samples, trained or config)
        own, sums = _answers(read, prompts, tokenizer, sums=bool(sft))
        texts = list[str]()
        if sources or judge:
            texts = [reference_text(task, each.prompt.data, reference_column) for each in own]
        rates = _win_rates(golds, own, texts, tokenizer, ends, r.batch)
        pairs = [
            (each.prompt, response_text(tokenizer, each.tokens, each.finish, r.stop), text)
            for each, text in zip(own, texts, strict=False)
        ]
        return Measured(
            **facts,
            **_sampled(own),
            temperature=r.temperature,
            win_rate=rates[0] if rates else None,
            win_rates=rates,
            kl=_drift(read, sft, own, sums) if sft else None,
            judge=ask(pairs) if ask else None,
        )


def _sampled(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "samples": len(rollouts),
        "mean_tokens": fmean(map(len, rollouts)),
        "ended": fmean(r.finish is FinishReason.STOP for r in rollouts),
    }


def _check_sft(
    sft: str, temperature: float, tokenizer: PreTrainedTokenizerBase, trust: bool
) -> None:
    if not temperature:
        raise ConfigError(
            "the KL is estimated from samples, and temperature 0 is greedy; give a --temperature "
            "above 0",
            "kl-of-greedy-responses",
        )
    if not same_tokenizer(load_tokenizer(resolve(sft, on_stderr), trust, on_stderr), tokenizer):
        raise ConfigError(
            f"the KL is a sum over tokens, and the SFT model '{sft}' has another tokenizer than "
            "the policy; give the model that the policy was trained from",
            "sft-of-other-tokenizer",
        )


def _win_rates(
    golds: Mapping[str, Gold],
    own: Sequence[Rollout],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int],
    batch: int,
) -> tuple[WinRate, ...]:
    """Return the policy's win-rate by each source, which reads responses and references whole."""
    if not golds:
        return ()
    layout = PromptLayout(tokenizer, ends, RowsConfig())
    given = [
        gold.as_rollout(r.id, r.prompt, layout.response(r.prompt, text))
        for r, text in zip(own, texts, strict=True)
    ]
    return tuple(
        gold.compare(by, score_all(scorer, own, batch), score_all(scorer, given, batch))
        for by, scorer in golds.items()
    )


def _answers(
    config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, sums: bool
) -> tuple[list[Rollout], list[float]]:
    """Return the policy's responses, and where asked their log-probabilities.

    The policy is then let go, which makes room for the SFT model.
    """
    engine, actor = open_engine(config, tokenizer)
    rollouts = answer(engine, prompts)
    del engine
    if not sums:
        return rollouts, []
    actor.to(pick_device(config.model.device))
    temperatures = (config.rollout.temperature,)
    (found,) = _logprob_sums(actor, rollouts, temperatures, config.training.microbatch_tokens)
    return rollouts, found


def _drift(config: Config, sft: str, rollouts: Sequence[Rollout], own: Sequence[float]) -> KlToSft:
    """Return the KL of responses to the SFT model.

    Args:
        own: the policy's log-probability of each. The same forward passes give the SFT model's, so
            that rounding does not look like drift, as it would against the log-probabilities of a
            decoding engine.
    """
    temperatures = (1.0, config.rollout.temperature)
    limit = config.training.microbatch_tokens
    model = load_actor(of_model(config, sft).model, on_stderr)
    at_one, as_sampled = _logprob_sums(model, rollouts, temperatures, limit)
    kls = [policy - reference for policy, reference in zip(own, as_sampled, strict=True)]
    return KlToSft(
        sft=sft,
        perplexity=math.exp(-math.fsum(at_one) / sum(map(len, rollouts))),
        kl=fmean(kls),
        standard_error=standard_error(kls),
    )


@torch.no_grad()
def _logprob_sums(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    temperatures: Sequence[float],
    microbatch_tokens: int,
) -> list[list[float]]:
    """Return the log-probability of each response in nats, one list a temperature."""
    head = output_head(model)
    device = next(model.parameters()).device
    responses = [r.response() for r in rollouts]
    sums = [[0.0] * len(responses) for _ in temperatures]
    for chosen in microbatches(responses, token_budget(microbatch_tokens, device)):
        part = [responses[i] for i in chosen]
        hidden = response_hidden(model, part)
        tokens = response_tokens(part, hidden.device)
        for of_temperature, temperature in zip(sums, temperatures, strict=True):
            logprobs, _ = token_logprobs(head, hidden, tokens, temperature)
            for i, own in zip(chosen, logprobs.split([len(r) for r in part]), strict=True):
                of_temperature[i] = own.double().sum().item()
    return sums
