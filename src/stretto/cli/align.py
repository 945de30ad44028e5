"""``stretto align``: from demonstrations to an aligned model, in three stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from stretto.api.alignment import (
    Aligned,
    PolicyOutcome,
    align,
    check_settings,
    replaced,
    resume_alignment,
    stages_of,
)
from stretto.cli.compare import new_folder
from stretto.cli.dry_run import describe_run, describe_supervised
from stretto.errors import ConfigError


def command(
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
        if own != ("", "", 600, 200, "", None, "runs", False):
            raise ConfigError(
                f"--resume {resume} goes on as it was begun, with the settings in that folder; "
                "leave out the recipe and all other options"
            )
        return _show(resume_alignment(resume))
    if not recipe:
        raise ConfigError(
            "name the recipe of all three stages ('stretto align posts'), a folder with their "
            "settings, or a folder to go on with as --resume FOLDER"
        )
    seeded = {} if seed is None else {"seed": seed}
    chosen = {"algorithm__name": algorithm} if algorithm else {}
    stages = stages_of(recipe, sft=seeded, reward=seeded, train=seeded | chosen)
    check_settings(stages, pairs, samples)
    if dry_run:
        print("\n".join(replaced(stages)))
        print(describe_supervised(stages.sft))
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
