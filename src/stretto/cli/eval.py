"""``stretto eval``: a model on a task's held-out rows: pass@1, win-rates, KL, benchmarks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from stretto.api.settings import model_of, trained_with
from stretto.checks import check_measured
from stretto.cli.settings import RECIPE_HELP, parse_with_recipe
from stretto.config import Config
from stretto.errors import ConfigError, require
from stretto.models.resolve import trained_model
from stretto.observe.progress import on_stderr
from stretto.observe.report import evaluations
from stretto.saying import CHECKING, LOADING, working

if TYPE_CHECKING:
    from stretto.evaluation import EvalResult, LlmJudge, Measured

SETTINGS = (
    *("seed", "threads", "task", "model.dtype", "model.device", "model.trust_remote_code"),
    *("rollout.batch", "rollout.max_new_tokens", "rollout.stop", "rollout.slots"),
    "rollout.prefill_tokens",
)
"""Settings that an evaluation depends on, besides the model."""

SAMPLES = 200
"""Rows to answer, where it is not said how many."""

SAMPLED = ("win_rate_by", "sft", "judge")
"""Options that ask for measures of sampled responses."""

MEASURES = ("pass@1", "mean_score", "win_rate", "kl", "judge", "benchmarks")
"""Figures that say what was measured."""


@dataclass
class Options:
    """Measure a model. Without further options: pass@1, the share of greedy answers that the task's
    own verifier gives full credit, and the mean score, partial credit included. --win-rate-by,
    --sft and --judge sample one response to each prompt instead and measure those; --lm-eval runs
    benchmarks. Asked are the prompts that task.held_out keeps from training, or the rows of a file
    (--task.name) or a split (--task.split); what of them training asks too is said. The figures of
    a run's trained model are also added to evaluations.jsonl in its folder, where 'stretto report'
    finds them. Options come after the recipe.

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

    @property
    def sampled(self) -> bool:
        """Whether measures of sampled responses are asked for."""
        return any(getattr(self, name) for name in SAMPLED)


def run(arguments: Sequence[str]) -> int:
    """Evaluate, print the figures, and write them where asked."""
    config, own = parse_with_recipe("eval", arguments, Options, SETTINGS)
    _check(own)
    benchmarks = [name.strip() for name in own.lm_eval.split(",") if name.strip()]
    if own.temperature is not None:
        rollout = config.rollout.model_copy(update={"temperature": own.temperature})
        config = config.model_copy(update={"rollout": rollout})
    name = model_of(own.model, own.recipe, config)
    model, trained = trained_model(name), trained_with(own.model, own.recipe, config)
    by_row = own.sampled or not benchmarks
    sources = [own.win_rate_by] if own.win_rate_by else []
    with working(on_stderr, CHECKING):
        check_measured(config, model, rows=by_row, sources=sources, sft=own.sft)
    if benchmarks:
        require("lm_eval", "lm-eval", "--lm-eval")
    if own.judge:
        require("openai", "judge", "an LLM judge")

    print(f"model        {model}")
    figures: dict[str, Any] = {}
    if by_row:
        figures |= _by_row(config, own, model, trained)
    if benchmarks:
        figures["benchmarks"] = _benchmarks(config, own, model, benchmarks)
    settings = config.model_dump()
    if model != name:  # a run's trained one
        what = [measure for measure in MEASURES if measure in figures]
        record = {"model": model, "what": what, "figures": figures, "settings": settings}
        if evaluations.append(Path(name), record):
            file = Path(name) / evaluations.FILE
            print(f"dropped a last line that was never finished, of {file}")
    if own.out:
        _write(Path(own.out), {"model": model, **figures, "settings": settings})
    return 0


def _by_row(config: Config, own: Options, model: str, trained: Config) -> dict[str, Any]:
    """Measure answers to a task's rows, print what was found, and return the figures."""
    with working(on_stderr, LOADING):
        from stretto import evaluation

    samples = own.samples or SAMPLES
    result: EvalResult | Measured
    if own.sampled:
        result = measured = evaluation.measure(
            config,
            policy=model,
            samples=samples,
            by=own.win_rate_by,
            sft=own.sft,
            judge=_judge(own) if own.judge else None,
            reference_column=own.reference_column,
            trained=trained,
        )
        lines = _measured(measured)
    else:
        result = found = evaluation.evaluate(config, model=model, samples=samples, trained=trained)
        lines = {
            "pass@1": f"{found.pass_at_1:.4f} ± {found.pass_at_1_standard_error:.4f}",
            "mean score": f"{found.mean_score:.4f} ± {found.mean_score_standard_error:.4f}",
        }
    rows = {
        "task": config.task.kind,
        "rows": result.rows,
        "samples": f"{result.samples}, of {result.distinct} different prompts",
        "overlap": result.seen,
    }
    if result.skipped:
        rows["left out"] = f"{result.skipped} rows with longer prompts than task.max_prompt_tokens"
    lengths = {"mean tokens": f"{result.mean_tokens:.1f}", "ended": f"{result.ended:.4f}"}
    for name, value in {**rows, **lines, **lengths}.items():
        print(f"{name:<12} {value}")
    words = ("seen", "win_rates")  # the overlap, and what win_rate has already
    return {
        name.replace("pass_at_1", "pass@1"): value
        for name, value in asdict(result).items()
        if name not in words and (value is not None or not own.sampled)
    }


def _judge(own: Options) -> LlmJudge:
    from stretto.evaluation import LlmJudge

    limits = {"concurrency": own.judge_concurrency, "timeout_s": own.judge_timeout}
    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    return LlmJudge(own.judge, own.judge_url, **given)


def _measured(measured: Measured) -> dict[str, str]:
    lines = {"temperature": f"{measured.temperature:g}"}
    if (win := measured.win_rate) is not None:
        counts = f"{win.wins} won, {win.ties} tied, {win.losses} lost"
        lines["win-rate"] = f"{win.rate:.4f} ± {win.standard_error:.4f} by {win.by} ({counts})"
        lines["reward"] = f"{win.score:.4f}, of the references {win.reference_score:.4f}"
    if (kl := measured.kl) is not None:
        lines["KL"] = f"{kl.kl:.4f} ± {kl.standard_error:.4f} nats a response, to {kl.sft}"
        lines["perplexity"] = f"{kl.perplexity:.4f} of {kl.sft} on the samples"
    if (judged := measured.judge) is not None:
        counts = f"{judged.wins} won, {judged.ties} tied, {judged.losses} lost"
        rate = f"{judged.rate:.4f} ± {judged.standard_error:.4f}"
        lines["LLM judge"] = f"{rate} by {judged.judge} ({counts})"
        lines["consistent"] = f"{judged.consistent:.4f} of the pairs, with the sides swapped"
        if judged.unparsable:
            pairs = f"{judged.left_out} pairs left out"
            lines["unparsable"] = f"{judged.unparsable} answers of the judge; {pairs}"
    return lines


def _benchmarks(
    config: Config, own: Options, model: str, names: Sequence[str]
) -> list[dict[str, Any]]:
    with working(on_stderr, LOADING):
        from stretto import evaluation

    figures = evaluation.benchmark(config, model=model, tasks=names, limit=own.lm_eval_limit)
    for f in figures:
        error = "" if f.standard_error is None else f" ± {f.standard_error:.4f}"
        print(f"{f.task:<12} {f.value:.4f}{error}  {f.metric}, {f.fewshot}-shot")
    return [asdict(f) for f in figures]


def _check(own: Options) -> None:
    """Refuse numbers out of range, and options without the one that they belong to."""
    for name, least in (("samples", 1), ("lm_eval_limit", 0)):
        value = getattr(own, name)
        if value is not None and value < least:
            raise ConfigError(f"{_option(name)} {value}: must be {least} or more", "option-range")
    if own.temperature is not None and not 0 <= own.temperature < math.inf:
        raise ConfigError(f"--temperature {own.temperature}: must be 0 or more", "option-range")
    if own.samples is not None and own.lm_eval and not own.sampled:
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
        if getattr(own, name) != getattr(Options, name) and not any(
            getattr(own, option) for option in by
        ):
            options = " or ".join(map(_option, by))
            raise ConfigError(f"{_option(name)} has no effect without {options}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _write(file: Path, record: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write '{file}': {error}; choose another with --out") from error
