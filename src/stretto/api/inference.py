"""Evaluation, labelling and generation with trained models, from Python."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stretto.api.settings import Settings, changed, config_of, model_of, of_rows, trained_with
from stretto.checks import check_measured
from stretto.config import (
    Config,
    EnvironmentConfig,
    ModelConfig,
    RewardModelConfig,
    RolloutConfig,
    TaskConfig,
    recipes,
)
from stretto.config.sections import (
    ChatArguments,
    NonNegativeInt,
    PositiveInt,
    Rows,
    Seconds,
    Seed,
    Temperature,
    TopP,
)
from stretto.errors import ConfigError, require
from stretto.interfaces import in_python
from stretto.observe.progress import on_stderr
from stretto.saying import CHECKING, LOADING, working
from stretto.tasks import TaskRow
from stretto.tasks.messages import as_prompt

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from stretto.assembly.run_models import Overrides
    from stretto.evaluation import Benchmark, EvalResult, LabelResult, LlmJudge, Measured
    from stretto.evaluation.generation import Answer


@in_python
def evaluate(
    settings: Settings,
    *,
    model: str | Path = "",
    samples: Rows = 200,
    dataset: str | Path | None = None,
    **changes: Any,
) -> EvalResult:
    """Return pass@1 and the mean score of a model's greedy answers to a task's prompts, judged by
    the task's verifier, like plain ``stretto eval``. :func:`measure` has other metrics.

    Args:
        settings: As in :func:`train`. They name the task.
        model: Model to evaluate: a known name, a local folder, a hub name, or a run's folder.
            Default: the run's trained model, or the recipe's model before training.
        samples: Rows to answer. Default: 200.
        dataset: A file or a hub dataset that replaces the one in the settings.
        changes: as in :func:`train`.
    """
    config, model_name = _measured(settings, model, dataset, changes)
    trained = trained_with(model, settings, config)
    from stretto import evaluation

    return evaluation.evaluate(config, model=model_name, samples=samples, trained=trained)


@in_python
def measure(
    settings: Settings,
    *,
    model: str | Path = "",
    samples: Rows = 200,
    win_rate_by: str | Sequence[str] = (),
    sft: str | Path = "",
    judge: LlmJudge | None = None,
    reference_column: str = "",
    dataset: str | Path | None = None,
    **changes: Any,
) -> Measured:
    """Measure a model's sampled responses to a task's prompts, like ``stretto eval`` with the
    options of the same names. Several sources in ``win_rate_by`` give a win-rate each.

    Args:
        settings, model, samples, dataset, changes: as in :func:`evaluate`.
        win_rate_by: Win-rate against reference responses by this gold reward: 'model:NAME' (a
            reward model or the run of one), 'file.py:function', or 'task'.
        sft: KL to this model (the initial policy, or its run), and its perplexity on the samples.
        judge: An LLM judge for a win-rate.
        reference_column: Column with the reference responses: text, or a conversation that ends
            with the assistant's turn. Without it: the task's own answers.
    """
    sources = [win_rate_by] if isinstance(win_rate_by, str) else win_rate_by
    checks = {"sources": [s for s in sources if s], "sft": str(sft)}
    config, model_name = _measured(settings, model, dataset, changes, **checks)
    from stretto import evaluation

    return evaluation.measure(
        config,
        policy=model_name,
        samples=samples,
        by=win_rate_by,
        sft=str(sft),
        judge=judge,
        reference_column=reference_column,
        trained=trained_with(model, settings, config),
    )


@in_python
def label(
    data: str | Path | RewardModelConfig,
    *,
    by: str,
    out: str | Path,
    timeout_s: Seconds = 30.0,
    **changes: Any,
) -> LabelResult:
    """Label a preference file by a gold reward, like ``stretto label FILE``.

    Args:
        data: The file, or settings whose ``data`` names it.
        by: The gold reward: 'model:NAME' (a reward model or the run of one), 'file.py:function',
            or, with --responses-from, 'task'.
        out: File for the pairs, as JSON Lines.
        timeout_s: Time limit of a function for 32 responses, in seconds.
        changes: changes of those settings, as in :func:`train`.
    """
    with working(on_stderr, LOADING):
        from stretto.evaluation import label_pairs

    if not isinstance(data, RewardModelConfig):
        data = changed(RewardModelConfig(), {"data__name": str(data)})
    return label_pairs(changed(data, changes), by=by, out=Path(out), timeout_s=timeout_s)


@in_python
def label_responses(
    settings: Settings,
    *,
    by: str,
    out: str | Path,
    model: str | Path = "",
    prompts: Rows = 1000,
    per_prompt: Annotated[int, Field(ge=2, le=10**7)] = 2,
    dataset: str | Path | None = None,
    **changes: Any,
) -> LabelResult:
    """Label a model's responses to a task's prompts by a gold reward, like ``stretto label RECIPE
    --responses-from MODEL``.

    Args:
        settings, dataset, changes: As in :func:`evaluate`.
        by, out: As in :func:`label`. ``by`` may be 'task' too.
        model: Model that answers the recipe's prompts: a known name, a local folder, a hub name, or
            a run's folder.
        prompts: Limit of prompts to answer.
        per_prompt: Responses to each prompt. The best and the worst ended ones make a pair.
    """
    config, model_name = _measured(settings, model, dataset, changes, sources=[by])
    from stretto import evaluation

    return evaluation.label_responses(
        config, policy=model_name, by=by, out=Path(out), prompts=prompts, per_prompt=per_prompt
    )


@in_python
def benchmark(
    settings: Settings,
    tasks: Sequence[str],
    *,
    model: str | Path = "",
    limit: NonNegativeInt = 0,
    **changes: Any,
) -> list[Benchmark]:
    """Run benchmarks of lm-evaluation-harness, like ``stretto eval --lm-eval``.

    Args:
        settings, model, changes: as in :func:`evaluate`. Only settings of the model and
            ``rollout.batch`` have an effect.
        tasks: names that the harness knows, or .yaml files that define one.
        limit: Examples of each benchmark. 0 takes all.
    """
    require("lm_eval", "lm-eval", "stretto.benchmark")
    config, model_name = _measured(settings, model, None, changes, rows=False)
    from stretto import evaluation

    batch = config.rollout.batch
    return evaluation.benchmark(
        config.model, model=model_name, tasks=tasks, batch=batch, limit=limit
    )


@in_python
def generate(
    model: nn.Module | str | Path,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: PositiveInt = 256,
    temperature: Temperature = 1.0,
    top_k: NonNegativeInt = 0,
    top_p: TopP = 1.0,
    stop: Sequence[str] = (),
    seed: Seed = 0,
    chat: Literal["auto", "on", "off"] = "auto",
    system: str = "",
    template_arguments: ChatArguments | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> list[str]:
    """Return a model's answers to prompts, in their order, like ``stretto generate``.

    Raises ConfigError for an option out of range, ModelError for a missing model, and TaskError for
    a prompt that the model cannot read.

    Args:
        model: A known name, a local folder in Hugging Face format, a hub name, or a run's folder;
            or a model as an object, which is put into evaluation mode and needs its ``tokenizer``.
        prompts: Texts, or conversations as lists of messages.
        max_new_tokens: Token limit of an answer. With tools, of all turns and results.
        temperature: Softmax temperature. 0 is greedy.
        top_k: Sample among the k likeliest tokens. 0 is off.
        top_p: Sample among the likeliest tokens that hold this much probability. 1 is off.
        stop: A string that ends an answer, besides the end-of-sequence token; may be repeated.
        seed: Seed of the random numbers.
        system: A system message, put before every prompt. Needs a chat template.
        chat: Apply the tokenizer's chat template. auto: if the tokenizer has one.
        template_arguments: An argument of the chat template, for example enable_thinking=false; may
            be repeated.
        dtype: Type to compute in. auto: bfloat16 if the hardware is faster with it, else float32;
            the choice is printed. Greedy texts of the two may differ.
        device: Device to compute on. auto: cuda if there is one.
    """
    name, overrides = _opened(model, tokenizer)
    completions = answers(
        name,
        _rows_of(prompts),
        overrides=overrides,
        seed=seed,
        system=system,
        chat=chat,
        template_arguments=template_arguments,
        dtype=dtype,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=tuple(stop),
    )
    return [answer.text for answer in completions]


def _opened(
    model: nn.Module | str | Path, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, Overrides | None]:
    by_name = isinstance(model, str | Path)
    if by_name == (tokenizer is not None):
        raise ConfigError(
            "a model by name brings its tokenizer, and one that is an object needs it: give "
            "tokenizer= with objects alone",
            "tokenizer-of-object",
        )
    if isinstance(model, str | Path):
        return str(model), None
    from stretto.assembly.run_models import Overrides

    return type(model).__name__, Overrides(actor=model, tokenizer=tokenizer)


def _rows_of(prompts: Sequence[str | Sequence[Mapping[str, str]]]) -> list[TaskRow]:
    if isinstance(prompts, str) or not prompts:
        message = f"prompts must be a list with at least one text; got {prompts!r}"
        raise ConfigError(message, "prompts-not-list")
    for prompt in prompts:
        if not isinstance(prompt, str | Sequence):
            message = f"a prompt is text or a list of chat messages; got {prompt!r}"
            raise ConfigError(message, "prompt-not-text")
    return [TaskRow(p if isinstance(p, str) else as_prompt(list(p))) for p in prompts]


def answers(
    model: str,
    rows: Sequence[TaskRow],
    *,
    dtype: Literal["auto", "float32", "bfloat16"],
    device: Literal["auto", "cpu", "cuda"],
    seed: int,
    system: str,
    chat: str,
    template_arguments: Mapping[str, Any] | None,
    samples: int = 1,
    environment: Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    **sampling: Any,
) -> Iterator[Answer]:
    """Yield answers in order, as soon as they and all before are complete. The arguments are those
    of :func:`generate`; ``environment`` has settings of its section.
    """
    config = ModelConfig(name=model, dtype=dtype, device=device)
    texts = {"chat": chat, "system": system, "template_arguments": template_arguments or {}}
    task = recipes.build(texts, "", TaskConfig)
    batch = samples * max(min(len(rows), 32 // samples), 1)
    sizes = {"batch": batch, "samples_per_prompt": samples}
    rollout = recipes.build({**sizes, **sampling}, "", RolloutConfig)
    if overrides is None:
        with working(on_stderr, CHECKING):
            check_measured(Config.model_construct(model=config), config.name, rows=False)
    with working(on_stderr, LOADING):
        from stretto.assembly.run_models import NO_OVERRIDES
        from stretto.evaluation.generation import generate

    waiting: dict[int, Answer] = {}
    turn, model_overrides = 0, overrides or NO_OVERRIDES
    answering = recipes.build(environment, "", EnvironmentConfig) if environment else None
    how: Any = {"environment": answering, "seed": seed, "overrides": model_overrides}
    for answer in generate(config, rows, task, rollout, **how):
        waiting[answer.number] = answer
        while turn in waiting:
            yield waiting.pop(turn)
            turn += 1


def _measured(
    settings: Settings,
    model: str | Path,
    dataset: str | Path | None,
    changes: dict[str, Any],
    **checks: Any,
) -> tuple[Config, str]:
    config = config_of(settings)
    rows = {} if dataset is None else of_rows(config.task, str(dataset))
    config = changed(config, rows, changes)
    model_name = model_of(model, settings, config.model.name)
    with working(on_stderr, CHECKING):
        check_measured(config, model_name, **checks)
    with working(on_stderr, LOADING):
        importlib.import_module("stretto.evaluation")
    return config, model_name
