"""The training loop: steps, records, checkpoints, and a check that resumed inputs are the same."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from stretto import files
from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.config import Config, ModelConfig
from stretto.config.sections import RewardSource
from stretto.errors import StalledError, StateError, StorageError
from stretto.models.info import identity
from stretto.observe import Progress, Recorder, RunDirectory, Sample
from stretto.observe.card import write_card
from stretto.observe.display import TIME_LEFT
from stretto.observe.recorder import extra_by_source, extra_means, scores_by_source
from stretto.observe.run_directory import TrainResult
from stretto.observe.spans import DRIVER_CPU, Span
from stretto.observe.transcripts import transcript
from stretto.outside import in_this_process
from stretto.planner.live_recording import LiveRecording
from stretto.protocols import DRIVER, RECORDS
from stretto.runs.checkpoint import INPUTS, Checkpointer, load_latest
from stretto.runs.ending import StoppedError, saved_at_the_end
from stretto.runs.evaluating import Evaluator
from stretto.runtime.run import DriverState, Halted, Run, start
from stretto.saying import Say
from stretto.schedules.rollout import Rollout, Step
from stretto.schedules.schedule import Schedule
from stretto.scoring.response_buffer import response_text, spelt_out
from stretto.tasks.prompts import PromptSource
from stretto.tasks.task import SHA256
from stretto.types import Stats
from stretto.workers.drive import drive
from stretto.workers.flight import FlightRecorder, FlightScript, flight_head
from stretto.workers.gate import EventGate

OnStep = Callable[[int, Stats], Literal["stop", "save"] | None]
"""Called after each step with its number and metrics. Returns ``"stop"``, ``"save"`` or None."""

UPDATE_S = 300.0  # how long shutdown waits for the update in progress, in seconds
SHOWN = 4  # how many differences a message names

Identities = Mapping[str, Mapping[str, str]]
"""Fingerprints of files and rows, and plain facts, by subject."""


def train(
    config: Config,
    *,
    run_dir: RunDirectory,
    resume: bool = False,
    progress: Progress,
    overrides: Overrides = NO_OVERRIDES,
    on_step: OnStep | None = None,
    script: FlightScript | None = None,
) -> TrainResult:
    """Train a model and save it, also if the run is stopped after a step.

    StrettoError for invalid settings, models, data, reward functions or numbers, or disk errors.

    Args:
        run_dir: receives records, checkpoints and the model.
        resume: continue from its newest checkpoint.
        overrides: objects of the caller in place of names in the settings.
        on_step: see :data:`OnStep`.
        script: of the run that this one replays.
    """
    with ExitStack() as stack:
        first, state = 0, None
        if resume:
            with progress.working("reading the checkpoint"):
                first, state = load_latest(run_dir.checkpoints, progress)
            progress.note(f"goes on after step {first}{taken_again(first, run_dir.last_step())}")
        inputs = Inputs(state[INPUTS] if state else {})
        critic = config.critic.model if config.algorithm.definition.critic else ""
        inputs.take_models(config.model, critic, config.reward.models, overrides, progress)
        for teacher in config.algorithm.teacher_models.values():
            weights = identity(teacher, config.model.trust_remote_code, progress)
            inputs.take(f"algorithm.teacher = '{teacher}'", weights)
        overrides = replace(
            overrides,
            looks_at=partial(inputs.take_rows, config.task.name),
            warmup=overrides.warmup or run_dir.warmup.absolute(),
        )
        recorder = stack.enter_context(Recorder(config, run_dir, progress, resumed_step=first))
        flight_file = run_dir.flight_file if config.observe.flight else None
        flight = FlightRecorder(flight_file, flight_head(config, first, overrides.objects))
        gate = EventGate(flight, script)
        running = start(config, stack, progress, overrides, run_dir.path, gate, LiveRecording)
        if overrides.warmup and overrides.warmup.exists():
            files.link(overrides.warmup, run_dir.warmup)  # for a resumed run
        run_dir.add_to_machine(thread_scaling=running.workers.thread_scaling)
        stack.enter_context(freeze_heap())
        running.spans.take()
        evaluator = None
        if running.held_out:
            evaluator = Evaluator(running, recorder.note, config, running.held_out, run_dir)
        loop = _TrainingLoop(
            *(config, running, recorder, run_dir, inputs.found, progress, state, first),
            evaluator,
            on_step or (lambda step, stats: None),
        )
        del state  # as large as the models. The loop frees it after loading
        with saved_at_the_end(
            run_dir.model,
            loop.save,
            lambda: f"step {loop.done}" if loop.done > first else "",
            loop.halt,
            recorder.note,
            loop.checkpoint,
        ):
            drive(loop.steps())
        recorder.note(recorder.where_time_went())
        if running.prompts.skipped:
            recorder.note(
                f"{running.prompts.skipped} prompts were longer than task.max_prompt_tokens = "
                f"{config.task.max_prompt_tokens} and left out"
            )
    return TrainResult(loop.done, loop.stats, run_dir.path, loop.stopped)


@contextmanager
def freeze_heap() -> Iterator[None]:
    """Exclude models and libraries, which stay until the end, from garbage collection."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def taken_again(first: int, recorded: int) -> str:
    """Describe the recorded steps that a run repeats if it continues after the step ``first``."""
    if recorded <= first:
        return ""
    steps = (
        f"steps {first + 1} to {recorded} are" if first + 1 < recorded else f"step {recorded} is"
    )
    return f"; {steps} taken again"


GRAPHS = "engine/graphs"  # metric: share of decode steps that ran as CUDA graphs


def _graphs(spans: Sequence[Span]) -> dict[str, float]:
    calls = [s.attributes for s in spans if "graphed" in s.attributes]
    steps = sum(call["steps"] for call in calls)
    return {GRAPHS: sum(call["graphed"] for call in calls) / steps} if steps else {}


@dataclass
class _TrainingLoop:
    config: Config
    running: Run
    recorder: Recorder
    run_dir: RunDirectory
    inputs: Identities  # recorded in checkpoints
    progress: Progress
    state: dict[str, Any] | None  # to resume from
    done: int  # steps taken, including before a resume
    evaluator: Evaluator | None
    on_step: OnStep
    stats: Stats = field(default_factory=dict)  # of the last step
    stopped: str = ""  # why the run ended early
    save_asked: bool = False  # write a checkpoint after the step
    interrupted: bool = False  # end after the update in progress
    last: DriverState | None = None  # driver's state after the last complete step
    checkpoints: Checkpointer | None = None
    halted: Halted = field(default=Halted(whole=True))

    def __post_init__(self) -> None:
        self.started_s = time.monotonic()
        self.recorded_s = self.started_s  # end of the last step
        self.cpu_s = time.thread_time()  # of this thread, until then

    async def steps(self) -> None:
        config, running = self.config, self.running
        if self.state is not None:
            with self.progress.working("taking up the checkpoint"):
                await running.load_state_dict(self.state)
            self.state = None
        folder, note = self.run_dir.checkpoints, self.recorder.note
        checkpoints = Checkpointer(
            running, note, folder, self.inputs, config.observe, config.steps, running.gate
        )
        self.checkpoints = checkpoints
        title = f"step {self.done + 1}"
        if config.pipeline.ranks and config.pipeline.schedule != "serial":
            title += ", with a search for pipeline schedules"
        status: AbstractContextManager[object] = self.progress.working(title)
        try:
            async with self.evaluator or nullcontext(), checkpoints, running.schedule as schedule:
                if self.evaluator and not self.done:
                    with self.progress.working("evaluating the policy that training starts from"):
                        await schedule.evaluated()
                    self.recorder.step(0, self.evaluator.take_news())
                while self.done < config.steps:
                    for function in running.functions:
                        function.global_step = self.done
                    with status:
                        await self._complete(schedule, self._step(schedule, checkpoints))
                    status = nullcontext()
                    if self.stopped:
                        raise StoppedError(self.stopped, "stopped")
            self.run_dir.append_rollouts(self.done + 1, schedule.in_flight, {})
        except StalledError as error:
            error.add_note(running.stacks())
            raise

    async def _step(
        self, schedule: Schedule, checkpoints: Checkpointer
    ) -> KeyboardInterrupt | SystemExit | None:
        """Take and record a step. An interrupt or exit, such as the user's ``on_step`` may raise,
        is returned, because a task that raises one ends the event loop and all other work.
        """
        step = await schedule.step()
        if not self.running.lags:  # nothing else has run since the update
            self.last = self.running.driver_state()
        try:
            with self.running.spans.span(DRIVER, RECORDS, items=len(step.batch)):
                self._record(step)
        except (KeyboardInterrupt, SystemExit) as end:
            return end
        if not self.interrupted:
            await checkpoints.after(self.done, last=bool(self.stopped), asked=self.save_asked)
        return None

    async def _complete(
        self, schedule: Schedule, work: Coroutine[Any, Any, BaseException | None]
    ) -> None:
        """Take a step, and raise the exception that ``work`` returns. On cancellation during the
        update, finish the update first, so that the weights are those of a complete step. A second
        cancellation takes effect at once.
        """
        task = asyncio.create_task(work)
        try:
            if end := await asyncio.shield(task):
                raise end
        except asyncio.CancelledError:
            await self._mark(schedule)
            if schedule.updating:  # it may have begun during the wait for the lock
                self.interrupted = True
                self.recorder.note(f"stopping; finishing the update of step {self.done + 1} first")
                schedule.end_after_update()
                with suppress(TimeoutError):
                    async with asyncio.timeout(UPDATE_S):
                        await task
                await self._mark(schedule)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            raise
        except BaseException:
            await self._mark(schedule)
            raise

    async def _mark(self, schedule: Schedule) -> None:
        """Keep the state if generation lags behind the learner. Generation may already have newer
        weights than after the last step, and the learner no longer has the older ones.
        """
        if self.running.lags and not schedule.updating:
            async with schedule.weights_lock:
                if not schedule.updating:
                    self.last = self.running.driver_state()

    def save(self) -> None:
        with self.progress.working("saving the model"):
            self.running.save(self.run_dir.model)
            self.card(self.run_dir.model)

    def card(self, folder: Path) -> None:
        rows = len(self.running.prompts.task.indices)
        write_card(self.run_dir, self.config.algorithm.name, rows, folder)

    def halt(self) -> bool:
        """Stop everything after an error. Return whether the actor's weights are intact."""
        schedule = self.running.schedule
        lacks = self.checkpoints is not None and self.checkpoints.lacks(self.done)
        self.halted = self.running.halt(self.last if lacks and not schedule.updating else None)
        with suppress(StorageError):
            self.run_dir.append_rollouts(self.done + 1, schedule.abandoned, {})
        return self.halted.whole

    def checkpoint(self) -> None:
        """Write a checkpoint of the last complete step of a stopped run."""
        note = self.recorder.note
        if self.halted.lost:
            note(f"no checkpoint of step {self.done} can be written: {self.halted.lost}")
        if self.halted.staged and self.checkpoints:
            with self.progress.working(f"writing a checkpoint of step {self.done}"):
                self.checkpoints.write_last(self.done, self.halted.staged)

    def _record(self, step: Step) -> None:
        self.done += 1
        self.running.gate.step(self.done)
        recorder = self.recorder
        spans = self.running.spans
        n_samples = self.config.observe.samples
        timings = {f"timing_s/{name}": seconds for name, seconds in spans.totals().items()}
        eval_metrics = self.evaluator.take_news() if self.evaluator else {}
        metrics = {**step.stats, **extra_means(step.batch), **timings, **_graphs(spans.records)}
        now_s = time.monotonic()
        step_s, self.recorded_s = now_s - self.recorded_s, now_s
        cpu_s = time.thread_time()
        metrics[DRIVER_CPU], self.cpu_s = cpu_s - self.cpu_s, cpu_s
        if minutes := self.config.minutes:
            metrics[TIME_LEFT] = max(0.0, self.started_s + 60 * minutes - now_s)
        eager = metrics.get(GRAPHS) == 0 and self.stats.get(GRAPHS) != 0  # note it only once
        self.stats = {**metrics, **self.running.metrics(), **eval_metrics}
        recorder.step(
            self.done,
            self.stats,
            [self._sample(r, step.rewards[r.id]) for r in step.batch[:n_samples]],
            window=spans.take(),
            rollouts=[*step.batch, *step.rejected, *step.skipped],
            rewards=step.rewards,
        )
        for line in (*step.losses, *step.decisions):
            recorder.note(f"step {self.done}: {line}")
        if eager:
            recorder.note(
                f"step {self.done}: decode steps run without CUDA graphs ({GRAPHS} is 0), several "
                "times slower for small models; the engine's warning says why"
            )
        for rollout in step.rejected:
            failures = [s.failure for s in rollout.scores.values() if s.failure]
            reason = "; ".join(failures) or rollout.rejected_because
            recorder.note(f"step {self.done}: left out rollout {rollout.id}: {reason}")
        request = in_this_process(self.on_step, self.done, self.stats)
        self.save_asked = request == "save"
        if self.save_asked:
            self.running.gate.recorder.saves(self.done)
        if self.done < self.config.steps:
            early_stop = self.evaluator.exhausted if self.evaluator and eval_metrics else ""
            self.stopped = "on_step returned 'stop'" if request == "stop" else early_stop
            if not self.stopped and self.stats.get(TIME_LEFT, math.inf) < step_s:
                self.stopped = f"another step would not fit into minutes = {self.config.minutes:g}"

    def _sample(self, rollout: Rollout, reward: float) -> Sample:
        tokenizer, stop = self.running.tokenizer, self.config.rollout.stop
        return Sample(
            prompt=rollout.prompt.text,
            response=response_text(
                tokenizer, rollout.tokens, rollout.finish, stop, rollout.sampled
            ),
            reward=reward,
            finish=str(rollout.finish),
            tokens=rollout.sampled_tokens,
            context=len(rollout) - rollout.sampled_tokens,
            scores=scores_by_source(rollout),
            extra=extra_by_source(rollout),
            **transcript(rollout, partial(spelt_out, tokenizer)),
        )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Fingerprints of a run's rows and models. StateError if those of a resumed run differ."""

    before: Identities = field(default_factory=dict)  # when the run began, empty for a new run
    found: dict[str, Mapping[str, str]] = field(default_factory=dict)  # recorded so far

    def take(self, subject: str, own: Mapping[str, str]) -> None:
        """Record a subject's fingerprint."""
        previous = self.before.get(subject, own)
        if previous != own:
            raise StateError(
                f"{subject} is not what the run was started with; of it, this differs: "
                f"{_differences(previous, own)}. Restore it, or start a new run",
                "other-inputs",
            )
        self.found[subject] = own

    def take_models(
        self,
        model: ModelConfig,
        critic: str,
        rewards: Iterable[RewardSource],
        overrides: Overrides,
        say: Say,
    ) -> None:
        """Record the models that are loaded by name. The reference is the initial actor."""
        models = [("reward.sources", s.name, s.model) for s in rewards]
        models = [entry for entry in models if entry[1] not in overrides.reward_models]
        if critic and overrides.critic is None:
            models.insert(0, ("critic.init", critic, critic))
        if overrides.actor is None:
            models.insert(0, ("model.name", model.name, model.name))
        for setting, name, path in models:
            self.take(f"{setting} = '{name}'", identity(path, model.trust_remote_code, say))

    def take_rows(self, name: str, prompts: PromptSource) -> None:
        """Record the training rows of the task with this name."""
        subject = f"task.name = '{name}'"
        if subject not in self.before:  # moved runs have another path
            subject = next((s for s in self.before if s.startswith("task.name = ")), subject)
        self.take(subject, prompts.identity)


def _differences(previous: Mapping[str, str], current: Mapping[str, str]) -> str:
    differing = [n for n in {**previous, **current} if previous.get(n) != current.get(n)]
    facts = [
        f"{name} ({previous.get(name, 'none')} then, {current.get(name, 'none')} now)"
        for name in differing
        if not previous.get(name, current.get(name, "")).startswith(SHA256)
    ]
    lines = facts or differing
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return ", ".join(lines[:SHOWN]) + more
