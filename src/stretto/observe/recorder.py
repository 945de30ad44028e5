"""Records, display and trackers of a run behind one call a step, and remarks on its rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from stretto.config import Config, RewardConfig, SupervisedConfig
from stretto.config.sections import MISSING_EOS
from stretto.observe.display import THROUGHPUT, Progress
from stretto.observe.idle import TimeSheet
from stretto.observe.run_directory import RunDirectory, Sample
from stretto.observe.spans import Window
from stretto.observe.trackers import TrackedRun, open_trackers, send
from stretto.outside import describe
from stretto.schedules.episode_metrics import calls
from stretto.schedules.rollout import Rollout
from stretto.types import FinishReason, Stats, short_name

AGAIN = 10  # Steps until a remark that still holds is repeated. The pause doubles each time.


class Recorder(ExitStack):
    """Writes a run's records, shows them, and sends them to the trackers.

    Leaving it, even by Ctrl-C, closes trackers and display, even if one of them raises. Raises
    MissingExtraError if a tracker's library is not installed, StateError if the records of a
    resumed run are damaged, and StorageError, also later, if a record cannot be written.

    Args:
        run: where the records go.
        resumed_step: the last step of the resumed checkpoint, 0 for a new run. Records of later
            steps are dropped, because those steps will be taken again.
        total: steps of the run if ``config.steps`` does not have them.
    """

    def __init__(
        self,
        config: Config | SupervisedConfig,
        run: RunDirectory,
        progress: Progress,
        *,
        resumed_step: int = 0,
        total: int = 0,
    ) -> None:
        super().__init__()
        self._shown, self._total = config.observe.samples, total or config.steps
        self._run, self._progress = run, progress
        self.note = progress.note  # shows a line
        run.trace.note = self.note
        if torn_files := run.rewind(resumed_step):
            self.note(f"dropped a last line that was never finished, of {', '.join(torn_files)}")
        records = run.read_metrics()
        self._time_s = float(records[-1].get("time_s") or 0.0) if records else 0.0
        self._tracing = True
        self._time_sheet = TimeSheet()
        self._remarks = None
        if isinstance(config, Config):
            a = config.algorithm
            self._remarks = Remarks(
                config.reward,
                config.rollout.max_new_tokens,
                rewards_train=not a.teacher_models or a.reward_coef > 0,
            )
        tracked_run = TrackedRun(run.name, run.path, config.model_dump(), resumed_step)
        self._trackers = open_trackers(config.observe, tracked_run)
        self.callback(progress.close)
        for tracker in self._trackers.values():
            self.callback(tracker.finish)

    def step(
        self,
        step: int,
        stats: Stats,
        samples: Sequence[Sample] = (),
        *,
        window: Window | None = None,
        rollouts: Sequence[Rollout] = (),
        rewards: Mapping[int, float] | None = None,
    ) -> None:
        """Record step number ``step`` (the first is 1), and remark on its rewards if necessary.

        Args:
            samples: responses of the step, of which the first ``observe.samples`` are kept.
            window: spans since the step before. It adds metrics: ``time_s``, seconds since the
                run's start, busy and idle time of each role, and the throughput of a device.
            rollouts: those that ended with the step, trained and rejected ones.
            rewards: of the trained ones, by rollout id.
        """
        rewards = rewards or {}
        if window is not None:
            if self._tracing and not self._run.trace.append(
                step, window, self._time_s, stats, [rollout.id for rollout in rollouts]
            ):
                self._tracing = False
                self.note(f"{self._run.trace.path} is as long as viewers can open, and ends here")
            self._time_s += window.end_s - window.start_s
            stats = {**stats, "time_s": self._time_s, **self._time_sheet.add(window)}
            if window.devices and THROUGHPUT in stats:
                count = len(set(window.devices.values()))
                stats[f"{THROUGHPUT}_per_device"] = stats[THROUGHPUT] / count
        self._run.append_rollouts(step, rollouts, rewards)
        first_samples = samples[: self._shown]
        self._run.append_samples(step, first_samples)
        # Metrics come last, so that a step with metrics has all its records.
        self._run.append_metrics(step, stats)
        for name, tracker in list(self._trackers.items()):
            try:
                send(tracker, step, stats, first_samples)
            except Exception as error:  # for example, a lost server must not end the run
                del self._trackers[name]
                self.note(
                    f"step {step}: the tracker '{name}' failed and gets no further metrics, which "
                    f"metrics.jsonl has: {describe(error, None)}"
                )
        self._progress.step(step, self._total, stats, first_samples)
        batch = [r for r in rollouts if r.id in rewards]
        if self._remarks and batch:
            for text in self._remarks.of(step, batch, rewards):
                self.note(text)

    def where_time_went(self) -> str:
        return self._time_sheet.table()


LIMITS = {
    "tokens": "rollout.max_new_tokens",
    "turn_tokens": "environment.max_turn_tokens",
    "turns": "environment.max_turns",
    "seconds": "environment.max_seconds",
}
"""The setting behind each limit that ends an episode."""


class Remarks:
    """Remarks on facts that the mean reward hides. Must be called after every step."""

    def __init__(
        self, reward: RewardConfig, max_new_tokens: int, *, rewards_train: bool = True
    ) -> None:
        self._reward, self._limit = reward, max_new_tokens
        self._rewards_train = rewards_train
        self._first = True
        self._told = set[str]()  # tools already reported to fail
        self._next = {"cut": 0, "one reward": 0}
        self._pause = dict.fromkeys(self._next, AGAIN)

    def of(self, step: int, batch: Sequence[Rollout], rewards: Mapping[int, float]) -> list[str]:
        """Return remarks to show after a step. Cut responses are counted at the first step, and
        later if they are at least half of the batch. Tools and environments whose calls all fail
        are named once. ``rewards`` are by rollout id, after the missing-EOS rule."""
        failing = [f"step {step}: {text}" for text in self._failing(batch)]
        return [*failing, *self._on_rewards(step, batch, rewards)]

    def _failing(self, batch: Sequence[Rollout]) -> Iterator[str]:
        calls_by_name: dict[str, list[Mapping[str, Any]]] = {}
        observations = [o for rollout in batch for o in rollout.log]
        steps = sum(o.number > 0 and not list(calls(o)) for o in observations)  # successful ones
        for call in (call for o in observations for call in calls(o)):
            if call.get("status") == "ok":
                calls_by_name.setdefault(str(call.get("name")), []).append(call)
        for name, group in calls_by_name.items():
            errors = [str(call["error"]) for call in group if call.get("error")]
            successes = steps if name == "step" else 0
            if len(errors) == len(group) + successes > 1 and name not in self._told:
                self._told.add(name)
                yield f"{name}: {len(errors)} of {len(group)} calls failed. The first: {errors[0]}"

    def _on_rewards(
        self, step: int, batch: Sequence[Rollout], rewards: Mapping[int, float]
    ) -> list[str]:
        cut = [r for r in batch if r.finish is FinishReason.LENGTH]
        first, self._first = self._first, False
        equal = len(batch) > 1 and len({rewards[r.id] for r in batch}) == 1
        if equal and self._rewards_train:
            if not self._due("one reward", step):
                return []
            if cut:
                self._due("cut", step)  # already in this remark
            return [f"step {step}: {self._one_reward(batch, cut, rewards[batch[0].id])}"]
        if cut and (first or 2 * len(cut) >= len(batch)) and self._due("cut", step):
            return [f"step {step}: {self._cut(cut, len(batch))}"]
        return []

    def _due(self, what: str, step: int) -> bool:
        if step < self._next[what]:
            return False
        self._next[what] = step + self._pause[what]
        self._pause[what] *= 2
        return True

    def _cut(self, cut: Sequence[Rollout], of: int) -> str:
        rule, limit = self._reward, f"rollout.max_new_tokens = {self._limit}"
        count_by_limit = Counter(LIMITS.get(rollout.ended_by, "") for rollout in cut)
        cuts = f"{len(cut)} of {of} responses were cut at {limit}"
        if not count_by_limit[""]:
            breakdown = ", ".join(f"{n} by {limit}" for limit, n in count_by_limit.most_common())
            cuts = f"{len(cut)} of {of} episodes were ended by a limit ({breakdown})"
        if rule.missing_eos == "off" and MISSING_EOS in rule.sources:
            return f"{cuts}; the source '{MISSING_EOS}' takes the penalty off those without an end"
        if rule.missing_eos == "off":
            return f"{cuts} and scored as they stood (reward.missing_eos = 'off')"
        does = (
            f"gives each of them {rule.missing_eos_penalty:g} in place of its score"
            if rule.missing_eos == "replace"
            else f"takes {abs(rule.missing_eos_penalty):g} off the score of each of them"
        )
        return (
            f"{cuts}, and reward.missing_eos = '{rule.missing_eos}' {does}. Where they had more to "
            "say, raise that limit, or name what ends an answer in rollout.stop; 'off' keeps their "
            "scores"
        )

    def _one_reward(self, batch: Sequence[Rollout], cut: Sequence[Rollout], reward: float) -> str:
        fact = f"all {len(batch)} rewards are {reward:g}: a batch with one reward teaches nothing"
        parts = [self._cut(cut, len(batch))] if cut else []
        if len(cut) < len(batch):
            first, *others = [
                scores_by_source(r) for r in batch if r.finish is not FinishReason.LENGTH
            ]
            common = {n: x for n, x in first.items() if all(s[n] == x for s in others)}
            equal = (
                f"{n} does not apply" if x is None else f"{n} {x:g}" for n, x in common.items()
            )
            subject = "the others" if cut else "They"
            hint = ", or no answer is found where task.extract looks" if "task" in common else ""
            parts.append(
                f"{subject} have one score ({', '.join(equal) or 'in sum'}): the task may be too "
                f"hard or too easy for this model{hint}. See samples.jsonl"
            )
        return f"{fact}. {'; '.join(parts)}"


def scores_by_source(rollout: Rollout) -> dict[str, float | None]:
    """Return a rollout's score by short source name, ``None`` if the source does not apply."""
    return {short_name(s.source): s.scalar for s in rollout.scores.values() if s.kind == "reward"}


def extra_by_source(rollout: Rollout) -> dict[str, Any]:
    scores = rollout.scores.values()
    return {f"{short_name(s.source)}/{key}": v for s in scores for key, v in s.extra.items()}


def extra_means(batch: Iterable[Rollout]) -> Stats:
    """Return the means of numeric extras of reward functions, each over the rollouts that have it.
    Time-outs of the task's verifier are counted instead."""
    values_by_name: dict[str, list[float]] = {}
    for rollout in batch:
        for name, value in extra_by_source(rollout).items():
            if isinstance(value, int | float):
                values_by_name.setdefault(f"reward/{name}", []).append(value)
    counts = {"reward/task/timeouts"}
    return {name: sum(v) if name in counts else fmean(v) for name, v in values_by_name.items()}
