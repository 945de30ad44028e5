"""The placement of roles on workers of this process, and the copies of weights they work with.

Where nothing overlaps there is one worker and one copy of everything: the plain trainer. Scorers
that look at responses while these are decoded get a worker of their own, and so does a learner that
trains while responses are decoded; generators, and the critic as a scorer, then have weights of
their own, which change only at a hand-over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.controls import Migrating, migrating_of, most_in_flight
from stretto.assembly.cores import share_cores
from stretto.assembly.engines import make_engine, prefill_tokens_per_s
from stretto.config import Config
from stretto.config.cluster import generator_names
from stretto.models.clone import with_own_structure, with_own_weights
from stretto.models.weights import copy_into
from stretto.protocols import Tracer
from stretto.runtime.clients import GeneratorClient, LearnerClient, ScorerClient
from stretto.schedules.scoring import ScorerReplica
from stretto.weights.channel import WeightChannel
from stretto.workers.executor import ThreadExecutor
from stretto.workers.protocols import FunctionWorker, LearnerWorker, ScorerWorker
from stretto.workers.ranks import Ranks
from stretto.workers.services import GeneratorService, LearnerService, ScorerService
from stretto.workers.threads import WorkerThread

PATIENCE_S = 3.0
"""Seconds that the end of a run waits for calls that were interrupted."""

COPY_GAIN = 100.0
"""Factor by which copying keys and values within one memory is faster than computing them."""


class ThreadPlacement:
    """Workers and copies of a run.

    State: the weights that engines and critic scorer have of their own, which may be older than the
    learner's, and their version.

    Attributes:
        training_threads: CPU threads of training.
        engines: the generation engines.
        critics: the value model as scorers may use it, or ``None``; one for each replica.
    """

    def __init__(
        self,
        config: Config,
        actor: nn.Module,
        critic: nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        stack: ExitStack,
        end_tokens: frozenset[int],
        channel: WeightChannel,
    ) -> None:
        engines, self._knobs = config.rollout.engines, config.schedule.knobs
        self._opened: list[WorkerThread] = []
        stack.callback(self.close)
        trained = {"actor": actor} | ({"critic": critic} if critic else {})
        self._trained = {
            name: [n for n, p in model.named_parameters() if p.requires_grad]
            for name, model in trained.items()
        }
        self.critics = [
            with_own_weights(critic) if self._knobs.copies_weights and critic else critic
            for _ in range(self._knobs.model_replicas(engines))
        ]
        self._hosts = self._knobs.hosts_scorers(engines)
        self._functions: Sequence[FunctionWorker] = ()
        self._end_ranks: Callable[[], None] = lambda: None
        self._threads = share_cores(config, self._cores(config))
        self.training_threads = self._threads.training
        self._generating = with_own_weights(actor) if self._knobs.copies_weights else actor
        rows = most_in_flight(config)
        self.engines = [
            make_engine(config, model, tokenizer, rows, end_tokens, channel)
            for model in (
                self._generating,
                *(with_own_structure(self._generating) for _ in range(engines - 1)),
            )
        ]
        self._workers = self._open_workers(config)

    def migrating(self, config: Config) -> Migrating | None:
        """Return the facts for moving stragglers; measures how fast this device prefills."""
        if not self._knobs.migrates(len(self.engines)):
            return None
        prefill = prefill_tokens_per_s(self._generating)
        return migrating_of(
            config,
            prefill_tokens_per_s=prefill,
            transfer_tokens_per_s=COPY_GAIN * prefill,
        )

    @property
    def snapshots(self) -> Sequence[str]:
        """The models of which the learner must publish copies."""
        return tuple(self._trained) if self._knobs.copies_weights else ()

    def generators(self, tracer: Tracer) -> list[GeneratorClient]:
        """Put the engines on workers, each on its own where roles overlap."""
        names = generator_names(len(self.engines))
        workers = self._workers["generators"]
        return [
            GeneratorClient(name, ThreadExecutor(GeneratorService(engine), worker), tracer)
            for name, engine, worker in zip(names, self.engines, workers, strict=True)
        ]

    def replicas(
        self,
        functions: Sequence[FunctionWorker],
        models: Sequence[Sequence[ScorerWorker]],
        tracer: Tracer,
    ) -> list[ScorerReplica]:
        """Put the scorers on workers. A reward function works in a process of its own besides.

        Args:
            functions: rewards from code.
            models: for each replica, all model scorers. Where stragglers are moved together there
                is a replica on each engine's worker, to work when nothing is left to decode there.
        """
        (worker,) = self._workers["scorers"]
        self._functions, early = functions, self._knobs.scores_early

        def client(scorer: ScorerWorker, on: WorkerThread) -> ScorerClient:
            service = ScorerService(scorer)
            return ScorerClient(service.info(), ThreadExecutor(service, on), tracer)

        replicas = [
            ScorerReplica(client(f, self._open(f.name, 1) if early else worker)) for f in functions
        ]
        for i, scorers in enumerate(models):
            on, host = (self._workers["generators"][i], i) if self._hosts else (worker, None)
            replicas += [ScorerReplica(client(scorer, on), host) for scorer in scorers]
        return replicas

    def learner(
        self, learner: LearnerWorker, tracer: Tracer, ranks: Ranks | None = None
    ) -> LearnerClient:
        """Put the learner on its worker.

        Args:
            learner: trains in this process, or has ranks train.
            ranks: train for it, if there are any. If one dies while nothing is asked of them, the
                run ends all the same, and at once.
        """
        if ranks is not None:
            self._end_ranks = ranks.close
            ranks.watch(self._fail)
        executor = ThreadExecutor(LearnerService(learner), self._workers["learner"][0])
        return LearnerClient("learner", executor, tracer)

    def follower_weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the trained weights of the copies, by model; all copies of one have the same."""
        return {
            name: {n: p for n, p in copies[0].named_parameters() if n in self._trained[name]}
            for name, copies in self._copies().items()
        }

    def load_followers(
        self, weights: Mapping[str, Mapping[str, torch.Tensor]], version: int
    ) -> None:
        """The inverse of :meth:`follower_weights`.

        Args:
            version: that engines work with, of weights of their own or of the learner's.
        """
        for engine in self.engines:
            engine.load_state_dict({"version": version})
        for name, copies in self._copies().items():
            for model in copies:
                copy_into(model, weights[name])

    def close(self) -> None:
        """End all workers, and break off their calls; wait at most :data:`PATIENCE_S` for that."""
        workers, self._opened = self._opened, []
        for worker in workers:
            worker.interrupt()
        for function in self._functions:  # a worker that waits for one cannot be interrupted
            function.close()
        self._end_ranks()  # likewise
        until_s = time.monotonic() + PATIENCE_S
        for worker in workers:
            worker.join(max(until_s - time.monotonic(), 0.0))

    def _fail(self, error: Exception) -> None:
        for worker in self._opened:
            worker.fail(error)

    def _copies(self) -> dict[str, list[nn.Module]]:
        if not self._knobs.copies_weights:
            return {}
        critics = [model for model in self.critics if model]
        return {"actor": [self._generating]} | ({"critic": critics} if critics else {})

    def _open_workers(self, config: Config) -> dict[str, list[WorkerThread]]:
        engines = config.rollout.engines
        if not self._knobs.overlaps(engines):
            one = self._open("main", config.threads)
            return {"generators": [one], "scorers": [one], "learner": [one]}
        generating, scoring, training = self._threads
        generators = [self._open(f"generator {i}", generating) for i in range(engines)]
        # Without lag nobody decodes again before all is scored: what is left has the cores.
        busy = self._knobs.trains_beside or config.schedule.threads
        cores = 0 if busy else self._cores(config)
        return {
            "generators": generators,
            "scorers": [self._open("scorers", scoring, beside=generators, alone=cores)],
            "learner": [self._open("learner", training)],
        }

    def _cores(self, config: Config) -> int:
        return config.threads or torch.get_num_threads()

    def _open(self, name: str, threads: int, **options: Any) -> WorkerThread:
        worker = WorkerThread(name, threads, **options)
        self._opened.append(worker)
        return worker
