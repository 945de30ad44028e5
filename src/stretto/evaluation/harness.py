"""Benchmarks of lm-evaluation-harness, run on a model's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.config import ModelConfig
from stretto.errors import ConfigError, require
from stretto.models.backend import pick_device, with_dtype
from stretto.models.resolve import adapter_base, resolve
from stretto.observe.progress import on_stderr
from stretto.saying import silent, working

FEWSHOT: Mapping[str, int] = {
    "arc_challenge": 0,
    "arc_easy": 0,
    "hellaswag": 0,
    "truthfulqa_mc2": 0,
    "gsm8k": 5,
}
"""Examples in the prompt, as in OPPO's table of final accuracies. Other benchmarks define theirs.
"""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One metric of one benchmark.

    Attributes:
        task: of the harness.
        metric: with the harness's filter after a comma, unless it is 'none'.
        fewshot: examples in the prompt.
        value: as the harness reports it.
        standard_error: of the value. ``None`` if the harness has none.
    """

    task: str
    metric: str
    fewshot: int
    value: float
    standard_error: float | None


def benchmark(
    config: ModelConfig, *, model: str, tasks: Sequence[str], batch: int, limit: int = 0
) -> list[Benchmark]:
    """Run benchmarks.

    The arguments are those of :func:`stretto.api.inference.benchmark`. ``config`` has device and
    dtype, and ``batch`` responses are decoded at a time.

    Raises MissingExtraError without lm-evaluation-harness, ConfigError if a benchmark is unknown or
    its data unavailable, and ModelError if the model cannot be found.
    """
    require("lm_eval", "lm-eval", "`lm_eval`")
    with working(on_stderr, "loading lm-evaluation-harness"):
        lm_eval: Any = import_module("lm_eval")
        harness_tasks: Any = import_module("lm_eval.tasks")
    files = {task: Path(task) for task in tasks if task.endswith(".yaml")}
    names = {task: _name(files[task]) if task in files else task for task in tasks}
    manager = harness_tasks.TaskManager(include_path=[str(f.parent) for f in files.values()])
    for name in names.values():
        if name not in manager.all_tasks:
            close = get_close_matches(name, manager.all_tasks, n=1)
            remedy = f"did you mean '{close[0]}'?" if close else "'lm-eval ls tasks' lists them"
            message = f"`lm_eval`: there is no benchmark '{name}'; {remedy}"
            raise ConfigError(message, "unknown-benchmark")
    device, path = pick_device(config.device), resolve(model, on_stderr)
    base = adapter_base(path)
    options = {
        "model": "hf",
        "model_args": {
            "pretrained": str(resolve(base, on_stderr) if base else path),
            **({"peft": str(path)} if base else {}),
            "dtype": with_dtype(config, silent).dtype,
            "trust_remote_code": config.trust_remote_code,
        },
        "device": str(device),
        "batch_size": batch,
        "limit": limit or None,
        "task_manager": manager,
        "log_samples": False,
    }
    figures: list[Benchmark] = []
    for shots in dict.fromkeys(FEWSHOT.get(name) for name in names.values()):
        group = [name for name in names.values() if FEWSHOT.get(name) == shots]
        try:
            results = lm_eval.simple_evaluate(tasks=group, num_fewshot=shots, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"`lm_eval = {','.join(group)}` failed: {error}. The benchmarks' data comes from "
                "the hub; without a network, name a .yaml file whose data is local",
                "benchmark-failed",
            ) from error
        figures += _figures(results)
    return figures


def _name(file: Path) -> str:
    try:
        match = re.search(r"^task:\s*[\"']?([^\s\"'#]+)", file.read_text("utf-8"), re.MULTILINE)
    except OSError as error:
        raise ConfigError(f"`lm_eval`: cannot read '{file}': {error}", "unreadable") from error
    if not match:
        message = f"`lm_eval`: '{file}' defines no benchmark: it has no line 'task: NAME'"
        raise ConfigError(message, "no-benchmark")
    return match[1]


def _figures(results: Mapping[str, Any]) -> list[Benchmark]:
    """Return all metrics of all benchmarks, except those of groups."""
    figures = []
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, which = key.partition(",")
            if not which or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{which}")
            standard_error = float(error) if isinstance(error, int | float) else None
            label, fewshot = metric if which == "none" else key, int(results["n-shot"].get(task, 0))
            figures.append(Benchmark(task, label, fewshot, float(value), standard_error))
    return figures
