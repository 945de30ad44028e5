"""Stages of consecutive layers: cut out of transformers models, and laid out on the ranks.

A stage is the model's own decoder with its other layers left out: its forward pass is the one of
transformers, fed with hidden states in place of embeddings. What comes before and after the layers
is read from the pipeline plan that the architecture declares (``config.base_model_pp_plan``).

Shapes: b sequences in a micro-batch, L padded tokens, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from stretto.config import PipelineConfig
from stretto.errors import ConfigError, ModelError
from stretto.models import attention
from stretto.models.forward import backbone, output_head, unwrapped
from stretto.models.heads import HEAD_NAMES, scalar_head
from stretto.models.logits import OutputHead
from stretto.models.weights import with_own_structure
from stretto.pipelines.problem import ModelPipelines, Problem

Name = Literal["actor", "critic"]
NAMES: tuple[Name, Name] = ("actor", "critic")
_TOLERANCE = 1e-3
"""Largest error of the cut model's hidden states, relative to the largest state."""


class Stage(nn.Module):
    """One stage of a decoder: some of its layers, sharing the model's parameters.

    The first stage embeds token ids; the last applies the final norm and has the head, which the
    loss applies: :attr:`head` for a language model, and
    :func:`~stretto.models.heads.apply_scalar_head` takes a last stage as it takes a classifier.

    It can be pickled, and so sent to the process that runs it.

    Attributes:
        index: number of this stage, from 0.
        stages: number of stages that the model was cut into.
        hidden_size: H.
        dtype: type of hidden states.
        names: own parameter names to those in the whole model (``named_parameters()`` of what was
            cut; a tied weight has the one name under which the model lists it).
        tied: names, in the whole model, of weights that the first and the last stage both hold.
    """

    def __init__(self, body: nn.Module, index: int, stages: int) -> None:
        super().__init__()
        self.body = body
        self.index, self.stages = index, stages
        config: Any = body.config
        self.hidden_size: int = config.hidden_size
        self.dtype: torch.dtype = cast(Any, body).dtype
        self.names: Mapping[str, str] = {}
        self.tied: frozenset[str] = frozenset()
        self._head: OutputHead | None = None  # its scale and cap; the weight is the module's

    @property
    def first(self) -> bool:
        """Return whether this is the first stage, which takes token ids."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Return whether this is the last stage, whose hidden states are the model's."""
        return self.index == self.stages - 1

    @property
    def head(self) -> OutputHead:
        """The output layer of a language model's last stage, for ``token_logprobs``.

        Raises:
            ModelError: the stage has none.
        """
        if self._head is None:
            raise ModelError(
                f"stage {self.index} of {self.stages} has no output layer; only the last one of a "
                "language model has it"
            )
        linear = cast(nn.Module, self.lm_head)
        bias = cast(Tensor | None, getattr(linear, "bias", None))
        return replace(self._head, weight=cast(Tensor, linear.weight), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [b, L] (first stage) or hidden states [b, L, H] -> hidden states [b, L, H]."""
        given = {"input_ids" if self.first else "inputs_embeds": x}
        return cast(Tensor, self.body(**given, use_cache=False).last_hidden_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if cast(Any, self.body).config._attn_implementation == attention.NAME:
            attention.register()  # the process that unpickles may not know it yet


def cut(model: nn.Module, stages: int, index: int) -> Stage:
    """Stage ``index`` of a causal language model or sequence classifier, its parameters shared.

    Layers are divided evenly; where they do not divide, the first stages have one more. The model
    may be wrapped in LoRA adapters.

    Raises:
        ModelError: the model has fewer layers than stages, or does not say what its parts are.
    """
    known = {id(p): name for name, p in model.named_parameters()}
    decoder: Any = backbone(model)
    plan, layers = _parts(decoder)
    count = len(getattr(decoder, layers))
    if count < stages:
        raise ModelError(
            f"{type(decoder).__name__} has {count} layers, too few for {stages} stages; use at "
            f"most {count}",
            "too-few-layers",
        )
    share, more = divmod(count, stages)
    begin = index * share + min(index, more)
    whole = with_own_structure(model)
    # What reentrant checkpointing would need; as a local function it cannot be pickled.
    unwrapped(whole).disable_input_require_grads()
    stage = Stage(backbone(whole), index, stages)
    _keep(stage, plan, layers, begin, begin + share + (index < more))
    if stage.last:
        _give_head(stage, model, whole)
    own = dict(stage.named_parameters())
    stage.names = {name: known[id(p)] for name, p in own.items()}
    stage.tied = _tied(model, decoder, plan) if stages > 1 else frozenset()
    return stage


def _parts(decoder: Any) -> tuple[list[str], str]:
    """Names of a decoder's parts in the order of the forward pass, and which are the layers."""
    plan = list(getattr(decoder.config, "base_model_pp_plan", None) or ())
    layers = [name for name in plan if isinstance(getattr(decoder, name, None), nn.ModuleList)]
    if len(layers) != 1 or getattr(decoder, plan[0], None) is not decoder.get_input_embeddings():
        raise ModelError(
            f"{type(decoder).__name__} has no plan of its parts that starts at the embeddings and "
            "has one list of layers (config.base_model_pp_plan), so it cannot be cut into stages; "
            "train it without a pipeline"
        )
    return plan, layers[0]


def _keep(stage: Stage, plan: list[str], layers: str, begin: int, end: int) -> None:
    """Leave out of a decoder what other stages do; its config then describes what is left."""
    body: Any = stage.body
    at = plan.index(layers)
    if not stage.first:
        setattr(body, plan[0], None)
        for name in plan[1:at]:
            setattr(body, name, nn.Identity())
    if not stage.last:
        for name in plan[at + 1 :]:
            setattr(body, name, nn.Identity())
    setattr(body, layers, getattr(body, layers)[begin:end])
    config = body.config
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = end - begin
    if types is not None:
        config.layer_types = types[begin:end]


def _give_head(stage: Stage, model: nn.Module, whole: nn.Module) -> None:
    """Put the head of a copy of the model on its last stage."""
    lm = unwrapped(whole)
    linear = lm.get_output_embeddings()
    if linear is not None:
        stage._head = output_head(model)
        stage.lm_head = linear
        return
    head = scalar_head(whole)
    name = next(name for name in HEAD_NAMES if getattr(lm, name, None) is head)
    setattr(stage, name, head)


def _tied(model: nn.Module, decoder: Any, plan: list[str]) -> frozenset[str]:
    linear = unwrapped(model).get_output_embeddings()
    of_head = set() if linear is None else {id(p) for p in linear.parameters()}
    of_embedding = {id(p) for p in getattr(decoder, plan[0]).parameters()}
    both = of_head & of_embedding
    return frozenset(name for name, p in model.named_parameters() if id(p) in both)


def for_sending(stage: Stage) -> Stage:
    """A stage as it travels to another process, which has no use for the place of its weights here.

    On a CPU it shares them with the stage that is given; from a GPU they are copied.
    """
    weights: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().cpu(), p.requires_grad) for p in stage.parameters()
    }
    return deepcopy(stage, weights | {id(b): b.cpu() for b in stage.buffers()})


def check_stages(config: PipelineConfig, name: Name, model: nn.Module) -> None:
    """Check that a model can be cut as the settings say, with ``ranks`` above 0.

    Raises ModelError if it cannot; see :func:`check_cut`.
    """
    try:
        check_cut(model, config.stages(name))
    except ModelError as error:
        raise ModelError(f"{config.describe_stages(name)}: {error}", error.code) from None


@torch.no_grad()
def check_cut(model: nn.Module, stages: int) -> None:
    """See that the stages, one after the other, compute what the model does.

    Raises:
        ModelError: it has fewer layers than stages, or parts that cannot be cut apart.
    """
    parts = [cut(model, stages, index) for index in range(stages)]
    _check_parameters(model, parts)
    decoder: Any = backbone(model)
    embedding = decoder.get_input_embeddings().weight
    ids = torch.arange(8, device=embedding.device).remainder(embedding.shape[0])[None]
    x = ids
    for stage in parts:
        x = stage(x)
        if x.dtype != stage.dtype:
            raise ModelError(
                f"stage {stage.index} of {type(decoder).__name__} turns {stage.dtype} weights into "
                f"{x.dtype} hidden states; load the model in one type (model.dtype)"
            )
    whole = decoder(input_ids=ids, use_cache=False).last_hidden_state
    worst = (x - whole).abs().max().item()
    if not worst <= _TOLERANCE * whole.abs().max().item():
        raise ModelError(
            f"{type(decoder).__name__} cut into {stages} stages computes something else (hidden "
            f"states differ by {worst:.3g}): it does something between embeddings and layers that "
            "its plan of parts does not say. Train it without a pipeline"
        )


def _check_parameters(model: nn.Module, parts: list[Stage]) -> None:
    """Check that every trained parameter is on one stage, or on two if it is tied."""
    holders = Counter(name for stage in parts for name in stage.names.values())
    tied = parts[0].tied
    for name, parameter in model.named_parameters():
        wanted = 2 if name in tied else 1
        if parameter.requires_grad and holders[name] != wanted:
            raise ModelError(
                f"parameter '{name}' would be on {holders[name]} of {len(parts)} stages; it must "
                f"be on {wanted}. Freeze it, or train without a pipeline"
            )


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Layout of the two models on the ranks; rank r is device r of the problem.

    Raises:
        ConfigError: the two do not cover the same ranks.
    """

    actor_stages: int
    actor_pipelines: int
    critic_stages: int
    critic_pipelines: int

    def __post_init__(self) -> None:
        self.problem(self.actor_pipelines, self.critic_pipelines)  # which checks it

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.actor_stages * self.actor_pipelines

    def of(self, name: Name) -> tuple[int, int]:
        """Stages and pipelines of a model."""
        if name == "actor":
            return self.actor_stages, self.actor_pipelines
        return self.critic_stages, self.critic_pipelines

    def place(self, name: Name, rank: int) -> tuple[int, int]:
        """Pipeline (from 0 in its model) and stage of a model on a rank."""
        stages, _ = self.of(name)
        pipeline, along = divmod(rank, stages)
        return pipeline, along if name == "actor" else stages - 1 - along

    def rank(self, name: Name, pipeline: int, stage: int) -> int:
        """The inverse of :meth:`place`."""
        stages, _ = self.of(name)
        return pipeline * stages + (stage if name == "actor" else stages - 1 - stage)

    def problem(self, actor: int, critic: int) -> Problem:
        """The problem of so many micro-batches (of all pipelines) where nothing is measured yet.

        A backward takes as long as two forwards, all stages are alike, as are the two models.

        Raises:
            ConfigError: micro-batches do not divide evenly among the pipelines.
        """
        return Problem(self._side("actor", actor), self._side("critic", critic))

    def require(self, problem: Problem, actor: int, critic: int) -> None:
        """See that a problem is of this layout and of so many micro-batches.

        Raises:
            ConfigError: it is not, or they do not divide evenly among the pipelines.
        """
        for name, side, mine in zip(
            NAMES, problem.models, self.problem(actor, critic).models, strict=True
        ):
            given, wanted = (
                f"{s.pipelines} pipelines x {s.stages} stages x {s.micro_batches} micro-batches"
                for s in (side, mine)
            )
            if given != wanted:
                raise ConfigError(
                    f"the problem's {name} has {given}, but what runs has {wanted}; give the "
                    "problem of this run"
                )

    def _side(self, name: Name, micro_batches: int) -> ModelPipelines:
        stages, pipelines = self.of(name)
        if pipelines > 0 and micro_batches % pipelines:
            raise ConfigError(
                f"{micro_batches} micro-batches of the {name} do not divide evenly among its "
                f"{pipelines} pipelines; make them a multiple"
            )
        each = micro_batches // max(pipelines, 1)
        return ModelPipelines.of(stages, pipelines, each, forward=1, backward=2, activation=1.0)
