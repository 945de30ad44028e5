"""``stretto eval`` and ``label``: evaluate models, and label preferences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from stretto import files
from stretto.api.inference import benchmark, evaluate, label, label_responses, measure
from stretto.api.settings import model_of, trained_with
from stretto.checks import check_measured
from stretto.cli.options import (
    RECIPE_HELP,
    call_with_config,
    leading_recipe,
    parse_with_config,
    value_of,
)
from stretto.cli.parsing import File, Model, takes
from stretto.config import Config, RewardModelConfig, recipes
from stretto.config.sections import NonNegativeInt, Rows, Seconds, Temperature, Workers
from stretto.errors import ConfigError, require
from stretto.interfaces import option
from stretto.models.resolve import trained_model
from stretto.observe import RunDirectory
from stretto.observe.progress import on_stderr
from stretto.saying import CHECKING, LOADING, working

if TYPE_CHECKING:
    from stretto.evaluation import EvalResult, LabelResult, Measured

EVAL_SETTINGS = (
    *("seed", "threads", "task", "model.dtype", "model.device", "model.trust_remote_code"),
    *("rollout.batch", "rollout.max_new_tokens", "rollout.stop", "rollout.slots"),
    "rollout.prefill_tokens",
)
"""Settings that an evaluation depends on, in addition to the model."""

SAMPLES = 200
"""Default number of rows to answer."""

SAMPLED = ("win_rate_by", "sft", "judge")
"""Options whose metrics need sampled responses."""


@takes(evaluate, "model", "samples")
@takes(measure, "win_rate_by", "reference_column", "sft")
@takes(benchmark, lm_eval_limit="limit")
@dataclass
class EvalOptions:
    """Measure a model. By default: pass@1, the share of greedy answers with full credit from the
    task's own verifier, and the mean score, which includes partial credit. --win-rate-by, --sft and
    --judge instead sample and measure one response per prompt. --lm-eval runs benchmarks. Prompts
    are those that task.held_out keeps from training, or the rows of a file (--task.name) or a split
    (--task.split). Overlap with the training prompts is reported. Metrics of a run's trained model
    are also added to evaluations.jsonl in its folder, for 'stretto report'. Options come after the
    recipe.

    Attributes:
        out: Write the metrics and settings to this JSON file.
        temperature: Temperature of sampled responses. Default: the recipe's. pass@1 is greedy.
        judge: Win-rate against reference responses by this LLM, which sees each pair in both
            orders. The key is taken from OPENAI_API_KEY. Needs the extra 'judge'.
        judge_url: OpenAI-compatible endpoint of the judge, for example http://localhost:8000/v1.
            Default: OPENAI_BASE_URL, else OpenAI's.
        judge_concurrency: Questions to the judge at a time. Default: 8.
        judge_timeout: Seconds for one question to the judge, retries included. Default: 120.
        lm_eval: Benchmarks of lm-evaluation-harness, separated by commas: arc_challenge, arc_easy,
            hellaswag, truthfulqa_mc2 (0-shot), gsm8k (5-shot), any other that it knows, or a .yaml
            file that defines one. Needs the extra 'lm-eval'.
    """

    recipe: Annotated[Positional[str], arg(help=RECIPE_HELP, metavar="RECIPE_OR_RUN")]
    model: Model = ""
    samples: Rows | None = None
    out: File = ""
    temperature: Temperature | None = None
    win_rate_by: Annotated[str, arg(metavar="SOURCE")] = ""
    reference_column: str = ""
    sft: Model = ""
    judge: Model = ""
    judge_url: Annotated[str, arg(metavar="URL")] = ""
    judge_concurrency: Workers | None = None
    judge_timeout: Seconds | None = None
    lm_eval: Annotated[str, arg(metavar="NAMES")] = ""
    lm_eval_limit: NonNegativeInt = 0

    @property
    def sampled(self) -> bool:
        return any(getattr(self, name) for name in SAMPLED)


def run_eval(arguments: Sequence[str]) -> int:
    """Evaluate, print the metrics, and write them if requested."""
    config, options = parse_with_config(EvalOptions, "eval", arguments, EVAL_SETTINGS)
    args = EvalOptions(**options)
    _check_options(args)
    tasks = [name.strip() for name in args.lm_eval.split(",") if name.strip()]
    if args.temperature is not None:
        config = config.changed_in("rollout", temperature=args.temperature)
    name = model_of(args.model, args.recipe, config.model.name)
    model, by_row = trained_model(name), args.sampled or not tasks
    sources = [args.win_rate_by] if args.win_rate_by else []
    with working(on_stderr, CHECKING):
        check_measured(config, model, rows=by_row, sources=sources, sft=args.sft)
    if tasks:
        require("lm_eval", "lm-eval", "--lm-eval")
    if args.judge:
        require("openai", "judge", "an LLM judge")

    print(f"model        {model}")
    with working(on_stderr, LOADING):
        from stretto import evaluation
    figures: dict[str, Any] = {}
    if by_row:
        samples, trained = args.samples or SAMPLES, trained_with(args.model, args.recipe, config)
        result: EvalResult | Measured
        if args.sampled:
            request = {"policy": model, "samples": samples, "trained": trained, **_measures(args)}
            result = evaluation.measure(config, **request)
        else:
            result = evaluation.evaluate(config, model=model, samples=samples, trained=trained)
        for label, text in _lines(config.task.kind, result):
            print(f"{label:<12} {text}")
        figures = _figures(result)
    if tasks:
        limits = {"batch": config.rollout.batch, "limit": args.lm_eval_limit}
        benchmarks = evaluation.benchmark(config.model, model=model, tasks=tasks, **limits)
        for f in benchmarks:
            error = "" if f.standard_error is None else f" ± {f.standard_error:.4f}"
            print(f"{f.task:<12} {f.value:.4f}{error}  {f.metric}, {f.fewshot}-shot")
        figures["benchmarks"] = [asdict(f) for f in benchmarks]
    settings = config.model_dump()
    if model != name:  # the model that a run trained
        measures = ("pass@1", "mean_score", "win_rate", "kl", "judge", "benchmarks")
        what = [name for name in measures if name in figures]
        record = {"model": model, "what": what, "figures": figures, "settings": settings}
        run = RunDirectory(Path(name))
        if run.append_evaluation(record):
            print(f"dropped a last line that was never finished, of {run.evaluations_file}")
    if args.out:
        record = {"model": model, **figures, "settings": settings}
        with files.explained(Path(args.out)):
            Path(args.out).write_text(json.dumps(record, indent=2) + "\n")
    return 0


def _measures(args: EvalOptions) -> dict[str, Any]:
    judge = None
    if args.judge:
        from stretto import evaluation

        judge_options = {"concurrency": args.judge_concurrency, "timeout_s": args.judge_timeout}
        limits: dict[str, Any] = {
            name: limit for name, limit in judge_options.items() if limit is not None
        }
        judge = evaluation.LlmJudge(args.judge, args.judge_url, **limits)
    column = args.reference_column
    return {"by": args.win_rate_by, "sft": args.sft, "judge": judge, "reference_column": column}


def _lines(task: str, r: EvalResult | Measured) -> Iterator[tuple[str, str]]:
    from stretto.evaluation import EvalResult

    yield "task", task
    yield "rows", r.rows
    yield "samples", f"{r.samples}, of {r.distinct} different prompts"
    yield "overlap", r.seen
    if r.skipped:
        because = "prompts longer than task.max_prompt_tokens, or refused by the chat template"
        yield "left out", f"{r.skipped} rows: {because}"
    if isinstance(r, EvalResult):
        yield "pass@1", f"{r.pass_at_1:.4f} ± {r.pass_at_1_standard_error:.4f}"
        yield "mean score", f"{r.mean_score:.4f} ± {r.mean_score_standard_error:.4f}"
        if r.timeouts:
            yield "timeouts", f"{r.timeouts} answers could not be compared in time, and are wrong"
    else:
        yield from _sampled_lines(r)
    yield "mean tokens", f"{r.mean_tokens:.1f}"
    yield "ended", f"{r.ended:.4f}"


def _sampled_lines(r: Measured) -> Iterator[tuple[str, str]]:
    yield "temperature", f"{r.temperature:g}"
    if win := r.win_rate:
        counts = f"{win.wins} won, {win.ties} tied, {win.losses} lost"
        yield "win-rate", f"{win.rate:.4f} ± {win.standard_error:.4f} by {win.by} ({counts})"
        yield "reward", f"{win.score:.4f}, of the references {win.reference_score:.4f}"
    if kl := r.kl:
        yield "KL", f"{kl.kl:.4f} ± {kl.standard_error:.4f} nats a response, to {kl.sft}"
        yield "perplexity", f"{kl.perplexity:.4f} of {kl.sft} on the samples"
    if judged := r.judge:
        counts = f"{judged.wins} won, {judged.ties} tied, {judged.losses} lost"
        rate = f"{judged.rate:.4f} ± {judged.standard_error:.4f}"
        yield "LLM judge", f"{rate} by {judged.judge} ({counts})"
        yield "consistent", f"{judged.consistent:.4f} of the pairs, with the sides swapped"
        if judged.unparsable:
            pairs = f"{judged.left_out} pairs left out"
            yield "unparsable", f"{judged.unparsable} answers of the judge; {pairs}"


def _figures(result: EvalResult | Measured) -> dict[str, Any]:
    """Return the metrics as JSON, without unmeasured ones, ``seen`` and ``win_rates``."""
    data = {k: v for k, v in asdict(result).items() if k not in ("seen", "win_rates")}
    if "pass_at_1" in data:
        return {name.replace("pass_at_1", "pass@1"): value for name, value in data.items()}
    return {name: value for name, value in data.items() if value is not None}


def _check_options(args: EvalOptions) -> None:
    if args.samples is not None and args.lm_eval and not args.sampled:
        raise ConfigError(
            "--samples has no effect on benchmarks, which have rows of their own; --lm-eval-limit "
            "says how many of them to take"
        )
    judge = ("judge",)
    for name, by in (
        ("temperature", SAMPLED),
        ("reference_column", ("win_rate_by", "judge")),
        *((name, judge) for name in ("judge_url", "judge_concurrency", "judge_timeout")),
        ("lm_eval_limit", ("lm_eval",)),
    ):
        if getattr(args, name) != getattr(EvalOptions, name) and not any(
            getattr(args, needed) for needed in by
        ):
            options = " or ".join(map(option, by))
            raise ConfigError(f"{option(name)} has no effect without {options}")


_MODEL = ("threads", "model.dtype", "model.device", "model.trust_remote_code")

FILE_SETTINGS = (
    *_MODEL,
    *("data.split", "data.size", "data.on_error", "data.chat", "data.system"),
    *("data.prompt_column", "data.chosen_column", "data.rejected_column"),
)
"""Settings that the labels of a file depend on, in addition to the source."""

RECIPE_SETTINGS = (
    *_MODEL,
    *("seed", "task", "reward.timeout_s", "rollout.batch", "rollout.max_new_tokens"),
    *("rollout.temperature", "rollout.stop", "rollout.slots", "rollout.prefill_tokens"),
)
"""Settings that sampled and labelled responses depend on, besides policy and source."""


@takes(label, "by", "out", timeout="timeout_s")
def command_label(
    config: RewardModelConfig,
    what: Annotated[str, arg(metavar="FILE_OR_RECIPE")],
    /,
    *,
    timeout: float,
    **named: str,
) -> None:
    """Label preferences with a gold reward. 'stretto label FILE --by SOURCE --out FILE' reads pairs
    (chosen, rejected), and writes them ordered by the source's scores, without ties. 'stretto label
    RECIPE --responses-from MODEL --by SOURCE --out FILE' first samples responses to the recipe's
    prompts, and uses those that ended before the token limit. Its options: 'stretto label RECIPE
    --responses-from MODEL --help'. Options come after the file or recipe.

    Args:
        what: A .jsonl, .json or .parquet file with pairs, or a hub dataset; with --responses-from,
            a recipe, a .toml file, or a run's folder.
    """
    if what in recipes.names():
        raise ConfigError(
            f"'{what}' is a recipe, whose prompts are yet to be answered: say by which model with "
            "--responses-from MODEL, or give a file of pairs"
        )
    _show(label(config, timeout_s=timeout, **named))


@takes(command_label, "what", "by", "out")
@takes(label_responses, "prompts", responses_from="model", samples="per_prompt")
def _command_label_responses(
    config: Config, what: str, /, *, responses_from: str, samples: int, **named: Any
) -> None:
    _show(label_responses(config, model=responses_from, per_prompt=samples, **named))


_command_label_responses.__doc__ = (command_label.__doc__ or "").partition("Args:")[0]


def run_label(arguments: Sequence[str]) -> int:
    """Label, and report the counts of rows."""
    if value_of("--responses-from", arguments) is not None:
        return call_with_config(_command_label_responses, "label", arguments, RECIPE_SETTINGS)
    data = {"data": {"name": leading_recipe(arguments)}}
    start = RewardModelConfig.model_validate(data)
    return call_with_config(command_label, "label", arguments, FILE_SETTINGS, config=start)


def _show(result: LabelResult) -> None:
    print(f"source       {result.by}")
    print(f"read         {result.read}")
    print(f"ties         {result.ties} left out")
    if result.empty:
        print(f"empty        {result.empty} left out, as a side has no text")
    if result.unended:
        print(f"unended      {result.unended} left out, as fewer than two responses ended")
    print(f"kept         {result.kept}")
    if result.flipped is not None and result.agreement is not None:
        print(f"flipped      {result.flipped} of {result.kept} ({1 - result.agreement:.4f})")
        print(f"agreement    {result.agreement:.4f}")
    print(f"wrote        {result.out}")
