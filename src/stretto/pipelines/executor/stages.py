"""Stages of consecutive layers, cut out of transformers models and placed on the ranks.

A stage is the model's own decoder without its other layers. Its forward pass is transformers', with
hidden states as input embeddings. The parts before and after the layers come from the pipeline plan
that the architecture declares (``config.base_model_pp_plan``).

Shapes: b sequences in a micro-batch, L padded tokens, H hidden.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.config import PipelineConfig
from stretto.errors import ConfigError, ModelError
from stretto.layout import Bounds, FullParameter, Layout
from stretto.models import attention
from stretto.models.forward import backbone, output_head, plain_states, unwrapped
from stretto.models.heads import HEAD_NAMES, scalar_head
from stretto.models.logits import OutputHead
from stretto.models.tensor_parallel import Cuts, Slices, cut_linears, plan_cuts
from stretto.models.weights import with_own_structure
from stretto.pipelines.problem import Problem

Name = Literal["actor", "critic"]
NAMES: tuple[Name, Name] = ("actor", "critic")
_TOLERANCE = 1e-3  # largest error of the cut model's hidden states, relative to the largest state


class Stage(nn.Module):
    """One stage of a decoder: some of its layers, sharing the model's parameters. It can be
    pickled.

    The first stage embeds token ids. The last one applies the final norm and has the head, which
    the loss applies: :attr:`head` for a language model, and
    :func:`~stretto.models.heads.apply_scalar_head` for a classifier.

    Its ``index`` counts from 0. ``names`` maps its parameters' names to those in the full model,
    where a tied weight has the one name under which the model lists it. ``tied`` are the full
    model's names of weights that both the first and the last stage hold. ``slices`` are the ranks
    that hold the rest of its linear layers, if they are sliced, by ``cuts`` of the full model.
    """

    slices: Slices | None = None
    cuts = Cuts()

    def __init__(self, body: nn.Module, index: int, stages: int) -> None:
        super().__init__()
        self.body = body
        self.index, self.stages = index, stages
        self.first, self.last = index == 0, index == stages - 1
        config: Any = body.config
        self.hidden_size: int = config.hidden_size
        self.names: Mapping[str, str] = {}
        self.tied: frozenset[str] = frozenset()
        self._head: OutputHead | None = None  # its scale and cap, without the module's weight

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, cast(Any, self.body).dtype)

    @property
    def head(self) -> OutputHead:
        """The output layer of a language model's last stage. Raises ModelError on other stages."""
        if self._head is None:
            raise ModelError(
                f"stage {self.index} of {self.stages} has no output layer; only the last one of a "
                "language model has it",
                "stage-without-head",
            )
        linear = cast(nn.Module, self.lm_head)
        bias = cast(Tensor | None, getattr(linear, "bias", None))
        return replace(self._head, weight=cast(Tensor, linear.weight), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids [b, L] (first stage) or hidden states [b, L, H] to hidden states."""
        inputs = {"input_ids" if self.first else "inputs_embeds": x}
        return plain_states(self.body, **inputs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if cast(Any, self.body).config._attn_implementation == attention.NAME:
            attention.register()  # the unpickling process may not know it yet


def cut(model: nn.Module, stages: int, index: int) -> Stage:
    """Make a stage of a causal language model or sequence classifier, which shares its parameters.
    Layers, also with LoRA adapters, are divided evenly, with one more for each of the first stages
    if necessary. Raises ModelError if there are too few, or the model does not declare its parts.
    """
    stage, clone = _cut(model, stages, index)
    linear = unwrapped(clone).get_output_embeddings()
    if stage.last and linear is not None:
        stage._head = output_head(model)
    return stage


def _cut(model: nn.Module, stages: int, index: int) -> tuple[Stage, nn.Module]:
    """Make a stage without reading weights. Returns also the tree of modules that it is part of."""
    name_by_id = {id(p): name for name, p in model.named_parameters()}
    decoder: Any = backbone(model)
    plan, layers = _parts(decoder)
    count = len(getattr(decoder, layers))
    if count < stages:
        raise ModelError(
            f"{type(decoder).__name__} has {count} layers, too few for {stages} stages; use at "
            f"most {count}",
            "too-few-layers",
        )
    share, remainder = divmod(count, stages)
    begin = index * share + min(index, remainder)
    clone = with_own_structure(model)
    # Its hook is for reentrant checkpointing, and as a local function cannot be pickled.
    unwrapped(clone).disable_input_require_grads()
    stage = Stage(backbone(clone), index, stages)
    _keep(stage, plan, layers, begin, begin + share + (index < remainder))
    if stage.last:
        lm = unwrapped(clone)
        if (linear := lm.get_output_embeddings()) is not None:
            stage.lm_head = linear
        else:
            head = scalar_head(clone)
            name = next(name for name in HEAD_NAMES if getattr(lm, name, None) is head)
            setattr(stage, name, head)
    parameters = dict(stage.named_parameters())
    stage.names = {name: name_by_id[id(p)] for name, p in parameters.items()}
    stage.tied = _tied(model, decoder, plan) if stages > 1 else frozenset()
    return stage, clone


def _parts(decoder: Any) -> tuple[list[str], str]:
    plan = list(getattr(decoder.config, "base_model_pp_plan", None) or ())
    layers = [name for name in plan if isinstance(getattr(decoder, name, None), nn.ModuleList)]
    if len(layers) != 1 or getattr(decoder, plan[0], None) is not decoder.get_input_embeddings():
        raise ModelError(
            f"{type(decoder).__name__} has no plan of its parts that starts at the embeddings and "
            "has one list of layers (config.base_model_pp_plan), so it cannot be cut into stages; "
            "train it without a pipeline",
            "no-plan-of-parts",
        )
    return plan, layers[0]


def _keep(stage: Stage, plan: list[str], layers: str, begin: int, end: int) -> None:
    """Remove the other stages' parts from a decoder, and adapt its config."""
    body: Any = stage.body
    at = plan.index(layers)
    if not stage.first:
        for name in plan[:at]:
            setattr(body, name, None if name == plan[0] else nn.Identity())
    if not stage.last:
        for name in plan[at + 1 :]:
            setattr(body, name, nn.Identity())
    setattr(body, layers, getattr(body, layers)[begin:end])
    body.config.num_hidden_layers = end - begin
    if (types := getattr(body.config, "layer_types", None)) is not None:
        body.config.layer_types = types[begin:end]


def _tied(model: nn.Module, decoder: Any, plan: list[str]) -> frozenset[str]:
    linear = unwrapped(model).get_output_embeddings()
    head_ids = set() if linear is None else {id(p) for p in linear.parameters()}
    embedding_ids = {id(p) for p in getattr(decoder, plan[0]).parameters()}
    shared_ids = head_ids & embedding_ids
    return frozenset(name for name, p in model.named_parameters() if id(p) in shared_ids)


def check_stages(config: PipelineConfig, name: Name, model: nn.Module) -> None:
    """Check that a model can be cut by these settings, as :func:`check_cut` does. Of several ranks
    only the first one checks, because the passes read the full model. Its error ends the others.
    """
    if dist.is_initialized() and dist.get_rank():
        return
    try:
        check_cut(model, config.stages_of(name))
    except ModelError as error:
        raise ModelError(f"{config.describe_stages(name)}: {error}", error.code) from None


@torch.no_grad()
def check_cut(model: nn.Module, stages: int) -> None:
    """Check that the stages, one after the other, compute the same as the model. Raises ModelError
    if it has fewer layers than stages, or inseparable parts."""
    parts = [cut(model, stages, index) for index in range(stages)]
    holders = Counter(name for stage in parts for name in stage.names.values())
    for name, parameter in model.named_parameters():
        expected_count = 2 if name in parts[0].tied else 1
        if parameter.requires_grad and holders[name] != expected_count:
            raise ModelError(
                f"parameter '{name}' would be on {holders[name]} of {len(parts)} stages; it must "
                f"be on {expected_count}. Freeze it, or train without a pipeline",
                "parameter-on-other-stages",
            )
    decoder: Any = backbone(model)
    embedding = decoder.get_input_embeddings().weight
    ids = torch.arange(8, device=embedding.device).remainder(embedding.shape[0])[None]
    x = ids
    for stage in parts:
        x = stage(x)
        if x.dtype != stage.dtype:
            raise ModelError(
                f"stage {stage.index} of {type(decoder).__name__} turns {stage.dtype} weights into "
                f"{x.dtype} hidden states; load the model in one type (model.dtype)",
                "types-mixed",
            )
    expected = plain_states(decoder, input_ids=ids)
    worst = (x - expected).abs().max().item()
    if not worst <= _TOLERANCE * expected.abs().max().item():
        raise ModelError(
            f"{type(decoder).__name__} cut into {stages} stages computes something else (hidden "
            f"states differ by {worst:.3g}): it does something between embeddings and layers that "
            "its plan of parts does not say. Train it without a pipeline",
            "stages-compute-otherwise",
        )


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Layout of the two models on the ranks. Raises ConfigError if the two do not cover the same.

    A device of the problem is a slot of neighbouring ranks, as many as the larger of both models'
    numbers of slices. The model with fewer slices has several consecutive stages in a slot, which
    the problem sees as one (Zhong et al. 2024, "RLHFuse", section 5.2). The block of all slots is
    repeated ``replicas`` times.
    """

    actor_stages: int
    actor_pipelines: int
    critic_stages: int
    critic_pipelines: int
    actor_tp: int = 1
    critic_tp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        covered = [self.tp(name) * math.prod(self.of(name)) for name in NAMES]
        left_over = [(self.slot_size % self.tp(n), self.of(n)[0] % self.merged(n)) for n in NAMES]
        if covered[0] != covered[1] or any(map(any, left_over)):
            raise ConfigError(
                f"{self._described('actor')}, and {self._described('critic')}: both must cover the "
                "same ranks, and stages with fewer slices must fill them in whole numbers",
                "other-devices",
            )

    @property
    def slot_size(self) -> int:
        return max(self.actor_tp, self.critic_tp)

    @property
    def slots(self) -> int:
        return self.actor_stages * self.actor_pipelines // self.merged("actor")

    @property
    def ranks(self) -> int:
        return self.replicas * self.slots * self.slot_size

    def of(self, name: Name) -> tuple[int, int]:
        """Return a model's stages, and its pipelines in the block."""
        if name == "actor":
            return self.actor_stages, self.actor_pipelines
        return self.critic_stages, self.critic_pipelines

    def tp(self, name: Name) -> int:
        return self.actor_tp if name == "actor" else self.critic_tp

    def merged(self, name: Name) -> int:
        """Return the consecutive stages of a model in a slot."""
        return self.slot_size // self.tp(name)

    def slot(self, rank: int) -> int:
        return rank // self.slot_size % self.slots

    def replica(self, rank: int) -> int:
        return rank // (self.slots * self.slot_size)

    def place(self, name: Name, rank: int) -> tuple[int, int]:
        """Return the pipeline in the block, and the stage, that a rank holds."""
        merged = self.merged(name)
        wide = self.of(name)[0] // merged
        pipeline, along = divmod(self.slot(rank), wide)
        along = along if name == "actor" else wide - 1 - along
        return pipeline, along * merged + rank % self.slot_size // self.tp(name)

    def column(self, name: Name, rank: int) -> int:
        """Return the number of the slice of its stage that a rank holds."""
        return rank % self.tp(name)

    def rank(self, name: Name, pipeline: int, stage: int, column: int = 0, replica: int = 0) -> int:
        """Return the rank that holds a slice of a stage. The inverse of :meth:`place`."""
        merged = self.merged(name)
        wide = self.of(name)[0] // merged
        along, part = divmod(stage, merged)
        slot = pipeline * wide + (along if name == "actor" else wide - 1 - along)
        return (replica * self.slots + slot) * self.slot_size + part * self.tp(name) + column

    def neighbour(self, name: Name, rank: int, step: int) -> int | None:
        """Return the rank with the next stage (``step`` 1), or the one before (-1), if any."""
        pipeline, stage = self.place(name, rank)
        if not 0 <= stage + step < self.of(name)[0]:
            return None
        column, replica = self.column(name, rank), self.replica(rank)
        return self.rank(name, pipeline, stage + step, column, replica)

    def alike(self, name: Name, stages: Collection[int]) -> Iterator[list[int]]:
        """Yield for each slice of these stages the ranks of all pipelines that hold it."""
        pipelines, replicas = range(self.of(name)[1]), range(self.replicas)
        for column in range(self.tp(name)):
            places = product(pipelines, stages, replicas)
            yield sorted(self.rank(name, p, stage, column, copy) for p, stage, copy in places)

    def sliced_over(self, name: Name) -> Iterator[list[int]]:
        """Yield the ranks that hold the slices of a stage, for each stage and copy."""
        for first in range(0, self.ranks, self.tp(name)):
            yield [*range(first, first + self.tp(name))]

    def _described(self, name: Name) -> str:
        stages, pipelines = self.of(name)
        slices = f" in {self.tp(name)} slices" if self.slot_size > 1 else ""
        return f"{pipelines} pipelines of {stages} stages{slices} of the {name}"

    def require(self, problem: Problem, *micro_batches: int) -> None:
        """Check that a problem has this layout and these numbers of micro-batches of the models."""
        for name, model, count in zip(NAMES, problem.models, micro_batches, strict=True):
            problem_layout = model.stages, model.pipelines, model.pipelines * model.micro_batches
            stages, pipelines = self.of(name)
            run_layout = stages // self.merged(name), pipelines, count
            if problem_layout != run_layout:
                problem_text, run_text = (
                    f"{pipelines} pipelines of {stages} stages with {total} micro-batches"
                    for stages, pipelines, total in (problem_layout, run_layout)
                )
                raise ConfigError(
                    f"the problem's {name} has {problem_text}, but what runs has {run_text}; "
                    "give the problem of this run",
                    "other-problem",
                )


def layout_of(config: PipelineConfig) -> StageLayout:
    actor, critic = ((config.stages_of(name), config.pipelines(name)) for name in NAMES)
    return StageLayout(*actor, *critic, *config.stage_slices, config.replicas)


def slice_stage(stage: Stage, cuts: Cuts, group: dist.ProcessGroup | None) -> None:
    """Keep a rank's slices of a stage's linear layers, which a group holds. ``cuts`` are of the
    full model.
    """
    if group is None:
        return
    stage.slices, stage.cuts = Slices(group), cuts
    dims = {local: cuts.dims[n] for local, n in stage.names.items() if n in cuts.dims}
    cut_linears(stage, Cuts(dims), stage.slices)


@dataclass(frozen=True, slots=True)
class StageOwners:
    """The ranks that update, send and save the parameters of a model in stages. Copies of a stage,
    in other pipelines and replicas, share its parameters among themselves. Parameters of no stage,
    which are frozen, are the first stage's. ``holders`` has the stage and the copy of each one, and
    ``cuts`` are those of the full model.
    """

    name: Name
    layout: StageLayout
    holders: Mapping[str, tuple[int, int]]
    cuts: Cuts

    @classmethod
    def of(cls, model: nn.Module, name: Name, layout: StageLayout) -> StageOwners:
        """Return the owners of a full model, by its structure. Reads no weights."""
        stages, pipelines = layout.of(name)
        stage_of = {parameter: 0 for parameter, _ in model.named_parameters()}
        for index in reversed(range(stages)):  # a tied weight belongs to the first stage
            stage, _ = _cut(model, stages, index)
            stage_of |= dict.fromkeys(stage.names.values(), index)
        sizes = {parameter: p.numel() for parameter, p in model.named_parameters()}
        loads = [[0] * (pipelines * layout.replicas) for _ in range(stages)]
        holders = dict[str, tuple[int, int]]()
        for parameter in sorted(sizes, key=lambda key: (-sizes[key], key)):
            of_copies = loads[stage_of[parameter]]
            copy = of_copies.index(min(of_copies))
            of_copies[copy] += sizes[parameter]
            holders[parameter] = stage_of[parameter], copy
        return cls(name, layout, holders, plan_cuts(model, layout.tp(name)))

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def tp(self) -> int:
        return self.layout.tp(self.name)

    def rank_of(self, parameter: str, column: int) -> int:
        stage, copy = self.holders[parameter]
        replica, pipeline = divmod(copy, self.layout.of(self.name)[1])
        return self.layout.rank(self.name, pipeline, stage, column, replica)

    def bounds(self, full: FullParameter, rank: int) -> Bounds:
        return Layout(tp=self.tp).bounds(full, self.layout.column(self.name, rank))

    def own(self, full: Mapping[str, FullParameter], rank: int) -> dict[str, Bounds]:
        column = self.layout.column(self.name, rank)
        owned = {name: full[name] for name in full if self.rank_of(name, column) == rank}
        return Layout(tp=self.tp).own(owned, column)
