"""A step of PPO on a layout: memory, traffic and seconds of each phase, and what holds it up.

Colocated, phases follow one another and a step takes their sum. Set apart, roles work at the same
time, as the schedule lets them with a lag of one step: a step takes as long as the slowest group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from _phases import Phase, Work, added
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.planner import formulas, memory_model
from stretto.planner.formulas import CHECKPOINTED, FORWARD, TRAINED
from stretto.planner.hardware import Hardware
from stretto.planner.memory_model import HALF, SYNC
from stretto.planner.run_layout import ModelShapes, RunLayout

TOKEN = 8
"""Bytes of a token on its way to a scorer: its id and its log-probability."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step trains on. All responses are taken to be as long as the average.

    Attributes:
        responses: of a step.
        prompt_tokens, response_tokens: of each, on average.
        epochs: passes over them, with an update each.
    """

    responses: int = 512
    prompt_tokens: int = 512
    response_tokens: int = 512
    epochs: int = 1

    def __post_init__(self) -> None:
        counts = (self.responses, self.prompt_tokens, self.response_tokens, self.epochs)
        if min(counts) < 1:
            raise ConfigError(
                f"{self.responses} responses of {self.prompt_tokens} and {self.response_tokens} "
                f"tokens in {self.epochs} epochs: each number is 1 or more",
                "empty-step",
            )

    @property
    def length(self) -> int:
        """Tokens of a prompt and its response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return self.responses * self.length


def fsdp_forward_bytes(shape: Shape, layout: Layout, passes: int) -> float:
    """Return bytes of FSDP2 in forward passes alone: all weights, once a pass."""
    held = shape.stage(layout.pp).held(layout.tp)
    return passes * formulas.gather_bytes(HALF * held, layout.fsdp)


def gathered_first_bytes(shape: Shape, layout: Layout) -> float:
    """Return bytes through the first rank's link where it gathers weights, then broadcasts them.

    In, what the others have; and then out, all.
    """
    whole = HALF * shape.parameters
    return formulas.gather_bytes(whole, layout.ranks) + whole


def chunk_bytes(tokens: int, scorers: int) -> int:
    """Return bytes of responses' tokens to all scorers of a step."""
    return TOKEN * tokens * scorers


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the formulas say of a step.

    Attributes:
        layout: of the roles.
        generation, scoring, training: the phases.
        syncs: of the actor's weights to the generators and, where roles are apart, of the
            critic's to the scorers.
        sync: both of them as one phase.
        host_bytes: in the host's memory, for each GPU.
        usable_bytes: of a GPU.
    """

    layout: RunLayout
    generation: Phase
    scoring: Phase
    training: Phase
    sync: Phase
    syncs: tuple[Work, ...]
    host_bytes: float
    usable_bytes: float

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The four phases, in the order of a step."""
        return self.generation, self.scoring, self.training, self.sync

    @property
    def bursts(self) -> tuple[Phase, ...]:
        """The phases that do not fit into a GPU."""
        return tuple(p for p in self.phases if p.memory_bytes > self.usable_bytes)

    @property
    def groups(self) -> dict[str, dict[str, float]]:
        """Seconds by what limits, of what goes on at the same time.

        All phases together where they take turns; else generators and scorers with the weight sync
        that they wait for, and the learner, which trains meanwhile.
        """
        if self.layout.colocated:
            return {"all": added(phase.by_limit for phase in self.phases)}
        to_generators, *to_scorers = (work.by_limit for work in self.syncs)
        return {
            "generation": added([self.generation.by_limit, to_generators]),
            "scoring": added([self.scoring.by_limit, *to_scorers]),
            "training": self.training.by_limit,
        }

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return max(sum(limits.values()) for limits in self.groups.values())

    @property
    def bottleneck(self) -> tuple[str, str]:
        """The phase that a step waits for most, and what limits that one."""
        if self.layout.colocated:
            spent = {phase.name: phase.by_limit for phase in self.phases}
        else:
            spent = self.groups
        name = max(spent, key=lambda name: sum(spent[name].values()))
        return name, max(spent[name], key=lambda limit: spent[name][limit])


def estimate(
    models: ModelShapes, layout: RunLayout, workload: StepSizes, hardware: Hardware
) -> Estimate:
    """Estimate a step.

    Raises:
        ConfigError: the models cannot be divided as the layout says. One that does not fit into
            memory is estimated all the same; see :attr:`Estimate.bursts`.
    """
    layout.check(models, hardware.links)
    if layout.sharing not in ("all", "none") or layout.learner.pp > 1:
        raise ConfigError(
            f"{layout}: on paper, roles are all colocated or all apart, and learners have no "
            "pipeline; the simulator takes others"
        )
    size = workload.responses, workload.length
    held = memory_model.phases_of(models, layout, *size, hardware)
    maker = _Maker(models, layout, workload, hardware, held)
    sync, syncs = maker.sync()
    return Estimate(
        layout=layout,
        generation=maker.generation(),
        scoring=maker.scoring(),
        training=maker.training(),
        sync=sync,
        syncs=syncs,
        host_bytes=memory_model.host_bytes(models, layout),
        usable_bytes=hardware.usable_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the phases of an estimate."""

    models: ModelShapes
    layout: RunLayout
    workload: StepSizes
    hardware: Hardware
    held: dict[str, memory_model.Parts]

    def generation(self) -> Phase:
        """Prefill of all prompts, and a decode step for each token of the rows in flight."""
        actor, tensor, load = self.models.actor, self.layout.generator.tp, self.workload
        assumed, gpu = self.hardware.assumed, self.hardware.gpu
        rows, goes = memory_model.rows_in_flight(
            self.models, self.layout, load.responses, load.length, self.hardware
        )
        prompts = rows * goes * load.prompt_tokens
        passes = math.ceil(prompts / self.layout.prefill_tokens)
        flops = formulas.forward_flops(actor, prompts, load.prompt_tokens, tensor)
        prefill, prefill_bytes = self._reduced(actor, prompts, tensor, FORWARD, passes)
        context = load.prompt_tokens + load.response_tokens / 2
        step, step_bytes = self._reduced(actor, rows, tensor, FORWARD, 1)
        steps = goes * load.response_tokens
        read = formulas.decode_read_bytes(actor, rows, context, tensor)
        once = Work(
            arithmetic_s=formulas.decode_flops(actor, rows, context, tensor)
            / (gpu.flops * assumed.prefill),
            memory_s=read / (gpu.memory_bytes_per_s * assumed.memory),
            exposed_s=step.exposed_s,
            overhead_s=step.overhead_s + assumed.step_s,
        )
        work = (
            Work(
                arithmetic_s=flops / (gpu.flops * assumed.prefill),
                exposed_s=prefill.exposed_s,
                overhead_s=prefill.overhead_s,
            ),
            once.times(steps),
        )
        return Phase(
            "generation", self.held["generation"], prefill_bytes + steps * step_bytes, work
        )

    def scoring(self) -> Phase:
        """A forward pass of reference, reward model and critic over all tokens."""
        models, layout = self.models, self.layout
        passes = layout.micro_tokens if layout.in_place else layout.prefill_tokens
        pieces = [self._scored(s, layout.scorer, layout.prefill_tokens) for s in models.frozen]
        pieces += [self._scored(critic, layout.critic, passes) for critic in models.trained[1:]]
        work = [piece for piece, _ in pieces]
        if layout.offload:  # of frozen models the host keeps its copy: they go one way
            scorer, times = layout.scorer, 1
            if scorer.fsdp > 1:  # shards are gathered from the host for each pass
                tokens = self.workload.tokens / scorer.data_parallel
                times = math.ceil(tokens / layout.prefill_tokens)
            work.append(self._to_host(times * memory_model.frozen_bytes(models, layout)))
        return Phase("scoring", self.held["scoring"], sum(size for _, size in pieces), tuple(work))

    def training(self) -> Phase:
        """Forward and backward passes of actor and critic, and their updates."""
        models, layout = self.models, self.layout
        pieces = [self._trained(shape) for shape in models.trained]
        work = [*(piece for piece, _ in pieces), self._updated(*models.trained)]
        if layout.offload:  # moments come for the updates, and go afterwards
            work.append(self._to_host(2 * memory_model.moments_bytes(models, layout.learner)))
        return Phase(
            "training", self.held["training"], sum(size for _, size in pieces), tuple(work)
        )

    def sync(self) -> tuple[Phase, tuple[Work, ...]]:
        """From the learner's shards to generators, and the critic's to scorers that are apart."""
        models, layout, links = self.models, self.layout, self.hardware.links
        if layout.colocated:
            size = formulas.reshard_bytes(models.actor, layout.learner, layout.generator)
            # Those who hold the same part of the weights later exchange their shards.
            speed = self._linked(links.data_bytes_per_s(layout.generator))
            works = [Work(exposed_s=size / speed)]
        else:
            sizes = [formulas.broadcast_bytes(shape) for shape in models.trained]
            size = max(sizes)
            works = [
                Work(exposed_s=size / self._broadcast_bytes_per_s(to))
                for size, to in zip(sizes, (layout.generator, layout.scorer), strict=False)
            ]
        return Phase(SYNC, self.held[SYNC], size, tuple(works)), tuple(works)

    def _scored(self, shape: Shape, layout: Layout, pass_tokens: int) -> tuple[Work, float]:
        """A model's forward passes, and bytes of tensor parallelism and of gathered shards."""
        tokens = self.workload.tokens / layout.data_parallel
        passes = math.ceil(tokens / pass_tokens)
        flops = formulas.forward_flops(shape, tokens, self.workload.length, layout.tp)
        reduced, size = self._reduced(shape, tokens, layout.tp, FORWARD, passes)
        gathered = fsdp_forward_bytes(shape, layout, passes)
        return Work(
            arithmetic_s=flops / (self.hardware.gpu.flops * self.hardware.assumed.prefill),
            hidden_s=gathered / self._linked(self.hardware.links.data_bytes_per_s(layout)),
            exposed_s=reduced.exposed_s,
            overhead_s=reduced.overhead_s,
        ), size + gathered

    def _trained(self, shape: Shape) -> tuple[Work, float]:
        """A trained model's passes."""
        layout, load = self.layout, self.workload
        assumed, gpu, learner = self.hardware.assumed, self.hardware.gpu, layout.learner
        tokens = load.tokens / learner.data_parallel
        passes = load.epochs * self._passes()
        flops = load.epochs * formulas.training_flops(
            shape, tokens, load.length, learner.tp, checkpointing=layout.checkpointing
        )
        reductions = CHECKPOINTED if layout.checkpointing else TRAINED
        reduced, reduced_bytes = self._reduced(
            shape, load.epochs * tokens, learner.tp, reductions, passes
        )
        sharded = formulas.fsdp_training_bytes(shape, learner, passes)
        return Work(
            arithmetic_s=flops / (gpu.flops * assumed.training),
            hidden_s=sharded / self._linked(self.hardware.links.data_bytes_per_s(learner)),
            exposed_s=reduced.exposed_s,
            overhead_s=reduced.overhead_s,
        ), sharded + reduced_bytes

    def _updated(self, *shapes: Shape) -> Work:
        gpu = self.hardware.gpu
        moved = sum(formulas.optimizer_bytes(shape, self.layout.learner) for shape in shapes)
        speed = gpu.memory_bytes_per_s * self.hardware.assumed.optimizer
        return Work(memory_s=self.workload.epochs * moved / speed)

    def _passes(self) -> int:
        return math.ceil(
            self.workload.tokens / self.layout.learner.data_parallel / self.layout.micro_tokens
        )

    def _reduced(
        self, shape: Shape, tokens: float, tensor: int, reductions: int, passes: int
    ) -> tuple[Work, float]:
        """All-reduces of tensor parallelism, and their bytes."""
        if tensor == 1:
            return Work(), 0.0
        size = formulas.tensor_bytes(shape, tokens, tensor, reductions)
        speed = self._linked(self.hardware.links.within_bytes_per_s)
        latency_s = passes * shape.layers * reductions * self.hardware.assumed.reduce_s
        return Work(exposed_s=size / speed, overhead_s=latency_s), size

    def _to_host(self, size: float) -> Work:
        return Work(host_s=size / self._linked(self.hardware.links.host_bytes_per_s))

    def _linked(self, bytes_per_s: float) -> float:
        return bytes_per_s * self.hardware.assumed.link

    def _broadcast_bytes_per_s(self, to: Layout) -> float:
        """Speed at which followers take in what the learner's ranks broadcast, all at once."""
        links, learner = self.hardware.links, self.layout.learner.ranks
        a_node = min(links.gpus_per_node, learner, to.ranks)
        members = learner + to.ranks
        if members <= links.gpus_per_node:
            a_node = members
        return self._linked(links.bytes_per_s(members, a_node))
