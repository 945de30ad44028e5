"""``stretto label``: preferences as a gold reward has them, of old pairs or of new responses.

The two forms, told apart by ``--responses-from``, write the same. Each offers the settings that it
looks at: of ``stretto reward``, which reads what is written, or of a recipe of ``stretto train``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from stretto.api import label_responses
from stretto.cli.settings import (
    leading_recipe,
    parse_with_config,
    parse_with_recipe,
    value_of,
)
from stretto.config import RewardModelConfig, recipes
from stretto.errors import ConfigError
from stretto.observe.progress import on_stderr
from stretto.saying import LOADING, working

if TYPE_CHECKING:
    from stretto.evaluation import LabelResult

RESPONSES_FROM = "--responses-from"

_MODEL = ("threads", "model.dtype", "model.device", "model.trust_remote_code")

FILE_SETTINGS = (
    *_MODEL,
    *("data.split", "data.size", "data.on_error", "data.chat", "data.system"),
    *("data.prompt_column", "data.chosen_column", "data.rejected_column"),
)
"""Settings that the labels of a file depend on, besides the source."""

RECIPE_SETTINGS = (
    *_MODEL,
    *("seed", "task", "reward.timeout_s", "rollout.batch", "rollout.max_new_tokens"),
    *("rollout.temperature", "rollout.stop", "rollout.slots", "rollout.prefill_tokens"),
)
"""Settings that sampled and labelled responses depend on, besides policy and source."""


@dataclass
class Options:
    """Label preferences with a gold reward. 'stretto label FILE --by SOURCE --out FILE' reads pairs
    (chosen, rejected) or prompts with several 'responses', and writes pairs whose sides stand as
    the source scores them; ties are left out. 'stretto label RECIPE --responses-from MODEL --by
    SOURCE --out FILE' samples the responses first, to the recipe's prompts, and takes those that
    ended before the token limit; its options: 'stretto label RECIPE --responses-from MODEL --help'.
    Options come after the file or recipe.

    Attributes:
        by: The gold reward: 'model:NAME' (a reward model or the run of one), 'file.py:function',
            or, with --responses-from, 'task'.
        out: Where the pairs go, as JSON Lines.
    """

    what: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            help="A .jsonl, .json or .parquet file with pairs, or a hub dataset; with "
            "--responses-from, a recipe, a .toml file, or a run's folder.",
            metavar="FILE_OR_RECIPE",
        ),
    ] = tyro.MISSING
    by: Annotated[str, tyro.conf.arg(metavar="SOURCE")] = ""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""


@dataclass
class _FileOptions(Options):
    __doc__ = Options.__doc__

    timeout: float = 30.0
    """Seconds that a function may take for 32 responses."""


@dataclass
class _RecipeOptions(Options):
    __doc__ = Options.__doc__

    responses_from: Annotated[
        str,
        tyro.conf.arg(
            help="Model that answers the recipe's prompts: a known name, a local folder, a hub "
            "name, or a run's folder.",
            metavar="MODEL",
        ),
    ] = ""
    samples: int = 2
    """Responses to each prompt; the best and the worst of those that ended make a pair."""
    prompts: int = 1000
    """Prompts to answer, at most."""


def run(arguments: Sequence[str]) -> int:
    """Label, and say what became of the rows."""
    sampled = value_of(RESPONSES_FROM, arguments) is not None
    result = _label_responses(arguments) if sampled else _label_file(arguments)
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
    return 0


def _label_file(arguments: Sequence[str]) -> LabelResult:
    name = leading_recipe(arguments)
    start = RewardModelConfig.model_validate({"data": {"name": name}})
    config, own = parse_with_config("label", arguments, start, _FileOptions, FILE_SETTINGS)
    _require_by_and_out(own)
    if name in recipes.names():
        raise ConfigError(
            f"'{name}' is a recipe, whose prompts are yet to be answered: say by which model with "
            f"{RESPONSES_FROM} MODEL, or give a file of pairs"
        )
    if not own.timeout > 0:
        raise ConfigError(f"--timeout {own.timeout}: must be above 0")
    with working(on_stderr, LOADING):
        from stretto.evaluation import label_pairs

    return label_pairs(config, by=own.by, out=Path(own.out), timeout_s=own.timeout)


def _label_responses(arguments: Sequence[str]) -> LabelResult:
    config, own = parse_with_recipe("label", arguments, _RecipeOptions, RECIPE_SETTINGS)
    _require_by_and_out(own)
    if own.prompts < 1:
        raise ConfigError(f"--prompts {own.prompts}: must be 1 or more")
    return label_responses(
        config,
        model=own.responses_from,
        by=own.by,
        out=own.out,
        prompts=own.prompts,
        per_prompt=own.samples,
    )


def _require_by_and_out(own: Options) -> None:
    for name, example in (("by", "model:NAME"), ("out", "pairs.jsonl")):
        if not getattr(own, name):
            raise ConfigError(f"--{name} is missing; give it, such as --{name} {example}")
