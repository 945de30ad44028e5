"""Alignment in three stages: fine-tuning, reward model, reinforcement learning.

This is the controlled experiment of asynchronous RLHF (Noukhovitch et al. 2025, section 3.1) and of
Gao et al. (2022). A gold reward replaces human labels: it labels responses of the fine-tuned model,
a reward model learns from the labels, the policy learns from the reward model, and the gold reward
evaluates the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

from stretto.api import training
from stretto.api.settings import changed, settled
from stretto.config import (
    Config,
    ModelConfig,
    PairsConfig,
    RewardConfig,
    RewardModelConfig,
    SftConfig,
    recipes,
)
from stretto.config.sections import Rows
from stretto.errors import ConfigError, StateError, TaskError
from stretto.files import explained, write_whole
from stretto.interfaces import in_python
from stretto.observe.lock import locked
from stretto.observe.progress import on_stderr
from stretto.signals import ending_in_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stretto.evaluation import LabelResult, Measured
    from stretto.runs import RewardModelResult, SftResult, TrainResult
    from stretto.tasks import TaskRow

T = TypeVar("T")

RESULTS = "align.json"
"""File with the arguments and the results of complete stages, in the folder of all stages."""

_OF_PAIRS = {"split", "size", "prompt_column", "chosen_column", "rejected_column"}
"""Settings that keep their defaults for the labelled pairs."""


class Stages(NamedTuple):
    """Settings of all stages. The last two start from the first one's model. ``reward.sources`` of
    the last is the gold reward, which the learned reward model replaces in training.
    """

    sft: SftConfig
    reward: RewardModelConfig
    train: Config

    @property
    def gold(self) -> str:
        """The gold reward. Raises ConfigError unless there is exactly one."""
        sources = self.train.reward.sources
        if len(sources) != 1:
            raise ConfigError(
                "the gold reward is the one source in reward.sources of the last stage; got "
                f"{sources}",
                "gold-not-one",
            )
        return sources[0]


def stages_of(
    settings: Stages | str | Path,
    *,
    sft: Mapping[str, Any] | None = None,
    reward: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> Stages:
    """Return the changed settings of all stages. See :func:`~stretto.api.alignment.align`."""
    stages = settings if isinstance(settings, Stages) else _read(settings)
    return Stages(
        changed(stages.sft, sft or {}),
        changed(stages.reward, reward or {}),
        changed(stages.train, train or {}),
    )


def _read(name: str | Path) -> Stages:
    recipe_names = [set(recipes.names(kind)) for kind in (SftConfig, RewardModelConfig, Config)]
    complete = sorted(set.intersection(*recipe_names))
    parts: list[str | Path] = [name] * 3
    if str(name) not in complete:
        files = [f"{stage}.toml" for stage in Stages._fields]
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


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """One policy's responses to held-out prompts.

    Attributes:
        measured: win-rate by the gold reward, KL, lengths.
        proxy: mean score of the same responses by the learned reward model.
    """

    measured: Measured
    proxy: float


@dataclass(frozen=True, slots=True)
class Aligned:
    """Results of all stages.

    Attributes:
        folder: folder with those of the stages.
        sft: result of fine-tuning.
        pairs: counts of the labelled pairs.
        reward: result of the reward model's training.
        penalty: ``reward.missing_eos_penalty`` of the last stage, on the reward model's scale.
        policy: folder of the aligned model.
        before: the fine-tuned model on held-out prompts.
        after: the aligned model on the same prompts.
    """

    folder: Path
    sft: SftResult
    pairs: LabelResult
    reward: RewardModelResult
    penalty: float
    policy: Path
    before: PolicyOutcome
    after: PolicyOutcome


@in_python
def align(
    settings: Stages | str | Path,
    *,
    folder: str | Path,
    pairs: Annotated[int, Field(ge=2, le=10**7)] = 600,
    samples: Rows = 200,
    reference_column: str = "",
    sft: Mapping[str, Any] | None = None,
    reward: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> Aligned:
    """Run all stages in run directories inside ``folder``, like ``stretto align``. Inputs of the
    last stage are checked before the first one starts.

    Args:
        settings: the packaged recipes of one name (``"posts"``), a folder with ``sft.toml``,
            ``reward.toml`` and ``train.toml``, or the settings themselves.
        folder: created if necessary. The settings are written into it.
        pairs: Prompts that the tuned model answers twice, for the gold reward to choose.
        samples: Limit of held-out prompts in the evaluation.
        reference_column: Column with the win-rate's reference responses. Default: the task's own
            answers.
        sft, reward, train: changes of each stage's settings, as in :func:`train`.
    """
    stages = stages_of(settings, sft=sft, reward=reward, train=train)
    folder = Path(folder)
    if (folder / RESULTS).exists():
        raise ConfigError(
            f"'{folder}' holds stages of an earlier alignment; go on with it by "
            f"`stretto align --resume {folder}`, or choose another folder",
            "alignment-begun",
        )
    check_settings(stages)
    check_opens(stages, reference_column)
    lines = dict[str, None]()  # usually the same for all three
    tell = lines.setdefault
    stages = Stages(
        settled(stages.sft, tell), settled(stages.reward, tell), settled(stages.train, tell)
    )
    for line in lines:
        on_stderr(line)
    request = {"pairs": pairs, "samples": samples, "reference_column": reference_column}
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with ending_in_order(), locked(folder, print):
        for name, stage in stages._asdict().items():
            write_whole(folder / f"{name}.toml", recipes.dump(stage).encode())
        results = _Results(folder, {"asked": request})
        results.save()
        return _run(stages, results)


@in_python
def resume_alignment(folder: str | Path) -> Aligned:
    """Continue stopped stages, like ``stretto align --resume``.

    Complete stages are not run again. A stopped stage starts again, except that reinforcement
    learning resumes its last checkpoint (``observe.checkpoint_minutes``), if any. Raises StateError
    if results of a stage are missing.
    """
    folder = Path(folder)
    file = folder / RESULTS
    if not file.is_file():
        raise ConfigError(
            f"'{folder}' has no {RESULTS}, so no alignment was begun in it; give the folder of "
            "one that was",
            "no-alignment",
        )
    with ending_in_order(), locked(folder, print):
        stages = stages_of(folder)
        try:
            results = _Results(folder, dict(json.loads(file.read_text(encoding="utf-8"))))
        except ValueError as error:
            raise StateError(f"'{file}' is damaged: {error}; start anew") from error
        return _run(stages, results)


def penalty(learned: RewardModelResult, rule: RewardConfig) -> float:
    """Return ``reward.missing_eos_penalty`` on the scale of a learned reward model.

    The value in the settings is on the gold reward's scale, which a Bradley-Terry model does not
    keep. For 'replace' it is the mean training reward minus two standard deviations, so that an
    unended response is worth as little as the worst ended ones. For 'subtract' it is the deviations
    alone.
    """
    if rule.missing_eos == "off":
        return rule.missing_eos_penalty
    spread = 2 * learned.reward_std
    return spread if rule.missing_eos == "subtract" else learned.reward_mean - spread


class _Results:
    """Arguments and results of complete stages, saved after each stage."""

    def __init__(self, folder: Path, data: dict[str, Any]) -> None:
        self.folder, self._data = folder, data
        self.asked: Mapping[str, Any] = data["asked"]

    def once(self, name: str, kind: type[T], work: Callable[[], T]) -> T:
        adapter = TypeAdapter(kind)
        if name in self._data:
            return adapter.validate_python(self._data[name])
        result = work()
        self._data[name] = adapter.dump_python(result, mode="json")
        self.save()
        return result

    def save(self) -> None:
        write_whole(self.folder / RESULTS, (json.dumps(self._data, indent=2) + "\n").encode())

    def kept(self, path: Path) -> str:
        if not path.exists():
            raise StateError(
                f"'{self.folder / RESULTS}' names '{path}' (looked for from {Path.cwd()}), which "
                "is not there; go on from the folder that it was begun in, or start anew",
                "stage-results-gone",
            )
        return str(path)


def _run(stages: Stages, results: _Results) -> Aligned:
    from stretto.evaluation import LabelResult, Measured, label_responses, measure
    from stretto.runs import RewardModelResult, SftResult, TrainResult

    for line in replaced(stages):
        on_stderr(line)
    folder = results.folder
    request = results.asked
    gold = stages.gold
    sft = changed(stages.sft, {"out": str(folder)})
    tuned = results.once("sft", SftResult, partial(training.sft, sft))
    start = results.kept(tuned.model)
    file, prompts = folder / "pairs.jsonl", request["pairs"]
    label = partial(label_responses, policy=start, by=gold, out=file, prompts=prompts)
    pairs = results.once("pairs", LabelResult, partial(label, stages.train))
    shared = {"out": str(folder), "model__name": start}
    data = PairsConfig(name=results.kept(pairs.out)).model_dump(include={"name", *_OF_PAIRS})
    reward = changed(stages.reward, shared, {"data": data})
    learn = partial(training.train_reward_model, reward)
    learned = results.once("reward", RewardModelResult, learn)
    proxy = f"model:{results.kept(learned.model)}"
    least = penalty(learned, stages.train.reward)
    on_stderr(f"reward.missing_eos_penalty = {least:.4f}, on the learned reward model's scale")

    def reinforce() -> TrainResult:
        begun = folder.glob(f"run-*/checkpoints/step-{'[0-9]' * 6}")
        if runs := [checkpoint.parents[1] for checkpoint in begun]:
            return training.resume(max(runs))
        changes = {"sources": (proxy,), "weights": (), "missing_eos_penalty": least}
        return training.train(changed(stages.train, shared, {"reward": changes}))

    policy = results.once("train", TrainResult, reinforce).model

    samples, column = request["samples"], request["reference_column"]
    look = partial(measure, samples=samples, by=(gold, proxy), sft=start, reference_column=column)

    def outcome(name: str, model: str) -> PolicyOutcome:
        measurement = results.once(name, Measured, partial(look, stages.train, policy=model))
        return PolicyOutcome(measurement, measurement.win_rates[1].score)

    trained = results.kept(policy)
    before, after = outcome("before", start), outcome("after", trained)
    return Aligned(folder, tuned, pairs, learned, least, policy, before, after)


def check_settings(stages: Stages) -> None:
    """Check all settings that can be checked without reading files."""
    task, _ = stages.train.task, stages.gold
    if not task.is_procedural and task.held_out_rows in ("", task.name, task.split):
        raise ConfigError(
            f"task.held_out = {task.held_out!r} of the last stage: what came of it is measured on "
            "prompts that no stage trained on, and a share is left out by the last stage alone. "
            "Set task.held_out to another file, or to another split of the same hub dataset",
            "stages-share-prompts",
        )
    names = {"data.name of sft": stages.sft.data.name, "task.name of train": task.name}
    for setting, name in names.items():
        if not name:
            message = f"{setting}.toml is empty; name a file or a dataset"
            raise ConfigError(message, "stage-without-data")


def replaced(stages: Stages) -> list[str]:
    """Describe the settings that results of earlier stages replace."""
    start = stages.sft.model.name
    replaced_models = {stages.reward.model.name, stages.train.model.name} - {start}
    lines = [f"what '{start}' becomes in the first stage is the model of the others too"]
    if replaced_models:
        lines[0] += f", in place of {', '.join(sorted(replaced_models))}"
    if stages.reward.data.name:
        lines.append(
            f"the reward model learns from pairs that {stages.gold} labels, in place of "
            f"{stages.reward.data.name}"
        )
    return lines


def check_opens(stages: Stages, reference_column: str = "") -> None:
    """Open the later stages' inputs, and check that all stages tokenize prompts alike."""
    from stretto import tasks
    from stretto.assembly.roles import RoleFactory
    from stretto.evaluation.gold import open_gold, reference_text
    from stretto.evaluation.measures import measured_on
    from stretto.models.load import load_tokenizer
    from stretto.models.resolve import resolve

    def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
        return load_tokenizer(resolve(model.name, on_stderr), model.trust_remote_code, on_stderr)

    start = stages.sft.model.name
    tokenizer = tokenizer_of(stages.sft.model)
    for stage in (stages.reward, stages.train):
        if (name := stage.model.name) != start:
            # Tokens may have been added (for example for padding), so one may contain the other.
            ours, theirs = (
                tokenizer.get_vocab().items(),
                tokenizer_of(stage.model).get_vocab().items(),
            )
            if not (ours <= theirs or theirs <= ours):
                raise ConfigError(
                    f"all stages start from one model, '{start}' of sft.toml, and '{name}' "
                    "has another tokenizer: it was meant for another model. Name the same one in "
                    "all three",
                    "stages-differ-in-tokenizer",
                )
    config = stages.train.with_model(start)
    eval_config = measured_on(config)
    task = tasks.load(config.task, config.seed)
    questions = tasks.load(eval_config.task, eval_config.seed)
    first = questions.first.data
    row = {**first, tasks.INDEX_KEY: questions.indices[0]}
    reference_text(questions, row, reference_column)
    _check_layouts(stages, task.first, tokenizer)
    columns = task.first.data.keys() & first.keys()
    with ExitStack() as stack:
        open_gold(stages.gold, RoleFactory(eval_config, on_stderr), columns, tokenizer, stack)


def _check_layouts(stages: Stages, row: TaskRow, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that fine-tuning and the reward model tokenize a prompt like the policy."""
    from stretto.tasks.prompts import render
    from stretto.tasks.responses import PromptLayout

    task, ends = stages.train.task, frozenset({tokenizer.eos_token_id})
    prompt = render(row, task, tokenizer)
    reward_prompt = prompt.messages or prompt.text
    sft_prompt = reward_prompt[1:] if task.system and prompt.messages else reward_prompt
    for stage, data, text in (
        ("sft", stages.sft.data, sft_prompt),
        ("reward", stages.reward.data, reward_prompt),
    ):
        ours = f"task.chat = '{task.chat}', task.system = '{task.system}'"
        theirs = f"data.chat = '{data.chat}', data.system = '{data.system}' of {stage}.toml"
        try:
            stage_prompt = PromptLayout(tokenizer, ends, data).prompt(text)
        except TaskError as error:
            raise ConfigError(
                f"{theirs} does not fit {ours} of train.toml, whose prompts that stage reads: "
                f"{error}",
                "stages-differ-in-prompts",
            ) from error
        if stage_prompt.tokens != prompt.tokens:
            raise ConfigError(
                f"all stages read a prompt alike. With {theirs} it is "
                f"{stage_prompt.text[-200:]!r}, with {ours} of train.toml {prompt.text[-200:]!r}. "
                "Set chat and system alike",
                "stages-differ-in-prompts",
            )
