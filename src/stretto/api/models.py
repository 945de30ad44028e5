"""Trained models at work, from Python."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from stretto.errors import ConfigError, require
from stretto.interfaces import in_python
from stretto.observe.progress import on_stderr
from stretto.saying import CHECKING, LOADING, working
from stretto.tasks import TaskRow
from stretto.tasks.messages import as_prompt

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from stretto.assembly.models import Overrides
    from stretto.evaluation import Benchmark, EvalResult, LabelResult, LlmJudge, Measured
    from stretto.evaluation.answers import Answer


@in_python
def evaluate(
    settings: Settings,
    *,
    model: str | Path = "",
    samples: int = 200,
    dataset: str | Path | None = None,
    **changes: Any,
) -> EvalResult:
    """Return pass@1 and the mean score of a model's greedy answers to a task's prompts, judged by
    the task's verifier. What ``stretto eval`` does without further options; :func:`measure` has the
    others.

    Args:
        settings: as in :func:`train`; they name the task.
        model: a name, a folder, or a run's folder; without one the settings' model, or the trained
            one where ``settings`` is a run's folder.
        samples: prompts answered, at most.
        dataset: a file or a hub dataset in place of the settings' one.
        changes: as in :func:`train`.
    """
    config, chosen = _measured(settings, model, dataset, changes)
    trained = trained_with(model, settings, config)
    from stretto import evaluation

    return evaluation.evaluate(config, model=chosen, samples=samples, trained=trained)


@in_python
def measure(
    settings: Settings,
    *,
    model: str | Path = "",
    samples: int = 200,
    win_rate_by: str | Sequence[str] = (),
    sft: str | Path = "",
    judge: LlmJudge | None = None,
    reference_column: str = "",
    dataset: str | Path | None = None,
    **changes: Any,
) -> Measured:
    """Measure a model's sampled responses to a task's prompts; what ``stretto eval`` does with the
    options of the same names.

    Args:
        settings, model, samples, dataset, changes: as in :func:`evaluate`.
        win_rate_by: gold reward for a win-rate, as in ``reward.sources``, or several of them; the
            run of a reward model stands for its model.
        sft: model for the KL, a run's folder too.
        judge: an LLM judge for a win-rate.
        reference_column: with the responses to win against; empty takes the task's own answers.
    """
    sources = [win_rate_by] if isinstance(win_rate_by, str) else win_rate_by
    asked = {"sources": [s for s in sources if s], "sft": str(sft)}
    config, chosen = _measured(settings, model, dataset, changes, **asked)
    from stretto import evaluation

    return evaluation.measure(
        config,
        policy=chosen,
        samples=samples,
        by=win_rate_by,
        sft=str(sft),
        judge=judge,
        reference_column=reference_column,
        trained=trained_with(model, settings, config),
    )


@in_python
def label(
    data: str | Path | RewardModelConfig, *, by: str, out: str | Path, **changes: Any
) -> LabelResult:
    """Label a preference file anew by a gold reward; what ``stretto label FILE`` does.

    Args:
        data: the file, or settings whose ``data`` names it.
        by: 'file.py:name' or 'model:NAME'; a run's folder too.
        out: file for the pairs, JSON Lines.
        changes: of those settings, as in :func:`train`.
    """
    from stretto.evaluation import label_pairs

    if not isinstance(data, RewardModelConfig):
        data = changed(RewardModelConfig(), {"data__name": str(data)})
    return label_pairs(changed(data, changes), by=by, out=Path(out))


@in_python
def label_responses(
    settings: Settings,
    *,
    by: str,
    out: str | Path,
    model: str | Path = "",
    prompts: int = 1000,
    per_prompt: int = 2,
    dataset: str | Path | None = None,
    **changes: Any,
) -> LabelResult:
    """Label a model's responses to a task's prompts by a gold reward; what ``stretto label RECIPE
    --responses-from MODEL`` does.

    Args:
        settings, model, dataset, changes: as in :func:`evaluate`.
        by, out: as in :func:`label`; ``by`` may be 'task' too.
        prompts: the first ones that training would draw, at most so many.
        per_prompt: responses to each; the best and the worst make a pair.
    """
    config, chosen = _measured(settings, model, dataset, changes, sources=[by])
    from stretto import evaluation

    return evaluation.label_responses(
        config, policy=chosen, by=by, out=Path(out), prompts=prompts, per_prompt=per_prompt
    )


@in_python
def benchmark(
    settings: Settings,
    tasks: Sequence[str],
    *,
    model: str | Path = "",
    limit: int = 0,
    **changes: Any,
) -> list[Benchmark]:
    """Run benchmarks of lm-evaluation-harness; what ``stretto eval --lm-eval`` does.

    Args:
        settings, model, changes: as in :func:`evaluate`; of the settings, those of the model and
            ``rollout.batch`` are looked at.
        tasks: names that the harness knows, or .yaml files that define one.
        limit: examples of each benchmark, at most; 0 takes all.
    """
    require("lm_eval", "lm-eval", "stretto.benchmark")
    config, chosen = _measured(settings, model, None, changes, rows=False)
    from stretto import evaluation

    batch = config.rollout.batch
    return evaluation.benchmark(config.model, model=chosen, tasks=tasks, batch=batch, limit=limit)


@in_python
def generate(
    model: nn.Module | str | Path,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: Literal["auto", "on", "off"] = "auto",
    system: str = "",
    template_arguments: Mapping[str, Any] | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> list[str]:
    """Return a model's answers to prompts, in their order; what ``stretto generate`` does.

    Raises ConfigError for an option out of range, ModelError where there is no such model,
    TaskError for a prompt that the model cannot read.

    Args:
        prompts: texts, or conversations as lists of messages.
        model: a known name, a folder in Hugging Face format, a hub name, or a run's folder; or a
            model as an object, which is put into evaluation mode and needs its ``tokenizer``.
        temperature: softmax temperature; 0 is greedy.
        top_k, top_p: sample among the likeliest tokens only; 0 and 1 are off.
        stop: strings that end an answer, besides the end-of-sequence token.
        chat: apply the tokenizer's chat template; auto: where it has one.
        system: a system message put before every prompt; needs a chat template.
        template_arguments: of the chat template, such as ``{"enable_thinking": False}``.
        dtype: type to compute in, of a model by name; auto: bfloat16 where the hardware is faster
            in it, else float32. Greedy texts of the two types differ now and then.
        device: to compute on; auto: cuda when there is one.
    """
    by_name = isinstance(model, str | Path)
    if by_name == (tokenizer is not None):
        raise ConfigError(
            "a model by name brings its tokenizer, and one that is an object needs it: give "
            "tokenizer= with objects alone",
            "tokenizer-of-object",
        )
    if isinstance(prompts, str) or not prompts:
        message = f"prompts must be a list with at least one text; got {prompts!r}"
        raise ConfigError(message, "prompts-not-list")
    overrides = None
    if not isinstance(model, str | Path):
        from stretto.assembly.models import Overrides

        overrides = Overrides(actor=model, tokenizer=tokenizer)
    config = ModelConfig(
        name=str(model) if by_name else type(model).__name__, dtype=dtype, device=device
    )
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": tuple(stop),
    }
    for prompt in prompts:
        if not isinstance(prompt, str | Sequence):
            message = f"a prompt is text or a list of chat messages; got {prompt!r}"
            raise ConfigError(message, "prompt-not-text")
    rows = [TaskRow(p if isinstance(p, str) else as_prompt(list(p))) for p in prompts]
    own = {"chat": chat, "system": system, "template_arguments": template_arguments or {}}
    task = recipes.build(own, "options", TaskConfig)
    found = answers(config, rows, task, options, seed=seed, overrides=overrides)
    return [answer.text for answer in found]


def answers(
    config: ModelConfig,
    rows: Sequence[TaskRow],
    task: TaskConfig,
    options: Mapping[str, Any],
    *,
    seed: int,
    environment: Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
) -> Iterator[Answer]:
    """Yield answers in the order of their prompts, each as soon as it and those before have ended.
    The options are settings of the section ``rollout``, and those of ``environment`` of its own;
    the task says how rows become prompts.
    """
    each = options.get("samples_per_prompt", 1)
    batch = max(each, 1) * max(min(len(rows), 32 // max(each, 1)), 1)
    rollout = recipes.build({"batch": batch, **options}, "options", RolloutConfig)
    if overrides is None:
        with working(on_stderr, CHECKING):
            check_measured(Config.model_construct(model=config), config.name, rows=False)
    with working(on_stderr, LOADING):
        from stretto.assembly.models import NO_OVERRIDES
        from stretto.evaluation.answers import generate

    waiting: dict[int, Answer] = {}
    turn, own = 0, overrides or NO_OVERRIDES
    answering = recipes.build(environment, "options", EnvironmentConfig) if environment else None
    how: Any = {"environment": answering, "seed": seed, "overrides": own}
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
    **asked: Any,
) -> tuple[Config, str]:
    config = config_of(settings)
    rows = {} if dataset is None else of_rows(config.task, str(dataset))
    config = changed(config, rows, changes)
    chosen = model_of(model, settings, config.model.name)
    with working(on_stderr, CHECKING):
        check_measured(config, chosen, **asked)
    with working(on_stderr, LOADING):
        importlib.import_module("stretto.evaluation")
    return config, chosen
