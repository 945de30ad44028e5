"""Three stages from demonstrations to an aligned model, and what came of it.

The controlled experiment of asynchronous RLHF (Noukhovitch et al. 2025, section 3.1) and of Gao et
al. (2022): a gold reward stands for people. It labels what the fine-tuned model says, a reward
model learns from the labels, the policy learns from the reward model, and the gold reward judges
the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from stretto.api import training
from stretto.api.settings import changed, settled
from stretto.api.stages import NOTHING, Stages, check_opens, check_settings, replaced, stages_of
from stretto.config import Config, RewardConfig
from stretto.errors import ConfigError, StateError
from stretto.files import explained, write_whole
from stretto.observe.lock import locked
from stretto.signals import ending_in_order

if TYPE_CHECKING:
    from stretto.evaluation import LabelResult, Measured
    from stretto.runs import RewardModelResult, SftResult, TrainResult

T = TypeVar("T")

RECORD = "align.json"
"""File in the folder of all stages: the arguments, and the result of each stage that has ended."""

PAIRS = {
    "split": "train",
    "size": 0,
    "prompt_column": "prompt",
    "chosen_column": "chosen",
    "rejected_column": "rejected",
}
"""Settings with which the labelled pairs are read."""


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
        folder: that the stages have their folders in.
        sft: what fine-tuning left.
        pairs: counts of the labelled pairs.
        reward: the learned reward model.
        penalty: ``reward.missing_eos_penalty`` of the last stage, on the reward model's scale.
        policy: folder of the aligned model.
        before: the fine-tuned model on held-out prompts.
        after: the aligned model on the same.
    """

    folder: Path
    sft: SftResult
    pairs: LabelResult
    reward: RewardModelResult
    penalty: float
    policy: Path
    before: PolicyOutcome
    after: PolicyOutcome


def align(
    settings: Stages | str | Path,
    *,
    folder: str | Path,
    pairs: int = 600,
    samples: int = 200,
    reference_column: str = "",
    sft: Mapping[str, Any] = NOTHING,
    reward: Mapping[str, Any] = NOTHING,
    train: Mapping[str, Any] = NOTHING,
) -> Aligned:
    """Run all stages, each in a run directory of its own inside ``folder``; what ``stretto align``
    does. What the last stage needs is looked at before the first one starts.

    Args:
        settings: the packaged recipes of one name (``"posts"``), a folder with ``sft.toml``,
            ``reward.toml`` and ``train.toml``, or the settings themselves.
        folder: is made if it is not there; the settings are written into it.
        pairs: prompts that the fine-tuned model answers twice, for the gold reward to choose.
        samples: held-out prompts to evaluate on, at most.
        reference_column: with the responses to win against; empty takes the task's own answers.
        sft, reward, train: changes of the settings of each stage; as in :func:`train`.

    Raises:
        StrettoError: a setting, a model, the data, a judge, the numbers or the disk are at fault;
            or another process is at work in the folder.
    """
    from stretto.observe.progress import on_stderr

    stages = stages_of(settings, sft=sft, reward=reward, train=train)
    folder = Path(folder)
    if (folder / RECORD).exists():
        raise ConfigError(
            f"'{folder}' holds stages of an earlier alignment; go on with it by --resume {folder} "
            "(resume_alignment in Python), or choose another folder"
        )
    check_settings(stages, pairs, samples)
    check_opens(stages, reference_column)
    lines = dict[str, None]()  # the same of all three, as a rule
    tell = lines.setdefault
    stages = Stages(
        settled(stages.sft, tell), settled(stages.reward, tell), settled(stages.train, tell)
    )
    for line in lines:
        on_stderr(line)
    asked = {"pairs": pairs, "samples": samples, "reference_column": reference_column}
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with ending_in_order(), locked(folder, print):
        stages.write(folder)
        return _Alignment(stages, _Record.begin(folder, asked)).run()


def resume_alignment(folder: str | Path) -> Aligned:
    """Go on with stages that were stopped; what ``stretto align --resume`` does.

    Stages that ended are not run again. One that was stopped begins anew, but for reinforcement
    learning that has written a checkpoint (``observe.checkpoint_minutes``), which goes on from the
    last one.

    Raises:
        ConfigError: it is no such folder.
        StateError: what a stage left is not there any more.
        StorageError: another process is at work in it, or it cannot be written to.
    """
    folder = Path(folder)
    if not (folder / RECORD).is_file():
        raise ConfigError(
            f"'{folder}' has no {RECORD}, so no alignment was begun in it; give the folder that "
            "'stretto align' made"
        )
    with ending_in_order(), locked(folder, print):
        return _Alignment(stages_of(folder), _Record.open(folder)).run()


def penalty(learned: RewardModelResult, rule: RewardConfig) -> float:
    """``reward.missing_eos_penalty`` on the scale of a learned reward model.

    The settings' own is on the gold reward's scale, which a Bradley-Terry model does not keep.

    Args:
        learned: whose rewards have a mean and a standard deviation, measured in its training.

    Returns:
        for 'replace' the mean less two standard deviations: a response without an end is worth as
        little as the worst ones that do end. For 'subtract' the two standard deviations.
    """
    if rule.missing_eos == "off":
        return rule.missing_eos_penalty
    spread = 2 * learned.reward_std
    return spread if rule.missing_eos == "subtract" else learned.reward_mean - spread


class _Record:
    """Arguments, and results of the stages that have ended; written to disk after each stage."""

    def __init__(self, folder: Path, data: dict[str, Any]) -> None:
        self.folder, self._data = folder, data

    @classmethod
    def begin(cls, folder: Path, asked: Mapping[str, Any]) -> _Record:
        record = cls(folder, {"asked": dict(asked)})
        record._save()
        return record

    @classmethod
    def open(cls, folder: Path) -> _Record:
        file = folder / RECORD
        try:
            return cls(folder, dict(json.loads(file.read_text(encoding="utf-8"))))
        except ValueError as error:
            raise StateError(f"'{file}' is damaged: {error}; start anew") from error

    @property
    def asked(self) -> Mapping[str, Any]:
        """The arguments of :func:`align` that are no settings."""
        asked: Mapping[str, Any] = self._data["asked"]
        return asked

    def once(self, name: str, kind: type[T], work: Callable[[], T]) -> T:
        """Return the result of ``work``, which runs only if none is recorded yet."""
        adapter = TypeAdapter(kind)
        if name in self._data:
            return adapter.validate_python(self._data[name])
        result = work()
        self._data[name] = adapter.dump_python(result, mode="json")
        self._save()
        return result

    def _save(self) -> None:
        write_whole(self.folder / RECORD, (json.dumps(self._data, indent=2) + "\n").encode())


class _Alignment:
    """The stages, one after another."""

    def __init__(self, stages: Stages, record: _Record) -> None:
        self._stages, self._record, self._folder = stages, record, record.folder
        self._out = {"out": str(record.folder)}

    def run(self) -> Aligned:
        """Do what is not done yet."""
        from stretto.evaluation import LabelResult
        from stretto.observe.progress import on_stderr
        from stretto.runs import RewardModelResult, SftResult, TrainResult

        for line in replaced(self._stages):
            on_stderr(line)
        once = self._record.once
        tuned = once("sft", SftResult, self._tune)
        start = self._there(tuned.model)
        labelled = once("pairs", LabelResult, lambda: self._label(start))
        pairs = self._there(labelled.out)
        learned = once("reward", RewardModelResult, lambda: self._learn_reward(start, pairs))
        proxy = f"model:{self._there(learned.model)}"
        least = penalty(learned, self._stages.train.reward)
        on_stderr(f"reward.missing_eos_penalty = {least:.4f}, on the learned reward model's scale")
        result = once("train", TrainResult, lambda: self._reinforce(start, proxy, least))
        policy = self._there(result.model)
        before, after = (
            self._outcome(name, model, proxy, start)
            for name, model in (("before", start), ("after", policy))
        )
        return Aligned(self._folder, tuned, labelled, learned, least, result.model, before, after)

    def _tune(self) -> SftResult:
        return training.sft(changed(self._stages.sft, self._out))

    def _label(self, start: str) -> LabelResult:
        from stretto.evaluation import label_responses

        return label_responses(
            self._stages.train,
            policy=start,
            by=self._stages.gold,
            out=self._folder / "pairs.jsonl",
            prompts=self._record.asked["pairs"],
        )

    def _learn_reward(self, start: str, pairs: str) -> RewardModelResult:
        data = {**PAIRS, "name": pairs}
        changes = {**self._out, "model__name": start, "data": data}
        return training.train_reward_model(changed(self._stages.reward, changes))

    def _reinforce(self, start: str, proxy: str, least: float) -> TrainResult:
        begun = self._folder.glob(f"run-*/checkpoints/step-{'[0-9]' * 6}")
        if runs := [checkpoint.parents[1] for checkpoint in begun]:
            return training.resume(max(runs))
        reward = {"sources": (proxy,), "weights": (), "missing_eos_penalty": least}
        changes = {**self._out, "model__name": start, "reward": reward}
        return training.train(changed(self._stages.train, changes))

    def _outcome(self, name: str, policy: str, proxy: str, start: str) -> PolicyOutcome:
        from stretto.evaluation import Measured, measure

        config: Config = self._stages.train
        asked = self._record.asked
        measured = self._record.once(
            name,
            Measured,
            lambda: measure(
                config,
                policy=policy,
                samples=asked["samples"],
                by=(self._stages.gold, proxy),
                sft=start,
                reference_column=asked["reference_column"],
            ),
        )
        return PolicyOutcome(measured, measured.win_rates[1].score)

    def _there(self, path: Path) -> str:
        """Return the path of what a stage left.

        Raises:
            StateError: it is not there any more.
        """
        if not path.exists():
            raise StateError(
                f"'{self._folder / RECORD}' names '{path}' (looked for from {Path.cwd()}), which "
                "is not there; go on from the folder that it was begun in, or start anew"
            )
        return str(path)
