"""Measures of a policy's responses to prompts that training leaves out.

Rows are distinguished by their content (:mod:`stretto.tasks.task`), never by seed or index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import fmean
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto import outside, tasks
from stretto.assembly.environments import open_environment
from stretto.assembly.parts import ANSWERS_FROM, open_prompts
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import NO_OVERRIDES, Overrides, load_actor, prepare_torch
from stretto.bounds import ceil_div
from stretto.config import ENVIRONMENT, Config, ModelConfig, RowsConfig, TaskConfig
from stretto.config.sections import reward_source
from stretto.config.training_config import token_budget
from stretto.errors import ConfigError, TaskError
from stretto.evaluation import gold
from stretto.evaluation.episode_generation import played
from stretto.evaluation.generation import answer, open_engine
from stretto.evaluation.gold import Gold, WinRate, reference_text, score_all, standard_error
from stretto.evaluation.llm_judge import Judgement, LlmJudge, open_judge
from stretto.models.backend import pick_device
from stretto.models.forward import microbatches, output_head, response_hidden, response_tokens
from stretto.models.load import load_tokenizer
from stretto.models.logits import token_logprobs
from stretto.models.resolve import resolve
from stretto.observe.progress import on_stderr
from stretto.saying import silent
from stretto.schedules.rollout import Rollout
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.response_buffer import response_text
from stretto.scoring.streaming import CodeScorer
from stretto.tasks.encode import same_tokenizer
from stretto.tasks.prompts import PromptSource, all_too_long
from stretto.tasks.responses import PromptLayout
from stretto.tasks.tables import format_of
from stretto.tasks.task import RIGHT, content, is_held_out
from stretto.types import FinishReason, Prompt, sampled_of

SEED = 1000
"""Added to the seed of a procedural task, so that an evaluation draws its own rows. These may
repeat training's questions. Only ``task.held_out`` keeps a prompt out of training."""

PATIENCE = 2000
"""Rows of a procedural task (over the share held out) without a new prompt, after which there are
assumed to be none. The probability to miss one of 200 equally frequent prompts is 4e-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Facts about the responses of an evaluation.

    Attributes:
        rows: their source: a file, a hub dataset and its split, or a procedural task and its seed.
        samples: number of responses.
        skipped: rows with prompts above ``task.max_prompt_tokens``, or refused by the template.
        mean_tokens: of a response.
        ended: share of the responses that ended before the token limit.
        distinct: different prompts among those of the responses.
        overlap: share of the prompts that also occur in training, if known.
        seen: the same in words.
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
    """Greedy answers, one per prompt, scored by the verifier.

    Attributes:
        pass_at_1: share of right answers, which have full credit.
        pass_at_1_standard_error: sqrt(p (1 - p) / n).
        mean_score: including partial credit.
        mean_score_standard_error: of that mean.
        timeouts: answers that count as wrong because they could not be compared in time.
    """

    pass_at_1: float
    pass_at_1_standard_error: float
    mean_score: float
    mean_score_standard_error: float
    timeouts: int = 0


@dataclass(frozen=True, slots=True)
class KlToSft:
    """A policy's drift from an SFT model, measured on the policy's samples.

    Attributes:
        sft: the SFT model.
        perplexity: of the SFT model on the samples, at temperature 1: exp of the mean negative
            log-likelihood of a response token (the KL measure of Noukhovitch et al. 2024).
        kl: mean over responses of log pi(y) - log pi_sft(y), in nats per response, both at the
            sampling temperature. An unbiased estimate of the KL.
        standard_error: of ``kl``.
    """

    sft: str
    perplexity: float
    kl: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Sampled):
    """Results of an evaluation of sampled responses. Measures not requested are ``None``.

    Attributes:
        temperature: of sampling.
        win_rate: by the first source.
        win_rates: by each source, in the requested order.
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
    """Let a model answer prompts that training leaves out, once and greedily, and score them.

    With an environment an answer is an episode. The task's verifier scores it, or the environment's
    reward if ``reward.sources`` have the environment and not the task.

    The arguments are those of :func:`stretto.api.inference.evaluate`. ``trained`` are the settings
    of the model's training, past or future, by default ``config``.

    Raises TaskError without a verifier or prompts, RewardError if the verifier failed on an answer,
    and ModelError if the model cannot be loaded.
    """
    greedy = config.rollout.model_copy(update={"temperature": 0.0, "samples_per_prompt": 1})
    settings = measured_on(config).with_model(model).model_copy(update={"rollout": greedy})
    with ExitStack() as stack:
        prepare_torch(settings.seed, settings.threads)
        source = open_prompts(settings, NO_OVERRIDES, on_stderr)
        columns = source.task.first.data.keys()
        factory, tokenizer = RoleFactory(settings, on_stderr), source.tokenizer
        verifier, sources = None, settings.reward.sources
        if "task" in sources or ENVIRONMENT not in sources:
            if column := source.task.found_answers:
                on_stderr(f"{ANSWERS_FROM} '{column}', as task.columns names no answer")
            verifier = gold.open_gold("task", factory, columns, tokenizer, stack)
        environment = open_environment(settings, source, stack, on_stderr)
        prompts, facts = questions(source, samples, trained or config)
        engine, _ = open_engine(settings, tokenizer)
        if environment:
            episodes = played(engine, environment, prompts, settings)
            rollouts, scores = [e.last for e in episodes], [e.reward for e in episodes]
        else:
            rollouts, scores = answer(engine, prompts), []
        if verifier:
            scores = score_all(verifier, rollouts, greedy.batch)
    passes = [float(score >= RIGHT) for score in scores]
    return EvalResult(
        **facts,
        **_sampled(rollouts),
        pass_at_1=fmean(passes),
        pass_at_1_standard_error=standard_error(passes, rate=True),
        mean_score=fmean(scores),
        mean_score_standard_error=standard_error(scores),
        timeouts=verifier.timeouts if isinstance(verifier, FunctionScorer) else 0,
    )


@outside.named_by("win_rate_by")
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

    Responses are sampled at ``rollout.temperature``. Likely mistakes are checked first.

    The arguments are those of :func:`stretto.api.inference.measure`, and ``trained`` is as in
    :func:`evaluate`. All sources of a win-rate score the same responses.

    Raises ConfigError for a KL of greedy responses, or an SFT model with another tokenizer,
    TaskError without reference responses, RewardError or JudgeError if a source or the judge
    failed, and ModelError if a model cannot be loaded.
    """
    if config.environment.sources:
        raise ConfigError(
            "win-rates and the KL are measured on responses of one turn, and environment.sources "
            "has tools or an environment; leave it empty to measure the policy without them",
            "measure-with-environment",
        )
    sources = ((by,) if by else ()) if isinstance(by, str) else tuple(by)
    settings = measured_on(config).with_model(policy)
    r = settings.rollout
    trust = settings.model.trust_remote_code
    limit = settings.training.microbatch_tokens
    with ExitStack() as stack:
        prepare_torch(settings.seed, settings.threads)
        source = open_prompts(settings, NO_OVERRIDES, on_stderr)
        tokenizer, task = source.tokenizer, source.task
        ends = gold.end_tokens_of(resolve(policy, on_stderr), tokenizer, trust)
        first = {**task.first.data, tasks.INDEX_KEY: task.indices[0]}
        if sources or judge:  # the other rows are not known yet
            reference_text(task, first, reference_column)
        if sft:
            _check_sft(sft, r.temperature, tokenizer, trust)
        ask = open_judge(judge) if judge else None
        factory, columns = RoleFactory(settings, on_stderr), task.first.data.keys()
        golds = {s: gold.open_gold(s, factory, columns, tokenizer, stack, ends) for s in sources}
        prompts, facts = questions(source, samples, trained or config)
        rollouts, sums = _answers(settings, prompts, tokenizer, sums=bool(sft))
        texts = list[str]()
        if sources or judge:
            texts = [reference_text(task, x.prompt.data, reference_column) for x in rollouts]
        layout = PromptLayout(tokenizer, ends, RowsConfig()) if golds else None
        rates = _win_rates(golds, layout, rollouts, texts, r.batch) if layout else ()
        pairs = [
            (rollout.prompt, response_text(tokenizer, rollout.tokens, rollout.finish, r.stop), text)
            for rollout, text in zip(rollouts, texts, strict=False)
        ]
        return Measured(
            **facts,
            **_sampled(rollouts),
            temperature=r.temperature,
            win_rate=rates[0] if rates else None,
            win_rates=rates,
            kl=_drift(settings.with_model(sft).model, rollouts, sums, r.temperature, limit)
            if sft
            else None,
            judge=ask(pairs) if ask else None,
        )


def _sampled(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "samples": len(rollouts),
        "mean_tokens": fmean(r.sampled_tokens for r in rollouts),
        "ended": fmean(r.finish is FinishReason.STOP for r in rollouts),
    }


def _check_sft(
    sft: str, temperature: float, tokenizer: PreTrainedTokenizerBase, trust: bool
) -> None:
    if not temperature:
        message = "the KL needs samples, and `temperature = 0` is greedy; set it above 0"
        raise ConfigError(message, "kl-of-greedy-responses")
    if not same_tokenizer(load_tokenizer(resolve(sft, on_stderr), trust, on_stderr), tokenizer):
        raise ConfigError(
            f"the KL is a sum over tokens, and the SFT model '{sft}' has another tokenizer than "
            "the policy; give the model that the policy was trained from",
            "sft-of-other-tokenizer",
        )


def _win_rates(
    golds: Mapping[str, Gold],
    layout: PromptLayout,
    rollouts: list[Rollout],
    texts: list[str],
    batch: int,
) -> tuple[WinRate, ...]:
    references = [
        gold.as_rollout(r.id, r.prompt, layout.response(r.prompt, text))
        for r, text in zip(rollouts, texts, strict=True)
    ]
    return tuple(
        gold.compare(by, score_all(scorer, rollouts, batch), score_all(scorer, references, batch))
        for by, scorer in golds.items()
    )


def _answers(
    config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, sums: bool
) -> tuple[list[Rollout], list[float]]:
    """Return responses and, if requested, log-probs. Frees the policy for the SFT model."""
    engine, actor = open_engine(config, tokenizer)
    rollouts = answer(engine, prompts)
    del engine
    if not sums:
        return rollouts, []
    actor.to(pick_device(config.model.device))
    temperatures = (config.rollout.temperature,)
    (logprobs,) = _logprob_sums(actor, rollouts, temperatures, config.training.microbatch_tokens)
    return rollouts, logprobs


def _drift(
    sft: ModelConfig, rollouts: Sequence[Rollout], sums: list[float], temperature: float, limit: int
) -> KlToSft:
    """Return the KL of responses to the SFT model.

    Args:
        sums: the policy's log-probability of each, by the same forward pass as the SFT model's, so
            that rounding does not look like drift, as with a decoding engine's log-probabilities.
        limit: tokens of a micro-batch.
    """
    model = load_actor(sft, on_stderr)
    sums_at_one, sums_as_sampled = _logprob_sums(model, rollouts, (1.0, temperature), limit)
    kls = [policy - reference for policy, reference in zip(sums, sums_as_sampled, strict=True)]
    return KlToSft(
        sft=sft.name,
        perplexity=math.exp(-math.fsum(sums_at_one) / sum(r.sampled_tokens for r in rollouts)),
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
    """Return the log-probability of each response in nats, one list per temperature."""
    head = output_head(model)
    device = next(model.parameters()).device
    responses = [r.response() for r in rollouts]
    sums = [[0.0] * len(responses) for _ in temperatures]
    for indices in microbatches(responses, token_budget(microbatch_tokens, device)):
        part = [responses[i] for i in indices]
        hidden = response_hidden(model, part)
        tokens = response_tokens(part, hidden.device)
        for of_temperature, temperature in zip(sums, temperatures, strict=True):
            logprobs, _ = token_logprobs(head, hidden, tokens, temperature)
            by_response = logprobs.split([int(sampled_of(r).sum()) for r in part])
            for i, response_logprobs in zip(indices, by_response, strict=True):
                of_temperature[i] = response_logprobs.double().sum().item()
    return sums


def measured_on(config: Config) -> Config:
    """Return settings with which a task gives the rows of an evaluation."""
    task = config.task
    if task.is_procedural:
        return config.changed_in("task", size=0).model_copy(update={"seed": config.seed + SEED})
    if not task.held_out_rows:
        return config
    is_file = bool(format_of(task.held_out_rows))
    rows = {"name" if is_file else "split": task.held_out_rows, "size": 0, "held_out": 0.0}
    if is_file:
        rows["split"] = "train"
    return config.changed_in("task", **rows)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Prompts that a run is evaluated on during training."""

    prompts: Sequence[Prompt]
    facts: Mapping[str, Any]  # about them, from :func:`questions`
    verifier: CodeScorer | None  # if the rows are not the run's own, and 'task' is a reward source


def open_held_out(
    config: Config, overrides: Overrides, training: PromptSource, stack: ExitStack
) -> HeldOut:
    """Open the prompts of ``observe.eval_every``. ``training`` are the run's own prompts.

    Raises TaskError as :func:`questions`.
    """
    settings = measured_on(config)
    source = training
    verifier = None
    if settings is not config:
        task = None if config.task.held_out_rows else overrides.task
        task_overrides = replace(overrides, tokenizer=training.tokenizer, task=task, opened=None)
        source = open_prompts(settings, replace(task_overrides, looks_at=None), silent)
        if "task" in config.reward.sources:
            factory, columns = RoleFactory(settings, silent), source.task.first.data.keys()
            task_source = reward_source("task")
            verifier = factory.open_function(task_source, columns, source.tokenizer, stack, {})
    prompts, facts = questions(source, config.observe.eval_prompts, config, training)
    return HeldOut(prompts, facts, verifier)


def describe_rows(task: TaskConfig, seed: int) -> str:
    """Describe a task's rows for people."""
    if task.is_procedural:
        rows_text = f"{task.name}, seed {seed}"
    elif format_of(task.name):
        rows_text = task.name
    else:
        rows_text = f"{task.name}, split '{task.split}'"
    share = task.held_out_share
    return f"{rows_text}; the {share:.0%} of its prompts that are held out" if share else rows_text


def questions(
    source: PromptSource, count: int, trained: Config, training: PromptSource | None = None
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the first ``count`` prompts of an evaluation in its seeded order, and facts on them.

    A procedural task gives each prompt once, other tasks as often as it occurs. Raises TaskError if
    no row is held out, or if all prompts are longer than ``task.max_prompt_tokens``.

    Args:
        source: prompts of settings from :func:`measured_on`.
        trained: settings of the policy's training, past or future.
        training: the training prompts, if they are open.
    """
    task, rows = source.config, len(source.task)
    limit = task.max_prompt_tokens
    share = task.held_out_share
    procedural = task.is_procedural
    prompts = list[Prompt]()
    contents = list[str]()
    too_long = list[int]()
    errors = list[TaskError]()
    unique_contents = set[str]()
    last_new = 0
    patience = PATIENCE / (share or 1)
    for place in range(rows):
        if len(prompts) == count or (procedural and place - last_new > patience):
            break
        row = source.row_by_id(place)
        asks = content(row)
        if (share and not is_held_out(row, share)) or (procedural and asks in unique_contents):
            continue
        unique_contents.add(asks)
        last_new = place
        try:
            prompt = source.prompt_by_id(place)
        except TaskError as error:
            errors.append(error)
            continue
        if len(prompt.tokens) > limit:
            too_long.append(len(prompt.tokens))
        else:
            prompts.append(prompt)
            contents.append(asks)
    if too_long and not prompts:
        raise all_too_long(len(too_long), min(too_long), limit, with_tools=source.with_tools)
    if errors and not prompts:
        raise errors[0]
    if not prompts:
        raise TaskError(
            f"task.held_out = {share} holds out none of the {rows} rows of '{task.name}': too "
            "few prompts are different. Raise it, or name rows of their own",
            "none-held-out",
        )
    return prompts, {
        "rows": describe_rows(task, source.seed),
        "skipped": len(too_long) + len(errors),
        "distinct": len(set(contents)),
        **_overlap(contents, source, trained, training),
    }


def _overlap(
    contents: Sequence[str], source: PromptSource, trained: Config, training: PromptSource | None
) -> dict[str, Any]:
    """Count the prompts that training asks, including too long ones."""
    r, responses = trained.rollout, trained.steps * trained.rollout.batch + trained.most_in_flight
    try:
        if not trained.task.name:
            raise TaskError("the settings name no rows to train on")
        training = training or open_prompts(trained, Overrides(tokenizer=source.tokenizer), silent)
        sampled_ids = islice(training.ids(), ceil_div(responses, r.samples_per_prompt))
        warmup_ids = islice(training.ids(backwards=True), trained.warmup_examples)
        training_contents = {content(training.row_by_id(i)) for i in chain(sampled_ids, warmup_ids)}
    except TaskError as error:
        return {"overlap": None, "seen": f"not known: {error}"}
    overlap_count, total = sum(asks in training_contents for asks in contents), len(contents)
    overlap = overlap_count / total
    seen = f"none of {total} prompts is asked in training"
    if overlap_count:
        seen = f"{overlap_count} of {total} prompts ({overlap:.1%}) are asked in training"
    return {"overlap": overlap, "seen": seen}
