"""``stretto eval``: a model on a task's held-out rows: pass@1, win-rates, KL, benchmarks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from stretto.api.settings import trained_with
from stretto.checks import check_measured
from stretto.cli.settings import RECIPE_HELP, leading_recipe, parse_with_config
from stretto.config import Config, recipes
from stretto.errors import ConfigError, require
from stretto.models.resolve import trained_model
from stretto.observe import RunDirectory
from stretto.observe.progress import on_stderr
from stretto.saying import CHECKING, LOADING, working

if TYPE_CHECKING:
    from stretto.evaluation import EvalResult, Measured

SETTINGS = (
    "seed",
    "threads",
    "task",
    "model.dtype",
    "model.device",
    "model.trust_remote_code",
    "rollout.batch",
    "rollout.max_new_tokens",
    "rollout.stop",
    "rollout.slots",
    "rollout.prefill_tokens",
)
"""Settings that an evaluation depends on, besides the model."""

SAMPLES = 200
"""Rows to answer, where it is not said how many."""

SAMPLED = ("win_rate_by", "sft", "judge")
"""Options that ask for measures of sampled responses."""

_DESCRIPTION = (
    "Measure a model. Without further options: pass@1, the share of greedy answers that the task's "
    "own verifier gives full credit, and the mean score, partial credit included. --win-rate-by, "
    "--sft and --judge sample one response to each prompt instead and measure those; --lm-eval "
    "runs benchmarks. Asked are the prompts that task.held_out keeps from training, or the rows of "
    "a file (--task.name) or a split (--task.split); what of them training asks too is said. The "
    "figures of a "
    "run's trained model are also added to evaluations.jsonl in its folder, where 'stretto report' "
    "finds them. Options come after the recipe."
)

MEASURES = ("pass@1", "mean_score", "win_rate", "kl", "judge", "benchmarks")
"""Figures that say what was measured."""


@dataclass
class Options:
    """The command's own options.

    Attributes:
        model: What to measure: a known name, a local folder, a hub name, or a run's folder.
            Without it: the run's trained model, or the recipe's model before training.
        out: Write the figures and settings to this JSON file.
        temperature: Of sampled responses; without it: the recipe's. pass@1 is greedy.
        win_rate_by: Win-rate against reference responses by this gold reward: 'model:NAME' (a
            reward model or the run of one), 'file.py:function', or 'task'.
        reference_column: Column with the reference responses: text, or a conversation that ends
            with the assistant's turn. Without it: the task's own answers.
        sft: KL to this model (what the policy was trained from, or the run of it), and its
            perplexity on the policy's samples.
        judge: Win-rate against reference responses by this LLM, which sees each pair in both
            orders. The key is taken from OPENAI_API_KEY. Needs the extra 'judge'.
        judge_url: OpenAI-compatible endpoint of the judge, such as http://localhost:8000/v1.
            Without it: OPENAI_BASE_URL, else OpenAI's.
        judge_concurrency: Questions to the judge at a time. Without it: 8.
        judge_timeout: Seconds for one question to the judge, retries included. Without it: 120.
        lm_eval: Benchmarks of lm-evaluation-harness, with commas between: arc_challenge, arc_easy,
            hellaswag, truthfulqa_mc2 (0-shot), gsm8k (5-shot), any other that it knows, or a .yaml
            file that defines one. Needs the extra 'lm-eval'.
        lm_eval_limit: Examples of each benchmark; 0 takes all.
    """

    recipe: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help=RECIPE_HELP, metavar="RECIPE_OR_RUN")
    ] = tyro.MISSING
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = ""
    samples: Annotated[
        int | None, tyro.conf.arg(help=f"Rows to answer. Without it: {SAMPLES}.", metavar="INT")
    ] = None
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    win_rate_by: Annotated[str, tyro.conf.arg(metavar="SOURCE")] = ""
    reference_column: Annotated[str, tyro.conf.arg(metavar="COLUMN")] = ""
    sft: Annotated[str, tyro.conf.arg(metavar="MODEL")] = ""
    judge: Annotated[str, tyro.conf.arg(metavar="MODEL")] = ""
    judge_url: Annotated[str, tyro.conf.arg(metavar="URL")] = ""
    judge_concurrency: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    judge_timeout: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    lm_eval: Annotated[str, tyro.conf.arg(metavar="NAMES")] = ""
    lm_eval_limit: int = 0


def run(arguments: Sequence[str]) -> int:
    """Evaluate, print the figures, and write them where asked."""
    recipe = leading_recipe(arguments)
    # Without a recipe the parser answers: with the help, or by what it misses.
    start = recipes.load(recipe or "arithmetic")
    config, own = parse_with_config("eval", _DESCRIPTION, arguments, start, Options, SETTINGS)
    _check(own)
    sampled, benchmarks = any(getattr(own, name) for name in SAMPLED), _names(own.lm_eval)
    if own.temperature is not None:
        rollout = config.rollout.model_copy(update={"temperature": own.temperature})
        config = config.model_copy(update={"rollout": rollout})
    model, folder = _model(own.model, own.recipe, config.model.name)
    trained = trained_with(own.model, own.recipe, config)
    by = [own.win_rate_by] if own.win_rate_by else []
    rows = sampled or not benchmarks
    with working(on_stderr, CHECKING):
        check_measured(config, model, rows=rows, sources=by, sft=own.sft)
    if benchmarks:
        require("lm_eval", "lm-eval", "--lm-eval")
    if own.judge:
        require("openai", "judge", "an LLM judge")

    print(f"model        {model}")
    figures: dict[str, Any] = {}
    if sampled:
        figures |= _sampled(config, own, model, trained)
    elif not benchmarks:
        figures |= _pass_at_1(config, own, model, trained)
    if benchmarks:
        figures["benchmarks"] = _benchmarks(config, own, model, benchmarks)
    what = [name for name in MEASURES if name in figures]
    settings = config.model_dump()
    if folder:
        record = {"model": model, "what": what, "figures": figures, "settings": settings}
        run = RunDirectory(folder)
        if run.append_evaluation(record):
            print(f"dropped a last line that was never finished, of {run.evaluations_file}")
    if own.out:
        _write(Path(own.out), {"model": model, **figures, "settings": settings})
    return 0


def _pass_at_1(config: Config, own: Options, model: str, trained: Config) -> dict[str, Any]:
    with working(on_stderr, LOADING):
        from stretto import evaluation

    result = evaluation.evaluate(
        config, model=model, samples=own.samples or SAMPLES, trained=trained
    )
    _print_rows(config, result)
    _print("pass@1", f"{result.pass_at_1:.4f} ± {result.pass_at_1_standard_error:.4f}")
    _print("mean score", f"{result.mean_score:.4f} ± {result.mean_score_standard_error:.4f}")
    _print_lengths(result.mean_tokens, result.ended)
    figures = {name.replace("pass_at_1", "pass@1"): v for name, v in asdict(result).items()}
    del figures["seen"]  # the overlap in words
    return figures


def _sampled(config: Config, own: Options, model: str, trained: Config) -> dict[str, Any]:
    with working(on_stderr, LOADING):
        from stretto import evaluation

    judge = None
    if own.judge:
        limits = {"concurrency": own.judge_concurrency, "timeout_s": own.judge_timeout}
        given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
        judge = evaluation.LlmJudge(own.judge, own.judge_url, **given)
    measured = evaluation.measure(
        config,
        policy=model,
        samples=own.samples or SAMPLES,
        by=own.win_rate_by,
        sft=own.sft,
        judge=judge,
        reference_column=own.reference_column,
        trained=trained,
    )
    _print_rows(config, measured)
    _print("temperature", f"{measured.temperature:g}")
    _print_measured(measured)
    _print_lengths(measured.mean_tokens, measured.ended)
    figures = {name: value for name, value in asdict(measured).items() if value is not None}
    del figures["win_rates"]  # of one source, which is there already
    del figures["seen"]  # the overlap in words
    return figures


def _benchmarks(
    config: Config, own: Options, model: str, names: Sequence[str]
) -> list[dict[str, Any]]:
    with working(on_stderr, LOADING):
        from stretto import evaluation

    figures = evaluation.benchmark(config, model=model, tasks=names, limit=own.lm_eval_limit)
    for f in figures:
        error = "" if f.standard_error is None else f" ± {f.standard_error:.4f}"
        _print(f.task, f"{f.value:.4f}{error}  {f.metric}, {f.fewshot}-shot")
    return [asdict(f) for f in figures]


def _print_rows(config: Config, of: EvalResult | Measured) -> None:
    _print("task", config.task.kind)
    _print("rows", of.rows)
    _print("samples", f"{of.samples}, of {of.distinct} different prompts")
    _print("overlap", of.seen)
    if of.skipped:
        _print("left out", f"{of.skipped} rows with longer prompts than task.max_prompt_tokens")


def _print_measured(measured: Measured) -> None:
    if (win := measured.win_rate) is not None:
        counts = f"{win.wins} won, {win.ties} tied, {win.losses} lost"
        _print("win-rate", f"{win.rate:.4f} ± {win.standard_error:.4f} by {win.by} ({counts})")
        _print("reward", f"{win.score:.4f}, of the references {win.reference_score:.4f}")
    if (kl := measured.kl) is not None:
        _print("KL", f"{kl.kl:.4f} ± {kl.standard_error:.4f} nats a response, to {kl.sft}")
        _print("perplexity", f"{kl.perplexity:.4f} of {kl.sft} on the samples")
    if (judged := measured.judge) is not None:
        counts = f"{judged.wins} won, {judged.ties} tied, {judged.losses} lost"
        rate = f"{judged.rate:.4f} ± {judged.standard_error:.4f}"
        _print("LLM judge", f"{rate} by {judged.judge} ({counts})")
        _print("consistent", f"{judged.consistent:.4f} of the pairs, with the sides swapped")
        if judged.unparsable:
            pairs = f"{judged.left_out} pairs left out"
            _print("unparsable", f"{judged.unparsable} answers of the judge; {pairs}")


def _print_lengths(mean_tokens: float, ended: float) -> None:
    _print("mean tokens", f"{mean_tokens:.1f}")
    _print("ended", f"{ended:.4f}")


def _print(name: str, value: str) -> None:
    print(f"{name:<12} {value}", flush=True)


def _check(own: Options) -> None:
    """Refuse numbers out of range, and options without the one that they belong to.

    Raises:
        ConfigError: there are such.
    """
    for name, least in (("samples", 1), ("lm_eval_limit", 0)):
        value = getattr(own, name)
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {value}: must be {least} or more")
    if own.temperature is not None and not 0 <= own.temperature < math.inf:
        raise ConfigError(f"--temperature {own.temperature}: must be 0 or more")
    sampled, defaults = any(getattr(own, name) for name in SAMPLED), Options()
    if own.samples is not None and own.lm_eval and not sampled:
        raise ConfigError(
            "--samples has no effect on benchmarks, which have rows of their own; --lm-eval-limit "
            "says how many of them to take"
        )
    for name, used, by in (
        ("temperature", sampled, SAMPLED),
        ("reference_column", own.win_rate_by or own.judge, ("win_rate_by", "judge")),
        ("judge_url", own.judge, ("judge",)),
        ("judge_concurrency", own.judge, ("judge",)),
        ("judge_timeout", own.judge, ("judge",)),
        ("lm_eval_limit", own.lm_eval, ("lm_eval",)),
    ):
        if getattr(own, name) != getattr(defaults, name) and not used:
            options = " or ".join("--" + option.replace("_", "-") for option in by)
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without {options}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _model(asked: str, recipe: str, otherwise: str) -> tuple[str, Path | None]:
    is_run = recipe not in recipes.names() and Path(recipe).is_dir()
    name = asked or (recipe if is_run else otherwise)
    model = trained_model(name)
    return model, Path(name) if model != name else None


def _write(file: Path, record: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write '{file}': {error}; choose another with --out") from error
