"""Workers of a run as threads of this process, and their weights.

If no stages overlap, one thread and one copy of the weights do everything, as in a plain trainer.
Roles that work during decoding have separate threads. If the learner trains during decoding, its
followers have a copy of the weights that changes only at a weight sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from stretto.assembly.controllers import CoreShares, share_cores
from stretto.assembly.parts import FIRST, trained_models
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import Overrides, drawing_apart
from stretto.config import Config, ScheduleConfig
from stretto.config.cluster_config import LEARNER, generator_names
from stretto.config.training_config import token_budget
from stretto.machine import SCALING_TOKENS
from stretto.models.backend import backend_of, pick_device
from stretto.models.cpu_threads import thread_scaling
from stretto.models.forward import hidden_states, positions
from stretto.models.weights import with_own_structure, with_own_weights
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.placement import RolePlacement
from stretto.runtime.process_messages import Ready
from stretto.runtime.role_services import GeneratorService, ScorerService
from stretto.runtime.sim.tuning import fixed
from stretto.saying import Say, working
from stretto.schedules.controls import Tuner
from stretto.tasks.prompts import PromptSource
from stretto.weights.channel import SharedChannel
from stretto.workers.gate import EventGate
from stretto.workers.group import RankGroup
from stretto.workers.threads import ThreadExecutor, WorkerThread

PATIENCE_S = 3.0  # how long shutdown waits for interrupted calls
PROBE_S = 0.04  # of each part of a probe of Python's lock
DECODING_S, TRAINING_S = 0.02, 0.25  # of passes that hardly need the lock
PROBED_STEPS = 20  # fewest of a run with the probe
MOST_ROWS = 64  # of a probed pass


class ThreadWorkers:
    """Workers of a :class:`~stretto.runtime.run.Run` on threads of this process."""

    groups: Sequence[RankGroup] = ()
    meeting = None
    devices: Mapping[str, str] = {}
    processes: Mapping[str, str] = {}
    tuner: Tuner | None = None  # whose knobs the shares of the cores follow

    def __init__(
        self,
        config: Config,
        overrides: Overrides,
        stack: ExitStack,
        say: Say,
        prompts: PromptSource,
        gate: EventGate,
    ) -> None:
        self._config, self._opened = config, list[WorkerThread]()
        self.executors: dict[str, ThreadExecutor] = {}
        stack.callback(self.release)
        stack.callback(self.close)
        knobs, engines = config.schedule.knobs, config.rollout.engines
        self._cores = config.threads or torch.get_num_threads()
        factory = RoleFactory(config, say)
        rewards = factory.reward_models(prompts.tokenizer, overrides)
        teachers = factory.teachers(overrides, prompts.tokenizer)
        models = trained_models(config, prompts, rewards[0], stack, say, overrides)
        actor, critic = models.actor, models.critic
        separate_weights: Callable[[nn.Module], nn.Module] = (
            with_own_weights if knobs.copies_weights else lambda model: model
        )
        channel = SharedChannel()
        self.channel = channel.name if knobs.copies_weights else ""
        self._early = knobs.scores_early
        self._threads = self._open_threads()
        generating = separate_weights(actor)
        with working(say, "starting the engines"):
            rows = config.most_in_flight
            for i, name in enumerate(generator_names(engines)):
                model = with_own_structure(generating) if i else generating
                ends = models.end_tokens
                engine = factory.make_engine(model, prompts.tokenizer, rows, ends, channel)
                service = GeneratorService(engine)
                self.executors[name] = ThreadExecutor(service, self._threads[name])
        self.scorers: list[RolePlacement] = []
        for i, replica in enumerate(rewards):
            host = i if knobs.hosts_scorers(engines) else None
            values = separate_weights(critic) if critic else None
            reading = prompts.tokenizer, prompts.first(FIRST)
            model_scorers = [factory.teacher_scorer(*t, *reading) for t in teachers.items()]
            model_scorers += factory.model_scorers(models.reference, values, channel)
            for scorer in (*replica, *model_scorers):
                role = scorer.info.name if host is None else f"{scorer.info.name} {i}"
                self.scorers.append(RolePlacement(role, scorer.info.name, host))
                thread = self._threads["scorers" if host is None else generator_names(engines)[i]]
                self.executors[role] = ThreadExecutor(ScorerService(scorer), thread)
        trained = ["actor", "critic"] if critic else ["actor"]
        with working(say, "starting the learner"):
            snapshots = trained if knobs.copies_weights else ()
            learner = factory.make_learner(actor, critic, snapshots=snapshots, channel=channel)
        refs = learner.offer() if knobs.copies_weights else {}
        dtype = learner.trained["actor"].dtype
        short, long = gate.fact("thread_scaling", partial(self._scaling, actor))
        self.thread_scaling = short, long
        self.ready = Ready(refs, "", (), dtype)
        training = LearnerService(learner, channel, prompts, self.ready)
        self.executors[LEARNER] = ThreadExecutor(training, self._threads[LEARNER])

    def thread_of(self, function: str) -> WorkerThread:
        """Return a new thread for a reward function if scoring starts early, else a shared one."""
        return self._thread(function, 1) if self._early else self._threads["scorers"]

    def close_followers(self) -> None:
        """Do nothing, because a thread that scores may also be running an update."""

    def close(self) -> None:
        """Interrupt and end all threads. Waits at most :data:`PATIENCE_S` for them."""
        threads, self._opened = self._opened, []
        for thread in threads:
            thread.interrupt()
        until_s = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def release(self) -> None:
        """Free the models without a garbage collection, which could come after the next run's."""
        for executor in self.executors.values():
            vars(executor.service).clear()  # the run refers to it in cycles

    def _scaling(self, actor: nn.Module) -> tuple[float, float]:
        config, device = self._config, pick_device(self._config.model.device)
        if config.steps < PROBED_STEPS or device.type != "cpu":
            return 0.0, 0.0
        pass_tokens = token_budget(config.training.microbatch_tokens, device)
        return scaling_of(actor, config.rollout.batch, pass_tokens, max(1, self._cores // 2))

    def _open_threads(self) -> dict[str, WorkerThread]:
        config, knobs = self._config, self._config.schedule.knobs
        names = generator_names(config.rollout.engines)
        if not knobs.overlaps(len(names)):
            return dict.fromkeys((*names, "scorers", LEARNER), self._thread("main", config.threads))
        # Decoding is urgent: its steps are short, and scoring and training fill the gaps.
        stream = backend_of(pick_device(config.model.device)).role_stream
        threads = {
            name: self._thread(name, lambda: self._shares.generating, stream=stream(urgent=True))
            for name in names
        }
        scoring = partial(self._scoring, list(threads.values()))
        threads["scorers"] = self._thread("scorers", scoring, stream=stream())
        training = self._thread("learner", lambda: self._shares.training, stream=stream())
        return {**threads, LEARNER: training}

    @property
    def _schedule(self) -> ScheduleConfig:
        """The schedule of the present round. Roles divide the cores only if they overlap in it."""
        schedule = self._config.schedule
        return fixed(schedule, self.tuner.knobs) if self.tuner else schedule

    @property
    def _shares(self) -> CoreShares:
        return share_cores(self._schedule, self._config.rollout.engines, self._cores)

    def _scoring(self, decoding: Sequence[WorkerThread]) -> int:
        # Without lag, decoding waits for all scores, so late scoring may use every core.
        schedule = self._schedule
        solo = not (schedule.knobs.trains_beside or schedule.threads)
        if solo and not any(worker.busy for worker in decoding):
            return self._cores
        return self._shares.scoring

    def _thread(self, name: str, threads: int | Callable[[], int], **options: Any) -> WorkerThread:
        thread = WorkerThread(name, threads, **options)
        self._opened.append(thread)
        return thread


def scaling_of(actor: nn.Module, batch: int, pass_tokens: int, threads: int) -> tuple[float, float]:
    """Measure :attr:`Machine.thread_scaling` with so many CPU threads for each of the two.

    Training passes have at most ``pass_tokens``, as in the run, because small ones need Python's
    lock for more of their time. 0 (unknown) for long passes, which the lock hardly affects, and for
    adapters of parameters, whose passes share a cache of torch's between threads.
    """
    if any(type(module).__name__ == "ParamWrapper" for module in actor.modules()):  # of peft
        return 0.0, 0.0
    weights = [p for p in actor.parameters() if p.requires_grad]
    batch = min(batch, MOST_ROWS)

    def decoding() -> None:
        with torch.inference_mode():
            hidden_states(actor, [[0]] * batch)

    def training(length: int) -> None:
        length = min(length, positions(actor) or length)
        rows = [[0] * length] * min(batch, max(pass_tokens // length, 1))
        loss = hidden_states(actor, rows).float().square().mean()
        torch.autograd.grad(loss, weights, allow_unused=True)

    short, long = (partial(training, length) for length in SCALING_TOKENS)
    with drawing_apart("probe", torch.device("cpu")):
        for call, most_s in ((decoding, DECODING_S), (long, TRAINING_S)):
            began_s = time.perf_counter()
            call()
            if time.perf_counter() - began_s > most_s:
                return 0.0, 0.0
        measured = [
            [thread_scaling([decoding, call], threads, PROBE_S) for call in (short, long)]
            for _ in range(3)
        ]
    return median(pair[0] for pair in measured), median(pair[1] for pair in measured)
