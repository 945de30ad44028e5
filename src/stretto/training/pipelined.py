"""Training through fused pipelines, as the learner sees it: models in stages on other processes.

This process keeps both models whole: it generates, scores and saves with them. The ranks hold the
stages that are trained, with their masters and AdamW. A mini-batch goes to them as tensors, metrics
and norms come back, and at the end of a step the new weights do.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.algorithms.reductions import Metrics
from stretto.config import Config, PipelineConfig
from stretto.config.training import token_budget
from stretto.errors import ConfigError, LearnerError, ModelError
from stretto.models.backend import backend_of
from stretto.models.forward import by_token_budget
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.executor.instructions import Timings, makespan_us, profile
from stretto.pipelines.executor.stages import Name, Stage, StageLayout, cut, for_sending
from stretto.pipelines.problem import Problem, Side
from stretto.pipelines.schedule import PipelineSchedule, evaluate
from stretto.pipelines.solve import SEEDS, solve
from stretto.training.losses import Losses, MicroBatch
from stretto.training.partition import (
    Names,
    PaddedBatch,
    check_stages,
    divided,
    on_cpu,
    stage_state,
    whole_state,
)
from stretto.training.shard_files import in_memory
from stretto.training.stages import StageTrainer
from stretto.training.trained import Course, Snapshots, WholeModel, require_finite_norm
from stretto.types import Stats
from stretto.workers.ranks import Ranks

MEASURED_RUN = 2
"""The mini-batch whose latencies are measured; the first is slow for reasons of its own."""

WORDS = {
    "hold": "the hand-over of stages",
    "lr": "the hand-over of stages",
    "run": "the passes of a mini-batch",
    "saved_bytes": "the measuring of memory",
    "update": "an update of the weights",
    "skip": "an update of the weights",
    "weights": "the hand-over of new weights",
    "state": "the hand-over of the state",
    "load": "the hand-over of a saved state",
}
"""The work of a :class:`~stretto.training.stages.StageTrainer`'s methods, for messages."""


class StagedModel(WholeModel):
    """A model whose stages are trained by ranks; see :class:`~stretto.training.passes.Trained`.

    State: the stages' trainers' states, put together to that of the whole model's trainer. So a run
    can be resumed with another number of ranks, or without any.

    Args:
        name: ``actor`` or ``critic``.
        names: of the stages' trained parameters, by rank.
    """

    def __init__(self, name: Name, model: nn.Module, ranks: Ranks, names: Sequence[Names]) -> None:
        super().__init__(model)
        self._name, self._ranks, self._names = name, ranks, names
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._snapshots = Snapshots(self._weights)
        self._lr = float(ranks.call("lr", name)[0])
        self._behind = False

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self._lr

    def update(self) -> float:
        """Take an optimizer step on the ranks; the whole model follows with :meth:`fetch`.

        Raises:
            LearnerError: the norm is not finite; the weights are left as they were.
            RankError: a rank failed.
        """
        norm, self._lr = self._ranks.call("update", self._name)[0]
        self._behind = True
        require_finite_norm(norm)
        return float(norm)

    def skip(self) -> None:
        """Let an update go by without a gradient: the learning rate moves on, nothing else does."""
        self._lr = float(self._ranks.call("skip", self._name)[0])

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copies of the trained weights; see :meth:`~stretto.training.trained.Snapshots.take`."""
        return self._snapshots.take()

    @torch.no_grad()
    def fetch(self) -> None:
        """Have the whole model hold the weights of its stages, if these have changed."""
        if not self._behind:
            return
        new: dict[str, Tensor] = {}
        for names, weights in self._of_stages("weights"):
            new |= {names[own]: weight for own, weight in weights.items()}
        with self._gate.passing():  # the end of a run finds the weights of one step or of the next
            torch._foreach_copy_([*self._weights.values()], [new[n] for n in self._weights])
        self._behind = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model's trainer, with its tensors."""
        return whole_state(self._of_stages("state"), [*self._weights])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; tensors may be in files, too."""
        order, state = [*self._weights], in_memory(state)
        parts = ((self._name, on_cpu(stage_state(state, order, names))) for names in self._names)
        self._lr = float(self._ranks.call_each("load", parts)[0])
        self._behind = True
        self.fetch()

    def _of_stages(self, method: str) -> list[tuple[Names, Mapping[str, Any]]]:
        said = self._ranks.call(method, self._name)
        return [(n, s) for n, s in zip(self._names, said, strict=True) if s is not None]


class PipelinedPasses:
    """Passes of both models at once, by a schedule; see :class:`~stretto.training.passes.Passes`.

    Latencies are measured in the second mini-batch, and schedules made anew for them. Where a
    mini-batch has fewer responses than there are pipelines, the others get blank micro-batches.

    Args:
        budget: tokens of a micro-batch, where the settings do not say how many there are.
    """

    def __init__(
        self,
        ranks: Ranks,
        models: Sequence[StagedModel],
        planner: Planner,
        layout: StageLayout,
        config: PipelineConfig,
        budget: int,
    ) -> None:
        self._ranks, self._models, self._planner = ranks, models, planner
        self._layout, self._config, self._budget = layout, config, budget
        self._runs = 0
        self._ran: list[_Ran] = []

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Divide so that pipelines get equally many micro-batches, of like sizes.

        With too few units for each pipeline to get one, each unit is a micro-batch.
        """
        wanted = self._config.micro_batches or len(by_token_budget(tokens, self._budget))
        return divided(tokens, wanted, self._config.multiple)

    def run(
        self, parts: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Run the passes on the ranks; see :class:`~stretto.training.passes.Passes`.

        Raises:
            RankError: a rank failed.
        """
        batches = [PaddedBatch.of(part) for part in parts]
        missing = -len(parts) % self._config.multiple
        batches += [PaddedBatch.blank(parts[0].part)] * missing
        plan = self._planner.plan(len(batches))
        said: list[tuple[Timings, Mapping[Name, Metrics]]] = self._ranks.call(
            "run", plan.schedule, plan.problem, batches, kl_coef, trains_actor
        )
        timings = [times for times, _ in said]
        self._runs += 1
        self._ran.append(_Ran.of(timings, plan.predicted_us))
        if self._runs >= MEASURED_RUN and not (missing or self._planner.measured):
            kept = self._ranks.call("saved_bytes", batches[0])
            self._planner.measure(profile(self._layout, timings, kept))
        names: Sequence[Name] = ("critic", "actor") if trains_actor else ("critic",)
        return {name: sum((metrics[name] for _, metrics in said), Metrics()) for name in names}

    def finish(self) -> Stats:
        """Fetch the new weights into the whole models, and sum up the step's passes.

        Returns:
            ``pipeline/step_s`` (seconds of all passes of the step, from the first task of each
            mini-batch to its last), ``pipeline/bubble_fraction`` (share of the ranks' time in which
            they waited), and, once latencies are measured, ``pipeline/predicted_s`` (what the
            schedules were to take).
        """
        for model in self._models:
            model.fetch()
        ran, self._ran = self._ran, []
        if not ran:
            return {}
        step_s = sum(r.makespan_s for r in ran)
        stats = {
            "pipeline/step_s": step_s,
            "pipeline/bubble_fraction": 1 - sum(r.busy_s for r in ran) / step_s,
        }
        predicted_s = [r.predicted_s for r in ran if r.predicted_s is not None]
        if len(predicted_s) == len(ran):
            stats["pipeline/predicted_s"] = sum(predicted_s)
        return stats


@dataclass(frozen=True, slots=True)
class _Ran:
    """Times of a mini-batch's passes.

    Attributes:
        makespan_s: seconds from the first task to the last.
        busy_s: seconds that a rank worked, on average.
        predicted_s: seconds that they were to take; ``None`` before latencies are measured.
    """

    makespan_s: float
    busy_s: float
    predicted_s: float | None

    @classmethod
    def of(cls, timings: Sequence[Timings], predicted_us: int | None) -> _Ran:
        busy_s = sum(e - s for t in timings for s, e in zip(t.start, t.end, strict=True))
        return cls(
            makespan_us(timings) / 1e6,
            busy_s / len(timings),
            None if predicted_us is None else predicted_us / 1e6,
        )


@dataclass(frozen=True)
class Pipelines:
    """The parts of a run that trains through pipelines.

    Attributes:
        ranks: the processes.
        actor, critic: the models, as the learner updates them.
        passes: what the learner has make its passes.
    """

    ranks: Ranks
    actor: StagedModel
    critic: StagedModel
    passes: PipelinedPasses


def start(
    actor: nn.Module,
    critic: nn.Module,
    config: Config,
    courses: Mapping[Name, Course],
    threads: int,
) -> Pipelines:
    """Cut the models, start the ranks, and give each its stages.

    Args:
        actor, critic: whole; they stay in this process, and follow what the ranks learn.
        config: of the run, with ``pipeline.ranks`` above 0.
        courses: learning rates, by model.
        threads: CPU threads of training, over all ranks.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        LearnerError: a model has nothing to train.
        ModelError: a model cannot be cut into so many stages, or not be sent to other processes.
        RankError: a rank could not start.
    """
    p, t = config.pipeline, config.training
    models: dict[Name, nn.Module] = {"actor": actor, "critic": critic}
    device = next(actor.parameters()).device
    _check_devices(device, p.ranks)
    for name, model in models.items():
        _check_model(name, model)
        check_stages(p, name, model)
    layout = layout_of(p)
    losses = Losses(config.algorithm, config.rollout.temperature)
    ranks = Ranks(
        p.ranks,
        StageTrainer,
        (layout, losses, t, courses, device),
        backend=backend_of(device).collectives,
        threads=max(threads // p.ranks, 1),
        words=WORDS,
    )
    try:
        stages = {
            name: [cut(model, p.stages(name), layout.place(name, r)[1]) for r in range(p.ranks)]
            for name, model in models.items()
        }
        pairs = zip(stages["actor"], stages["critic"], strict=True)
        ranks.call_each("hold", ((for_sending(a), for_sending(c)) for a, c in pairs))
        staged = {
            name: StagedModel(name, model, ranks, [_trained_names(s) for s in stages[name]])
            for name, model in models.items()
        }
        parameters = {name: sum(w.numel() for w in m.parameters()) for name, m in models.items()}
        planner = Planner(p, parameters, config.seed)
        budget = token_budget(t.microbatch_tokens, device)
        passes = PipelinedPasses(ranks, [*staged.values()], planner, layout, p, budget)
        if config.observe.checkpoints:
            ranks.remedy = "resume from the last checkpoint, if one was written (--resume)"
        return Pipelines(ranks, staged["actor"], staged["critic"], passes)
    except pickle.PicklingError as error:
        ranks.close()
        raise ModelError(f"the models cannot be sent to the ranks: {error}. {_SENDABLE}") from error
    except BaseException:
        ranks.close()
        raise


def layout_of(config: PipelineConfig) -> StageLayout:
    """Return the layout of the stages over pipelines."""
    return StageLayout(
        actor_stages=config.stages("actor"),
        actor_pipelines=config.pipelines("actor"),
        critic_stages=config.stages("critic"),
        critic_pipelines=config.pipelines("critic"),
    )


def _trained_names(stage: Stage) -> Names:
    return {own: stage.names[own] for own, p in stage.named_parameters() if p.requires_grad}


_SENDABLE = (
    "Have them made of classes in modules that can be imported, with no hooks that are local "
    "functions, or set pipeline.ranks = 0"
)


def _check_model(name: Name, model: nn.Module) -> None:
    """Check that a model has weights to train and can be sent to other processes."""
    if not any(p.requires_grad for p in model.parameters()):
        raise LearnerError(
            f"the {name} has nothing to train: all its weights are frozen. Leave some unfrozen "
            "(requires_grad)"
        )
    for path, module in model.named_modules():
        own = type(module)
        if own.__module__ == "__main__":
            raise ModelError(
                f"'{path}' of the {name} is of the class '{own.__qualname__}', which is defined in "
                f"the script that runs; the ranks cannot import it. {_SENDABLE}"
            )


def _check_devices(device: torch.device, ranks: int) -> None:
    most = backend_of(device).most_ranks()
    if most is not None and most < ranks:
        raise ConfigError(
            f"pipeline.ranks = {ranks} needs as many GPUs, and there are {most}; lower it, or set "
            "model.device = 'cpu'"
        )


GUESSED_TICKS = 1000
"""The guessed forward latency of the larger model's stages, before anything is measured."""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The plan by which a mini-batch runs.

    Attributes:
        problem: that the schedule was made for.
        schedule: it.
        predicted_us: microseconds that it takes by the measured latencies; ``None`` before there
            are any.
    """

    problem: Problem
    schedule: PipelineSchedule
    predicted_us: int | None


class Planner:
    """Schedules, one for each number of micro-batches, made when it first comes.

    Before latencies are measured all stages of a model count alike, in proportion to its
    parameters, and a backward as two forwards.

    Args:
        parameters: of each model.
    """

    def __init__(self, config: PipelineConfig, parameters: Mapping[Name, int], seed: int) -> None:
        self._config, self._seed = config, seed % SEEDS
        self._plans: dict[int, PipelinePlan] = {}
        self._measured = False
        largest = max(parameters[m] / config.stages(m) for m in ("actor", "critic"))
        self._problem = Problem(
            self._guess("actor", parameters["actor"] / largest),
            self._guess("critic", parameters["critic"] / largest),
        )

    @property
    def measured(self) -> bool:
        """Return whether :meth:`measure` has been called."""
        return self._measured

    def measure(self, problem: Problem) -> None:
        """Plan by these latencies, in microseconds, from now on."""
        self._problem, self._measured = problem, True
        self._plans.clear()

    def plan(self, micro_batches: int) -> PipelinePlan:
        """Plan so many micro-batches of each model, over all its pipelines."""
        if micro_batches not in self._plans:
            self._plans[micro_batches] = self._make(micro_batches)
        return self._plans[micro_batches]

    def _make(self, micro_batches: int) -> PipelinePlan:
        actor, critic = (
            replace(side, micro_batches=micro_batches // side.pipelines)
            for side in self._problem.sides
        )
        problem = Problem(actor, critic)
        if self._config.schedule == "serial":
            schedule = one_f_one_b(problem)
        else:
            schedule = solve(problem, seconds=self._config.seconds, seed=self._seed).schedule
        latency = evaluate(problem, schedule).latency
        return PipelinePlan(problem, schedule, latency if self._measured else None)

    def _guess(self, model: Name, parameters: float) -> Side:
        """Guess a model's side of the problem; ``parameters`` relative to the larger stages'."""
        stages = self._config.stages(model)
        forward = max(round(GUESSED_TICKS * parameters / stages), 1)
        return Side.of(
            stages,
            self._config.pipelines(model),
            1,
            forward=forward,
            backward=2 * forward,
            activation=forward,
        )
