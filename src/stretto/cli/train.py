"""``stretto train``, ``sft``, ``reward``, ``align`` and ``recipes``: from a recipe to a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from stretto.api.alignment import (
    Aligned,
    PolicyOutcome,
    align,
    check_settings,
    replaced,
    resume_alignment,
    stages_of,
)
from stretto.api.replays import replay
from stretto.api.settings import RESUMABLE, check_resumable
from stretto.cli.options import (
    DEFAULT_RECIPES,
    RECIPE_HELP,
    DryRun,
    call_with_config,
    leading_recipe,
    parse_with_config,
    value_of,
)
from stretto.cli.parsing import File, options_of, takes
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.config.sections import NonNegativeInt, Seed
from stretto.errors import ConfigError

# Training code is imported after parsing, so that --help is fast.


def command_train(
    config: Config,
    recipe: Annotated[
        str,
        arg(
            help=f"{RECIPE_HELP} Without one: {DEFAULT_RECIPES[Config]}.",
            metavar="[RECIPE]",
            help_behavior_hint="",
        ),
    ] = "",
    /,
    *,
    dry_run: DryRun = False,
    resume: Annotated[
        str,
        arg(
            help="Go on with this run from its last checkpoint, with its settings. Of these, only "
            f"{', '.join(RESUMABLE)} may be changed.",
            metavar="RUN_DIR",
        ),
    ] = "",
    overrides: File = "",
    warmup_file: File = "",
) -> None:
    """Train a model. The settings come from the recipe (defaults below are the recipe's) and from
    options, which come after it: stretto train tiny --steps 10 --training.lr 1e-5

    Args:
        overrides: A .toml file whose settings replace the recipe's, for example one written by
            'stretto plan --write'. Options override it.
        warmup_file: File for the warmed-up weights, which several runs can share. It is read if it
            exists and written otherwise.
    """
    if dry_run:
        from stretto.cli.dry_run import describe_run

        print(describe_run(config))
        return
    from stretto.api.training import begin, execute

    objects = None
    if warmup_file:  # the import is slow, so it comes before the folder is created
        from stretto.assembly.run_models import Overrides

        objects = Overrides(warmup=Path(warmup_file))
    name = recipes.name_of(recipe or DEFAULT_RECIPES[Config])
    execute(begin(config, name, resume=resume, overrides=objects))


def run_train(arguments: Sequence[str]) -> int:
    config, options = parse(arguments)
    command_train(config, options.pop("recipe"), **options)
    return 0


def parse(arguments: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Return the settings, and the command's own options."""
    recipe, resumed = leading_recipe(arguments), value_of("--resume", arguments)
    if recipe and resumed:
        raise ConfigError(
            f"--resume takes the settings of the run it resumes; leave out the recipe '{recipe}'"
        )
    source: str | Path = recipe or DEFAULT_RECIPES[Config]
    if resumed:
        from stretto.observe.run_directory import RunDirectory

        source = RunDirectory.open(resumed).config_file
    start = recipes.load(source, checked=bool(resumed))
    config, options = parse_with_config(command_train, "train", arguments, config=start)
    if options["resume"] != (resumed or ""):
        raise ConfigError("--resume was given twice; name one run directory")
    if resumed:
        check_resumable(start, config)
    return config, options


def command_sft(
    config: SftConfig | RewardModelConfig,
    recipe: Annotated[
        str, arg(help=f"{RECIPE_HELP} Without one: defaults.", metavar="RECIPE")
    ] = "",
    /,
    *,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune a language model on demonstrations: rows with conversations (messages), or with a
    prompt and its completion. Only assistant turns are learned, including their end tokens. For
    example: stretto sft --data.name chats.jsonl --model.name smollm2-135m
    """
    if not config.data.name:
        raise ConfigError(
            "data.name is empty: name a file or a hub dataset to train on with --data.name PATH"
        )
    if dry_run:
        from stretto.cli.dry_run import describe_supervised

        print(describe_supervised(config))
        return
    from stretto.api.training import begin, execute

    usual = "sft" if isinstance(config, SftConfig) else "reward"
    execute(begin(config, recipes.name_of(recipe) if recipe else usual))  # type: ignore[type-var,arg-type]


@takes(command_sft, "recipe", "dry_run")
def command_reward(config: RewardModelConfig, recipe: str, /, **options: bool) -> None:
    """Train a reward model on pairs of responses, of which one was preferred (chosen, rejected),
    with a prompt column or a shared beginning. The result is a sequence-classification checkpoint,
    for reward.sources as model:FOLDER. 'stretto reward label' labels pairs instead.
    """
    command_sft(config, recipe, **options)


def run_sft(arguments: Sequence[str]) -> int:
    return call_with_config(command_sft, "sft", arguments, kind=SftConfig)


def run_reward(arguments: Sequence[str]) -> int:
    """Train a reward model and report the results, or label pairs."""
    if arguments and arguments[0] == "label":
        from stretto.cli import evaluate

        return evaluate.run_label(arguments[1:])
    return call_with_config(command_reward, "reward", arguments, kind=RewardModelConfig)


@takes(align, "pairs", "samples", "reference_column")
def command_align(
    recipe: Annotated[str, arg(metavar="RECIPE_OR_FOLDER")] = "",
    /,
    *,
    algorithm: str = "",
    seed: Seed | None = None,
    out: str = "runs",
    resume: str = "",
    dry_run: bool = False,
    **options: Any,
) -> None:
    """Align a model: supervised fine-tuning on demonstrations, a reward model from labelled pairs
    of the tuned model's own responses, and reinforcement learning from the reward model. The gold
    reward that labelled the pairs also evaluates before and after.

    Args:
        recipe: Recipes of all three stages by one name ('posts'), or a folder with sft.toml,
            reward.toml and train.toml, for example of an earlier alignment.
        algorithm: The loss of the last stage. Default: the recipe's.
        seed: Seed of all stages. Default: the recipes'.
        out: Folder in which the stages get their own folder.
        resume: Continue with the stages in this folder, which has their settings; takes no other
            option. Complete stages are not run again.
        dry_run: Resolve names, print derived sizes and the memory plans, and load nothing.
    """
    if resume:
        arguments = {"recipe": recipe, "algorithm": algorithm, "seed": seed, "out": out}
        arguments |= {"dry_run": dry_run, **options}
        defaults = options_of(command_align)
        if any(value != defaults[name].default for name, value in arguments.items()):
            raise ConfigError(
                f"--resume {resume} goes on as it was begun, with the settings in that folder; "
                "leave out the recipe and all other options"
            )
        _show(resume_alignment(resume))
        return
    if not recipe:
        raise ConfigError(
            "name the recipe of all three stages ('stretto align posts'), a folder with their "
            "settings, or a folder to go on with as --resume FOLDER"
        )
    from stretto.cli.dry_run import describe_run, describe_supervised
    from stretto.observe.run_directory import new_folder

    seeded = {} if seed is None else {"seed": seed}
    algorithm_change = {"algorithm__name": algorithm} if algorithm else {}
    stages = stages_of(recipe, sft=seeded, reward=seeded, train=seeded | algorithm_change)
    check_settings(stages)
    if dry_run:
        print("\n".join([*replaced(stages), describe_supervised(stages.sft)]))
        print(describe_supervised(stages.reward.changed_in("data", name="")))
        print(describe_run(stages.train))
        return
    folder = new_folder(Path(out), f"{Path(recipe).name}-align")
    try:
        result = align(stages, folder=folder, **options)
    except BaseException:
        if any(folder.iterdir()):
            print(f"stopped; go on with: stretto align --resume {folder}")
        else:  # nothing was started
            folder.rmdir()
        raise
    _show(result)


def _show(result: Aligned) -> None:
    pairs = result.pairs
    learned = result.reward
    measurement = result.after.measured
    held_out, win = learned.held_out, measurement.win_rate
    assert win
    accuracy = f"held-out accuracy {held_out.accuracy:.3f}" if held_out else "nothing held out"
    print(
        f"reward model: {accuracy}, learned from {pairs.kept} pairs (left out: {pairs.ties} ties, "
        f"{pairs.unended} without an end, {pairs.empty} empty)\n"
        f"missing_eos_penalty of the last stage: {result.penalty:.2f} (the reward model's mean "
        f"{learned.reward_mean:.2f}, standard deviation {learned.reward_std:.2f})\n\n"
        "| | win-rate | gold score | reward model's score | KL, nats a response | perplexity "
        "| tokens | ended |\n"
        "|---|---|---|---|---|---|---|---|\n"
        f"{_row('after SFT', result.before)}\n{_row('after RL', result.after)}\n\n"
        f"Win-rate and gold score by {win.by}, on {measurement.samples} prompts, against reference "
        f"responses (gold score {win.reference_score:.2f}). KL to the SFT model, and its "
        f"perplexity on the responses. Overlap: {measurement.seen}.\n"
        f"all stages are in {result.folder}"
    )


def _row(name: str, outcome: PolicyOutcome) -> str:
    m = outcome.measured
    assert m.kl
    assert m.win_rate
    return (
        f"| {name} | {m.win_rate.rate:.3f} ± {m.win_rate.standard_error:.3f} "
        f"| {m.win_rate.score:.2f} | {outcome.proxy:.2f} | {m.kl.kl:.2f} | {m.kl.perplexity:.2f} "
        f"| {m.mean_tokens:.1f} | {m.ended:.2f} |"
    )


@takes(replay, "to", "from_", "out")
def command_replay(
    run: Annotated[str, arg(metavar="RUN_DIR")],
    /,
    *,
    to: NonNegativeInt = 0,
    from_: NonNegativeInt = 0,
    set_: Mapping[str, Any] | None = None,
    out: str = "",
) -> None:
    """Repeat a run bit for bit from its flight record, in a new folder. The first outcome that
    differs is named with its step, its call and its tensor. Environments and reward functions are
    not asked again: their answers are in the record. With --from, an ordinary run with other
    settings branches off from the replay.

    Args:
        set_: Setting to change in the branch, such as training.lr=1e-5. May be repeated.
    """
    changes = {name.replace(".", "__"): value for name, value in (set_ or {}).items()}
    replay(run, to=to, from_=from_, out=out, **changes)


def command_recipes(recipe: Annotated[tuple[str, ...], arg(metavar="NAME")] = (), /) -> None:
    """List the recipes that commands take by name; 'stretto eval' takes those of 'train'. With a
    name, print that recipe as TOML: stretto recipes tiny > my.toml

    Args:
        recipe: Name of a recipe to print. For commands other than train, the command comes before
            it, as in the list: stretto recipes sft posts
    """
    kinds = {folder or "train": kind for kind, folder in recipes.FOLDERS.items()}
    match recipe:
        case [command, name] if command in kinds:
            print(recipes.text_of(name, kinds[command]), end="")
            return
        case [name]:
            having = [owner for owner, kind in kinds.items() if name in recipes.names(kind)]
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
