"""The settings of the three stages of alignment, and what they must agree on.

What the last stage needs is looked at before the first one starts: hours may lie between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stretto.api.settings import changed
from stretto.config import Config, ModelConfig, RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError, TaskError
from stretto.files import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stretto.tasks import TaskRow


class Stages(NamedTuple):
    """The settings of all stages.

    Attributes:
        sft: of the first stage, whose model the other two start from.
        reward: of the reward model, which learns from pairs that the gold reward labels.
        train: of the last stage; its ``reward.sources`` is the gold reward, whose place the learned
            reward model takes.
    """

    sft: SftConfig
    reward: RewardModelConfig
    train: Config

    @property
    def gold(self) -> str:
        """The gold reward; raises ConfigError unless there is exactly one."""
        sources = self.train.reward.sources
        if len(sources) != 1:
            raise ConfigError(
                "the gold reward is the one source in reward.sources of the last stage; got "
                f"{sources}",
                "gold-not-one",
            )
        return sources[0]

    def write(self, folder: Path) -> None:
        """Write the settings into a folder, for :func:`stages_of` to read."""
        for name, settings in self._asdict().items():
            write_whole(folder / f"{name}.toml", recipes.dump(settings).encode())


def stages_of(
    settings: Stages | str | Path,
    *,
    sft: Mapping[str, Any] | None = None,
    reward: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> Stages:
    """Return the settings of all stages, changed; see :func:`~stretto.api.alignment.align`."""
    found = settings if isinstance(settings, Stages) else _read(settings)
    return Stages(
        changed(found.sft, sft or {}),
        changed(found.reward, reward or {}),
        changed(found.train, train or {}),
    )


def _read(name: str | Path) -> Stages:
    kinds = (SftConfig, RewardModelConfig, Config)
    complete = [n for n in recipes.names() if all(n in recipes.names(kind) for kind in kinds)]
    files = [f"{stage}.toml" for stage in Stages._fields]
    parts: list[str | Path] = [name] * len(kinds)
    if str(name) not in complete:
        parts = [Path(name) / file for file in files]
        if not Path(name).is_dir():
            raise ConfigError(
                f"'{name}' has no recipe for each of the three stages, as {', '.join(complete)} "
                f"has. Or give a folder with {', '.join(files)}",
                "no-recipe-of-stages",
            )
    sft, reward, train = parts
    return Stages(
        recipes.load(sft, SftConfig), recipes.load(reward, RewardModelConfig), recipes.load(train)
    )


def check_settings(stages: Stages, pairs: int, samples: int) -> None:
    """Check the settings as far as possible without reading any files."""
    for option, value, least in (("pairs", pairs, 2), ("samples", samples, 1)):
        if value < least:
            raise ConfigError(f"{option} = {value}: must be {least} or more", "too-few")
    task, _ = stages.train.task, stages.gold
    if not task.is_procedural and task.held_out_rows in ("", task.name, task.split):
        raise ConfigError(
            f"task.held_out = {task.held_out!r} of the last stage: what came of it is measured on "
            "prompts that no stage trained on, and a share is left out by the last stage alone. "
            "Set task.held_out to another file, or to another split of the same hub dataset",
            "stages-share-prompts",
        )
    for setting, name in (
        ("data.name of sft", stages.sft.data.name),
        ("task.name of train", task.name),
    ):
        if not name:
            raise ConfigError(
                f"{setting}.toml is empty; name a file or a dataset", "stage-without-data"
            )


def replaced(stages: Stages) -> list[str]:
    """Return lines that say which settings are replaced by results of earlier stages."""
    start = stages.sft.model.name
    others = {stages.reward.model.name, stages.train.model.name} - {start}
    lines = [f"what '{start}' becomes in the first stage is the model of the others too"]
    if others:
        lines[0] += f", in place of {', '.join(sorted(others))}"
    if stages.reward.data.name:
        lines.append(
            f"the reward model learns from pairs that {stages.gold} labels, in place of "
            f"{stages.reward.data.name}"
        )
    return lines


def check_opens(stages: Stages, reference_column: str = "") -> None:
    """Check what the later stages read, and that all stages read prompts alike.

    Rows, reference responses (see :func:`stretto.measure`) and the gold reward are opened.
    """
    from stretto import tasks
    from stretto.evaluation.answers import of_model
    from stretto.evaluation.gold import open_gold, reference_text
    from stretto.evaluation.rows import measured_on
    from stretto.models.load import load_tokenizer
    from stretto.models.resolve import resolve
    from stretto.observe.progress import on_stderr

    def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
        return load_tokenizer(resolve(model.name, on_stderr), model.trust_remote_code, on_stderr)

    start = stages.sft.model.name
    tokenizer = tokenizer_of(stages.sft.model)
    for model in (stages.reward.model, stages.train.model):
        if model.name != start:
            # One vocabulary holds the other, as tokens may be added (such as for padding).
            ours, theirs = tokenizer.get_vocab().items(), tokenizer_of(model).get_vocab().items()
            if not (ours <= theirs or theirs <= ours):
                raise ConfigError(
                    f"all stages start from one model, '{start}' of sft.toml, and '{model.name}' "
                    "has another tokenizer: it was meant for another model. Name the same one in "
                    "all three",
                    "stages-differ-in-tokenizer",
                )
    config = of_model(stages.train, start)
    measured = measured_on(config)
    task = tasks.load(config.task, config.seed)
    questions = tasks.load(measured.task, measured.seed)
    first = questions.row(0).data
    reference_text(questions, {**first, tasks.INDEX_KEY: 0}, reference_column)
    _check_layouts(stages, task.row(0), tokenizer)
    columns = task.row(0).data.keys() & first.keys()
    with ExitStack() as stack:
        open_gold(stages.gold, measured, columns, tokenizer, stack)


def _check_layouts(stages: Stages, row: TaskRow, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the first stage and the reward model read a prompt as the policy will."""
    from stretto.tasks.prompts import render
    from stretto.tasks.responses import PromptLayout

    task, ends = stages.train.task, frozenset({tokenizer.eos_token_id})
    prompt = render(row, task, tokenizer)
    labelled = prompt.messages or prompt.text
    own = labelled[1:] if task.system and prompt.messages else labelled
    for stage, data, text in (
        ("sft", stages.sft.data, own),
        ("reward", stages.reward.data, labelled),
    ):
        ours = f"task.chat = '{task.chat}', task.system = '{task.system}'"
        theirs = f"data.chat = '{data.chat}', data.system = '{data.system}' of {stage}.toml"
        try:
            found = PromptLayout(tokenizer, ends, data).prompt(text)
        except TaskError as error:
            raise ConfigError(
                f"{theirs} does not fit {ours} of train.toml, whose prompts that stage reads: "
                f"{error}",
                "stages-differ-in-prompts",
            ) from error
        if found.tokens != prompt.tokens:
            raise ConfigError(
                f"all stages read a prompt alike. With {theirs} it is {found.text[-200:]!r}, with "
                f"{ours} of train.toml {prompt.text[-200:]!r}. Set chat and system alike",
                "stages-differ-in-prompts",
            )
