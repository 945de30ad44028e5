"""A run whose roles work in processes of their own, behind the same schedule."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stretto.assembly.checks import look_at_prompts
from stretto.assembly.controls import controls_of
from stretto.assembly.models import NOTHING, Given, Say, prepare_torch
from stretto.assembly.parts import open_task
from stretto.assembly.scorers import MODEL, open_functions
from stretto.clock import RealClock
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.observe.spans import Spans
from stretto.runtime.clients import GeneratorClient, LearnerClient, ScorerClient, generator_names
from stretto.runtime.local import services
from stretto.runtime.state import DRIVER, LEARNER, Staged, copied, offer, offered, write
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.scoring.functions import FunctionScorer
from stretto.tasks.prompts import PromptSource
from stretto.types import Prompt
from stretto.weights.disk import DiskChannel
from stretto.workers.executor import ThreadExecutor
from stretto.workers.process import ProcessExecutor
from stretto.workers.services import ScorerService
from stretto.workers.threads import WorkerThread

PATIENCE_S = 30.0
"""Seconds that the end of a run waits for a step of the learner."""

LOOK_S = 0.1
"""Seconds between two looks whether the learner's process has written its file."""

MEMORY = Path("/dev/shm")
"""The folder whose files are in memory, on Linux."""


@dataclass(frozen=True)
class LocalRun:
    """A run over processes; see :class:`~stretto.runtime.base.Running`.

    Attributes:
        followers: generators, and scorers that follow a trained model, by role.
        lags: whether they may work with older weights than the learner's.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    learner: ProcessExecutor
    followers: Mapping[str, ProcessExecutor]
    others: Sequence[ProcessExecutor]
    functions: Sequence[FunctionScorer]
    weights: DiskChannel
    schedule: Schedule
    spans: Spans
    lags: bool

    async def stage(self, *, copy: bool = True) -> Staged:
        prompts, schedule = copied(self.prompts.state_dict()), copied(self.schedule.state_dict())
        followers, waiting = {}, {}
        if self.lags:
            for role, follower in self.followers.items():
                followers[_model_of(role)] = (await follower.call("weights")).value
            waiting = offered(self.schedule, self.weights)
        weights = {"followers": followers, "offered": waiting}
        driver = {"prompts": prompts, "schedule": schedule, "weights": weights}
        live = (await self.learner.call("stage", copy)).value
        loop = asyncio.get_running_loop()

        def write_learner(file: Path) -> None:
            asyncio.run_coroutine_threadsafe(self._write_learner(file), loop).result()

        return Staged({DRIVER: partial(write, state=driver), LEARNER: write_learner}, live)

    async def _write_learner(self, file: Path) -> None:
        """Have the learner's process write its state, and look now and then whether it has."""
        await self.learner.call("write", file.absolute())
        while not (await self.learner.call("written")).value:
            await asyncio.sleep(LOOK_S)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        driver, prompts = state[DRIVER], self.prompts
        prompts.load_state_dict(driver["prompts"])
        await self.learner.call("load_state_dict", state[LEARNER])
        self.schedule.load_state_dict(driver["schedule"], prompts.prompt_by_id, self.weights.name)
        weights, refs = driver["weights"], {}
        if self.lags:
            offer(self.schedule, weights["offered"], self.weights)
        else:
            refs = (await self.learner.call("offer")).value
        for role, follower in self.followers.items():
            model = _model_of(role)
            if refs:
                await follower.call("load", refs[model])
            await follower.call(
                "restore", weights["followers"].get(model, {}), self.schedule.loaded
            )

    def save(self, folder: Path) -> None:
        self.learner.ask("save", folder.absolute())

    def halt(self) -> bool:
        for executor in (*self.followers.values(), *self.others):
            executor.close()
        for function in self.functions:
            function.close()
        return self.learner.settle(PATIENCE_S)


def start(config: Config, stack: ExitStack, say: Say, given: Given = NOTHING) -> LocalRun:
    """Put a run together; arguments as those of :func:`~stretto.assembly.parts.make_parts`.

    Raises:
        ConfigError: the caller brings models, or training is to go through pipelines.
    """
    check(config, given)
    prepare_torch(config)
    tokenizer, task, prompts = open_task(config, given, say)
    columns = task.row(0).data.keys()
    functions = open_functions(config, columns, tokenizer, stack, given)
    first = look_at_prompts(prompts, say)
    memory = MEMORY if MEMORY.is_dir() else None
    channel = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-", dir=memory)))
    threads = config.threads or torch.get_num_threads()

    def opened(name: str, make: Callable[..., Any], *arguments: Any) -> ProcessExecutor:
        executor = ProcessExecutor(name, make, arguments, threads=threads)
        stack.callback(executor.close)
        return executor

    learner = opened("learner", services.learner, config, channel, threads, given.warmup)
    ready: services.Ready = learner.ask("ready")
    for line in ready.said:
        say(line)
    names = generator_names(config.rollout.engines)
    scorers = _scorers(config, channel, ready, first)
    wanted = dict.fromkeys(names, (services.generator, config, channel, ready)) | scorers
    with ThreadPoolExecutor(len(wanted)) as pool:
        made = {name: pool.submit(opened, name, *how) for name, how in wanted.items()}
    executors = {name: future.result() for name, future in made.items()}

    spans = Spans(RealClock())
    generators = [GeneratorClient(name, executors[name], spans) for name in names]
    replicas = [ScorerReplica(_function(f, stack, spans)) for f in functions]
    for name in scorers:
        info, said = executors[name].ask("ready")
        for line in said:
            say(line)
        replicas.append(ScorerReplica(ScorerClient(info, executors[name], spans)))
    schedule = Schedule(
        prompts.next,
        generators,
        replicas,
        LearnerClient("learner", learner, spans),
        controls_of(config, None),
        RealClock(),
        spans,
    )
    following = {*names, "critic"}
    return LocalRun(
        tokenizer,
        prompts,
        learner,
        {name: e for name, e in executors.items() if name in following},
        [e for name, e in executors.items() if name not in following],
        functions,
        DiskChannel(channel),
        schedule,
        spans,
        config.schedule.knobs.copies_weights,
    )


def check(config: Config, given: Given) -> None:
    """Refuse settings and objects that do not go with processes.

    Raises:
        ConfigError: see :func:`start`.
    """
    objects = [n for n in ("actor", "reference", "critic", "task") if getattr(given, n) is not None]
    if objects or given.reward_models:
        raise ConfigError(
            f"runtime = 'local' loads models in processes of their own, and the caller brings "
            f"objects ({', '.join(objects) or 'reward models'}); name folders, or set runtime = "
            "'inline'"
        )
    if config.schedule.knobs.migrates(config.rollout.engines):
        raise ConfigError(
            "runtime = 'local' does not move responses between processes yet; set "
            "schedule.migrate = 'off', or runtime = 'inline'"
        )
    if config.pipeline.ranks:
        raise ConfigError(
            "runtime = 'local' has one process for the learner, and pipeline.ranks = "
            f"{config.pipeline.ranks} asks for several; set one of them back"
        )


def _model_of(role: str) -> str:
    """Return the trained model that a follower works with."""
    return "critic" if role == "critic" else "actor"


def _scorers(
    config: Config, channel: Path, ready: services.Ready, first: Sequence[Prompt]
) -> dict[str, tuple[Any, ...]]:
    """Return, by name, how each model scorer is made in its process.

    Args:
        config: of the run.
        channel: folder of the weights.
        ready: said by the learner's process.
        first: prompts of the run, to check that reward models can read them.
    """
    wanted: dict[str, tuple[Any, ...]] = {
        source: (services.reward_model, config, source, first)
        for source in config.reward.sources
        if source.startswith(MODEL)
    }
    if config.algorithm.has_reference:
        wanted["reference"] = (services.reference, config, channel, ready)
    if config.algorithm.definition.critic:
        wanted["critic"] = (services.critic, config, channel, ready)
    return wanted


def _function(function: FunctionScorer, stack: ExitStack, spans: Spans) -> ScorerClient:
    """Make the scorer of a reward function: it has its process already, a thread waits for it."""
    service, worker = ScorerService(function), WorkerThread(function.name, 1)
    stack.callback(worker.stop)
    return ScorerClient(service.info(), ThreadExecutor(service, worker), spans)
