"""``stretto train``, ``sft``, ``reward`` and ``align``: from a recipe to a run, or to three; and
``recipes``, which lists what they take by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from stretto.api.settings import RESUMABLE, check_resumable
from stretto.cli.settings import RECIPE_HELP, DryRun, leading_recipe, parse_with_config, value_of
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.api.alignment import Aligned, PolicyOutcome

# What trains is imported once the arguments are read: help is asked for more often.

C = TypeVar("C", SftConfig, RewardModelConfig)

DEFAULT_RECIPE = "arithmetic"


@dataclass
class TrainOptions:
    """Train a model. The settings come from the recipe (defaults below are the recipe's) and from
    options, which come after it: stretto train tiny --steps 10 --training.lr 1e-5

    Attributes:
        overrides: A .toml file whose settings take the place of the recipe's, such as one
            that 'stretto plan --write' wrote. Options come after it.
        warmup_file: For several runs with one warm-up: keep what comes out of it in this file, or
            take it from there.
    """

    recipe: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            help=f"{RECIPE_HELP} Without one: {DEFAULT_RECIPE}.",
            metavar="[RECIPE]",
            help_behavior_hint="",
        ),
    ] = ""
    dry_run: DryRun = False
    resume: Annotated[
        str,
        tyro.conf.arg(
            help="Go on with this run from its last checkpoint, with its settings. Of these, only "
            f"{', '.join(RESUMABLE)} may be changed.",
            metavar="RUN_DIR",
        ),
    ] = ""
    overrides: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    warmup_file: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""


@dataclass
class SftOptions:
    """Fine-tune a language model on demonstrations: rows with conversations (messages), or with a
    prompt and its completion. Only what the assistant says is learned, the end of its turn
    included. For example: stretto sft --data.name chats.jsonl --model.name smollm2-135m
    """

    recipe: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help=f"{RECIPE_HELP} Without one: defaults.", metavar="RECIPE"),
    ] = ""
    dry_run: DryRun = False


@dataclass
class RewardOptions(SftOptions):
    """Train a reward model on pairs of responses of which one was preferred (chosen, rejected),
    with a prompt of their own or the beginning that both share. What is saved is a
    sequence-classification checkpoint, for reward.sources as model:FOLDER. 'stretto reward label'
    judges pairs instead.
    """


def run_train(arguments: Sequence[str]) -> int:
    """Train with reinforcement learning, and say where the results are."""
    config, own = parse(arguments)
    if own.dry_run:
        from stretto.cli.dry_run import describe_run

        print(describe_run(config))
        return 0
    from stretto.api.training import begin, execute

    overrides = None
    if own.warmup_file:  # the import takes long: before there is a folder
        from stretto.assembly.models import Overrides

        overrides = Overrides(warmup=Path(own.warmup_file))
    name = recipes.name_of(own.recipe or DEFAULT_RECIPE)
    execute(begin(config, name, resume=own.resume, overrides=overrides))
    return 0


def parse(arguments: Sequence[str]) -> tuple[Config, TrainOptions]:
    """Return the settings, and the options of the command itself."""
    recipe, resumed = leading_recipe(arguments), value_of("--resume", arguments)
    if recipe and resumed:
        raise ConfigError(
            f"--resume takes the settings of the run it resumes; leave out the recipe '{recipe}'"
        )
    source: str | Path = recipe or DEFAULT_RECIPE
    if resumed:
        from stretto.observe.run_directory import RunDirectory

        source = RunDirectory.open(resumed).config_file
    start = recipes.load(source, checked=bool(resumed))
    config, own = parse_with_config("train", arguments, start, TrainOptions)
    if own.resume != (resumed or ""):
        raise ConfigError("--resume was given twice; name one run directory")
    if resumed:
        check_resumable(start, config)
    return config, own


def run_sft(arguments: Sequence[str]) -> int:
    return _supervised("sft", arguments, SftConfig, SftOptions)


def run_reward(arguments: Sequence[str]) -> int:
    """Train a reward model, and say where the results are; or label pairs."""
    if arguments and arguments[0] == "label":
        from stretto.cli import models

        return models.run_label(arguments[1:])
    return _supervised("reward", arguments, RewardModelConfig, RewardOptions)


def _supervised(
    command: str, arguments: Sequence[str], kind: type[C], options: type[SftOptions]
) -> int:
    recipe = leading_recipe(arguments)
    start = recipes.load(recipe, kind, checked=False) if recipe else kind()
    config, own = parse_with_config(command, arguments, start, options)
    if not config.data.name:
        raise ConfigError(
            "data.name is empty: name a file or a hub dataset to train on with --data.name PATH"
        )
    if own.dry_run:
        from stretto.cli.dry_run import describe_supervised

        print(describe_supervised(config))
    else:
        from stretto.api.training import begin, execute

        execute(begin(config, recipes.name_of(recipe) if recipe else command))
    return 0


def command_align(
    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE_OR_FOLDER")] = "",
    *,
    algorithm: str = "",
    pairs: int = 600,
    samples: int = 200,
    reference_column: str = "",
    seed: int | None = None,
    out: str = "runs",
    resume: str = "",
    dry_run: bool = False,
) -> int:
    """Align a model: supervised fine-tuning on demonstrations, a reward model from labelled pairs
    of the tuned model's own responses, and reinforcement learning from the reward model;
    evaluated before and after by the gold reward, which also labelled the pairs.

    Args:
        recipe: Recipes of all three stages by one name ('posts'), or a folder with sft.toml,
            reward.toml and train.toml, such as an earlier alignment left.
        algorithm: The loss of the last stage; without it the recipe's.
        pairs: Prompts that the tuned model answers twice, for the gold reward to choose.
        samples: Held-out prompts to evaluate on, at most.
        reference_column: Column with the responses to win against; without it the task's own
            answers.
        seed: Seed of all stages; without it the recipes'.
        out: Folder in which the stages get a folder of their own.
        resume: Go on with the stages in this folder, which has their settings; takes no other
            option. Stages that ended are not run again.
        dry_run: Resolve names, print derived sizes and the memory plans, and load nothing.
    """
    if resume:
        own = (recipe, algorithm, pairs, samples, reference_column, seed, out, dry_run)
        return _resume(resume, *own)
    if not recipe:
        raise ConfigError(
            "name the recipe of all three stages ('stretto align posts'), a folder with their "
            "settings, or a folder to go on with as --resume FOLDER"
        )
    from stretto.api.alignment import align, check_settings, replaced, stages_of
    from stretto.cli.compare import new_folder
    from stretto.cli.dry_run import describe_run, describe_supervised

    seeded = {} if seed is None else {"seed": seed}
    chosen = {"algorithm__name": algorithm} if algorithm else {}
    stages = stages_of(recipe, sft=seeded, reward=seeded, train=seeded | chosen)
    check_settings(stages, pairs, samples)
    if dry_run:
        print("\n".join([*replaced(stages), describe_supervised(stages.sft)]))
        labelled = stages.reward.data.model_copy(update={"name": ""})
        print(describe_supervised(stages.reward.model_copy(update={"data": labelled})))
        print(describe_run(stages.train))
        return 0
    folder = new_folder(out, f"{Path(recipe).name}-align")
    try:
        result = align(
            stages, folder=folder, pairs=pairs, samples=samples, reference_column=reference_column
        )
    except BaseException:
        if any(folder.iterdir()):
            print(f"stopped; go on with: stretto align --resume {folder}")
        else:  # nothing was begun
            folder.rmdir()
        raise
    return _show(result)


def _resume(folder: str, *others: object) -> int:
    if others != ("", "", 600, 200, "", None, "runs", False):
        raise ConfigError(
            f"--resume {folder} goes on as it was begun, with the settings in that folder; leave "
            "out the recipe and all other options"
        )
    from stretto.api.alignment import resume_alignment

    return _show(resume_alignment(folder))


def _show(result: Aligned) -> int:
    pairs, learned, measured = result.pairs, result.reward, result.after.measured
    held, win = learned.held_out, measured.win_rate
    assert win
    accuracy = f"held-out accuracy {held.accuracy:.3f}" if held else "nothing held out"
    print(
        f"reward model: {accuracy}, learned from {pairs.kept} pairs (left out: {pairs.ties} ties, "
        f"{pairs.unended} without an end, {pairs.empty} empty)\n"
        f"missing_eos_penalty of the last stage: {result.penalty:.2f} (the reward model's mean "
        f"{learned.reward_mean:.2f}, standard deviation {learned.reward_std:.2f})\n\n"
        "| | win-rate | gold score | reward model's score | KL, nats a response | perplexity "
        "| tokens | ended |\n"
        "|---|---|---|---|---|---|---|---|\n"
        f"{_row('after SFT', result.before)}\n{_row('after RL', result.after)}\n\n"
        f"Win-rate and gold score by {win.by}, on {measured.samples} prompts, against reference "
        f"responses (gold score {win.reference_score:.2f}). KL to the SFT model, and its "
        f"perplexity on the responses. Overlap: {measured.seen}.\n"
        f"all stages are in {result.folder}"
    )
    return 0


def _row(name: str, outcome: PolicyOutcome) -> str:
    m = outcome.measured
    assert m.kl
    assert m.win_rate
    return (
        f"| {name} | {m.win_rate.rate:.3f} ± {m.win_rate.standard_error:.3f} "
        f"| {m.win_rate.score:.2f} | {outcome.proxy:.2f} | {m.kl.kl:.2f} | {m.kl.perplexity:.2f} "
        f"| {m.mean_tokens:.1f} | {m.ended:.2f} |"
    )


def command_recipes(
    recipe: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = (), /
) -> None:
    """List the recipes that commands take by name; 'stretto eval' takes those of 'train'. With a
    name, print that recipe as TOML: stretto recipes tiny > my.toml

    Args:
        recipe: Name of a recipe to print. One of another command than train has the command before
            it, as in the list: stretto recipes sft posts
    """
    kinds = {folder or "train": kind for kind, folder in recipes.FOLDERS.items()}
    match recipe:
        case [command, name] if command in kinds:
            print(recipes.text_of(name, kinds[command]), end="")
            return
        case [name]:
            having = [each for each, kind in kinds.items() if name in recipes.names(kind)]
            print(recipes.text_of(name, kinds[having[0] if having else "train"]), end="")
            return
        case [_, *_]:
            raise ConfigError(
                f"'{' '.join(recipe)}' names no recipe; write its name, or its command and its "
                "name: stretto recipes sft posts",
                "unknown-recipe",
            )
    rows = [
        (folder or "train", name, recipes.describe(name, kind))
        for kind, folder in recipes.FOLDERS.items()
        for name in recipes.names(kind)
    ]
    width = max(len(name) for _, name, _ in rows)
    for command, name, description in rows:
        print(f"{command:<6}  {name:<{width}}  {description}")
