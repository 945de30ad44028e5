"""The settings of the three stages of alignment, and what they must agree on.

What the last stage needs is looked at before the first one starts: hours may lie between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.settings import changed
from stretto.config import (
    Config,
    ModelConfig,
    RewardModelConfig,
    RowsConfig,
    Section,
    SftConfig,
    recipes,
)
from stretto.errors import ConfigError, TaskError
from stretto.files import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stretto.types import Message, Prompt

NAMES = ("sft", "reward", "train")

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Stages:
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
        """The gold reward.

        Raises:
            ConfigError: there is not exactly one.
        """
        sources = self.train.reward.sources
        if len(sources) != 1:
            raise ConfigError(
                "the gold reward is the one source in reward.sources of the last stage; got "
                f"{sources}"
            )
        return sources[0]

    def write(self, folder: Path) -> None:
        """Write the settings into a folder, for :func:`stages_of` to read."""
        for name, settings in zip(NAMES, (self.sft, self.reward, self.train), strict=True):
            write_whole(folder / f"{name}.toml", recipes.dump(settings).encode())


def stages_of(
    settings: Stages | str | Path,
    *,
    sft: Mapping[str, Any] = NOTHING,
    reward: Mapping[str, Any] = NOTHING,
    train: Mapping[str, Any] = NOTHING,
) -> Stages:
    """The settings of all stages, changed.

    Args:
        settings: the packaged recipes of one name, or a folder with ``sft.toml``, ``reward.toml``
            and ``train.toml``, such as an earlier alignment left.
        sft, reward, train: changes of each; see :mod:`stretto.api`.

    Raises:
        ConfigError: one of them is missing or wrong.
    """
    found = settings if isinstance(settings, Stages) else _read(settings)
    return Stages(
        changed(found.sft, sft), changed(found.reward, reward), changed(found.train, train)
    )


def _read(name: str | Path) -> Stages:
    kinds: tuple[type[Section], ...] = (SftConfig, RewardModelConfig, Config)
    complete = [n for n in recipes.names() if all(n in recipes.names(kind) for kind in kinds)]
    parts: list[str | Path] = [name] * len(kinds)
    if str(name) not in complete:
        parts = [Path(name) / f"{stage}.toml" for stage in NAMES]
        if not Path(name).is_dir():
            raise ConfigError(
                f"'{name}' has no recipe for each of the three stages, as {', '.join(complete)} "
                f"has. Or give a folder with {', '.join(f'{stage}.toml' for stage in NAMES)}"
            )
    return Stages(
        sft=recipes.load(parts[0], SftConfig),
        reward=recipes.load(parts[1], RewardModelConfig),
        train=recipes.load(parts[2], Config),
    )


def check_settings(stages: Stages, pairs: int, samples: int) -> None:
    """Check the settings as far as possible without reading any files.

    Raises:
        ConfigError: see the messages.
    """
    for option, value, least in (("pairs", pairs, 2), ("samples", samples, 1)):
        if value < least:
            raise ConfigError(f"{option} = {value}: must be {least} or more")
    task, _ = stages.train.task, stages.gold
    if not task.is_procedural and task.held_out_rows in ("", task.name, task.split):
        raise ConfigError(
            f"task.held_out = {task.held_out!r} of the last stage: what came of it is measured on "
            "prompts that no stage trained on, and a share is left out by the last stage alone. "
            "Set task.held_out to another file, or to another split of the same hub dataset"
        )
    for stage, name, section in (
        ("sft", stages.sft.data.name, "data"),
        ("train", task.name, "task"),
    ):
        if not name:
            raise ConfigError(f"{section}.name of {stage}.toml is empty; name a file or a dataset")


def replaced(stages: Stages) -> list[str]:
    """Lines that say which settings are replaced by results of earlier stages."""
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

    Rows, reference responses and the gold reward are opened.

    Args:
        reference_column: see :func:`stretto.measure`.

    Raises:
        StrettoError: one of these cannot be had, or the stages differ.
    """
    from stretto import tasks
    from stretto.evaluation.answers import of_model
    from stretto.evaluation.gold import open_gold, reference_text
    from stretto.evaluation.measures import measured_on
    from stretto.models.load import load_tokenizer
    from stretto.models.resolve import resolve
    from stretto.observe.progress import on_stderr

    def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
        return load_tokenizer(resolve(model.name, on_stderr), model.trust_remote_code, on_stderr)

    tokenizer = tokenizer_of(stages.sft.model)
    for model in (stages.reward.model, stages.train.model):
        if model.name != stages.sft.model.name:
            _check_base(tokenizer, tokenizer_of(model), model.name, stages.sft.model.name)
    config = of_model(stages.train, stages.sft.model.name)
    measured = measured_on(config)
    task = tasks.load(config.task, config.seed)
    questions = tasks.load(measured.task, measured.seed)
    first = questions.row(0).data
    reference_text(questions, {**first, tasks.INDEX_KEY: 0}, reference_column)
    _check_layouts(stages, task.row(0), tokenizer)
    columns = task.row(0).data.keys() & first.keys()
    with ExitStack() as stack:
        open_gold(stages.gold, measured, columns, tokenizer, stack)


def _check_base(
    start: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str, start_name: str
) -> None:
    """Check that one vocabulary holds the other, as tokens may be added (such as for padding)."""
    ours, theirs = start.get_vocab().items(), other.get_vocab().items()
    if not (ours <= theirs or theirs <= ours):
        raise ConfigError(
            f"all stages start from one model, '{start_name}' of sft.toml, and '{name}' has "
            "another tokenizer: it was meant for another model. Name the same one in all three"
        )


def _check_layouts(stages: Stages, row: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the first stage and the reward model read a prompt as the policy will."""
    from stretto.tasks.prompts import render

    task = stages.train.task
    prompt = render(row, task, tokenizer)
    labelled: str | tuple[Message, ...] = prompt.messages or prompt.text
    own = labelled[1:] if task.system and prompt.messages else labelled
    for stage, data, given in (
        ("sft", stages.sft.data, own),
        ("reward", stages.reward.data, labelled),
    ):
        ours = f"task.chat = '{task.chat}', task.system = '{task.system}'"
        theirs = f"data.chat = '{data.chat}', data.system = '{data.system}' of {stage}.toml"
        try:
            found = _laid_out(given, data, tokenizer)
        except TaskError as error:
            raise ConfigError(
                f"{theirs} does not fit {ours} of train.toml, whose prompts that stage reads: "
                f"{error}"
            ) from error
        if found.tokens != prompt.tokens:
            raise ConfigError(
                f"all stages read a prompt alike. With {theirs} it is {found.text[-200:]!r}, with "
                f"{ours} of train.toml {prompt.text[-200:]!r}. Set chat and system alike"
            )


def _laid_out(
    prompt: str | tuple[Message, ...], data: RowsConfig, tokenizer: PreTrainedTokenizerBase
) -> Prompt:
    from stretto.tasks.responses import PromptLayout

    ends = frozenset({tokenizer.eos_token_id})
    return PromptLayout(tokenizer, ends, data).prompt(prompt)
