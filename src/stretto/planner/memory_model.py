"""The model of a device's memory in bytes, phase by phase.

:class:`DeviceMemory` counts the memory of a device's roles. ``stretto plan`` and ``stretto memory
--gpus`` apply it to layouts (:func:`phases_of`), a run's check and ``--dry-run`` to processes
(``fitting.py``). Weights and activations are in bfloat16 by default.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Literal

from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.planner.hardware import Hardware
from stretto.planner.run_layout import ModelShapes, RunLayout

Parts = Mapping[str, float]  # bytes of a GPU in a phase, by part
SYNC = "weight sync"
PHASES = ("generation", "scoring", "training", SYNC)
CACHE = "keys and values"
PUBLISHED = "published weights"
FROZEN = "frozen weights"
STATES, SHARE = "learner's states", "vLLM's share"

HALF, SINGLE = 2, 4  # bytes of a bfloat16 and of a float32
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in 4 bits: 64 share a scale in 8 bits, and 256 scales one in float32 (Dettmers
et al. 2023)."""
STATE, KEPT = 16, 12
"""Bytes of a trained parameter: master, gradient and two moments of Adam, in float32; and without
the gradient, which is zeroed, not freed (``training/trained.py``)."""
MOMENTS = 8  # bytes of its moments
BUCKET = 64 * 2**20  # bytes of a bucket in which weights are sent (``cluster.bucket_mb``)
VERSIONS = 3  # weight versions that a layout's learner keeps for other devices: the lag, and 2
CONTEXT, COMMUNICATOR = 500 * 10**6, 300 * 10**6
"""Bytes of a process's CUDA context and of a NCCL communicator. Usual sizes, not measured here."""
SLICE, SLICE_ENTRIES = 256 * 2**20, 1024
"""Bytes of a slice of logits, and its minimum of vocabulary entries (``models/logits.py``)."""


def trained_bytes(
    weights: float, adapters: int | None, shards: int, width: int, state: int = STATE
) -> tuple[float, float]:
    """Return bytes of a trained model's states in shards, and of weights frozen under adapters.
    ZeRO stage 3: 16 P / n (Rajbhandari et al. 2020). Adapters are few, so counted as if sharded."""
    if adapters is None:
        return state * weights / shards, 0.0
    return state * adapters / shards, width * weights / shards


@dataclass(frozen=True, slots=True)
class Adapters:
    """A model's LoRA adapters: all their parameters, and the sum of their input features."""

    parameters: int
    inputs: int

    def input_bytes(self, layers: float, tokens: int, *, checkpointing: bool) -> float:
        """Return the bytes of their inputs, which peft keeps in float32 for each layer."""
        return SINGLE * tokens * self.inputs / (layers if checkpointing else 1)


def weight_bytes(shape: Shape, tensor: int, width: int = HALF) -> float:
    """Return the bytes of a tensor-parallel device's weights, if they are not trained."""
    matrices = shape.layers * (shape.layer_parameters - 2 * shape.hidden) / tensor
    return width * shape.held(tensor) - (shape.in_4bit and (width - NF4) * matrices)


def _dequantized_bytes(shape: Shape, width: int) -> int:
    """Return the bytes of a dequantized 4-bit matrix. A pass dequantizes one at a time."""
    return width * shape.hidden * shape.inner if shape.in_4bit else 0


def gathered_bytes(shape: Shape, layout: Layout, *, gradients: bool) -> float:
    """Return the bytes that FSDP2 gathers in a pass of a learner.

    It gathers two layers at a time, the current and the next one, and the embedding and output
    layer throughout (``training/sharded.py``, torch's documentation of ``fully_shard``). The
    backward pass adds gradients of a layer and of the root, in bfloat16 and, for the reduction, in
    float32. A learner of one shard has a copy of all weights to compute with.
    """
    if layout.fsdp == 1:
        return weight_bytes(shape, layout.tp)
    layer, root = shape.layer_parameters / layout.tp, shape.root_parameters
    of_gradients = (HALF + SINGLE) * (layer + root) if gradients else 0
    return HALF * (2 * layer + root) + of_gradients


def layer_activation_bytes(
    shape: Shape, tokens: int, tensor: int, *, frozen: bool = False
) -> float:
    """Return the bytes that a layer keeps for its backward pass.

    Korthikanti et al. 2022, sections 4.1 and 4.2.1, with attention recomputed, without dropout.
    Each tensor-parallel device has the inputs of both norms, of attention and of the MLP. Divided
    among the devices are Q, K, V and the input of attention's output layer, and the MLP's
    intermediate state before and after its activation, twice if gated. For their layer (no gate,
    inner = 4 h) that is (8 + 24/t) h: their (10 + 24/t) h less two dropout masks. Llama's norms
    keep their input in float32 and its normed values in bfloat16. ``frozen`` matrices and norms
    keep no inputs of their own.
    """
    norm = SINGLE + HALF if shape.gated else HALF
    inputs = 2 * (norm + HALF) * shape.hidden
    attention = 2 * HALF * (shape.hidden + shape.kv_width)
    mlp = (4 if shape.gated else 2) * HALF * shape.inner
    if frozen:
        inputs = 2 * (SINGLE if shape.gated else HALF) * shape.hidden
        mlp -= HALF * shape.inner
    return tokens * (inputs + (attention + mlp) / tensor)


def activation_bytes(
    shape: Shape, tokens: int, tensor: int, *, checkpointing: bool, frozen: bool = False
) -> float:
    """Return the bytes of a training micro-batch's activations. With checkpointing: each layer's
    input (2 h a token: Korthikanti et al. 2022, section 5), and one recomputed layer."""
    layer = layer_activation_bytes(shape, tokens, tensor, frozen=frozen)
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * HALF * shape.hidden * tokens + layer


def logits_bytes(shape: Shape, tokens: int, *, gradients: bool) -> float:
    """Return the bytes of float32 logits, computed slice by slice (``models/logits.py``). A
    backward pass has four slices and the gradient of the hidden states, other passes two slices."""
    entries = min(shape.outputs, max(SLICE_ENTRIES, SLICE // (SINGLE * tokens)))
    slices = (4 if gradients else 2) * SINGLE * tokens * entries
    return slices + (SINGLE * tokens * shape.hidden if gradients else 0)


def cache_bytes(shape: Shape, tensor: int) -> float:
    """Return the bytes of a token's keys and values: 2 x layers x KV width / t x 2."""
    return 2 * shape.layers * shape.kv_width / tensor * HALF


def row_bytes(shape: Shape, positions: int, tensor: int, width: int = HALF) -> float:
    """Return the bytes of a decoding response: keys and values, and a float32 row of logits."""
    return positions * cache_bytes(shape, tensor) * width / HALF + SINGLE * shape.outputs


def bucket_bytes(shape: Shape, *, width: int = HALF, bucket: int = BUCKET) -> float:
    """Return the bytes of one side's two buckets in a weight sync, at most a model's size each."""
    return 2 * min(bucket, width * shape.parameters)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device in bytes by part, of all roles that take turns on it. ``work`` has the
    parts that each phase adds to ``held``."""

    held: Counter[str] = field(default_factory=Counter)  # permanent parts
    work: Mapping[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    scored: Counter[str] = field(default_factory=Counter)  # largest of scoring passes
    width: int = HALF  # bytes of a weight in the compute type
    bucket: int = BUCKET
    adapters: Adapters | None = None  # of a trained model; None trains all weights

    @property
    def adapter_parameters(self) -> int:
        return self.adapters.parameters if self.adapters else 0

    def during(self, *phases: str) -> Counter[str]:
        """Return the bytes by part while these phases overlap."""
        sizes = dict(self.held)
        for phase in phases:
            for what, size in self.work[phase].items():
                sizes[what] = sizes.get(what, 0) + size
        return Counter({what: size for what, size in sizes.items() if size > 0})

    def put(self, what: str, size: float, *phases: str) -> None:
        for parts in [self.work[phase] for phase in phases] or [self.held]:
            parts[what] += round(size)

    def add(self, other: DeviceMemory) -> None:
        self.held.update(other.held)
        for phase, parts in other.work.items():
            self.work[phase].update(parts)

    def put_learner(
        self,
        models: Sequence[Shape],
        layout: Layout,
        tokens: int,
        synced: Sequence[Shape],
        *,
        checkpointing: bool,
        versions: int,
        copies: bool = False,
        shared: Sequence[Shape] = (),
        values: bool = False,
        moments: Sequence[str] = (),
        side_by_side: bool = False,
        fused: bool = False,
        further_gradients: int = 0,
    ) -> None:
        """Count a learner.

        Args:
            tokens: of a micro-batch.
            synced: the models whose weights are sent at one time.
            versions: kept versions of published weights.
            copies: weights to compute with are always there, in addition to float32 masters.
            shared: the models that use another model's frozen weights.
            values: the critic, its last model, computes values in the scoring phase.
            moments: phases in which Adam's moments, and masters separate from the weights, are on
                the device rather than the host. Empty: always.
            side_by_side: the models train at the same time, not one after the other.
            fused: pipelines of both models are fused, so more micro-batches are in flight.
            further_gradients: copies of a model's gradients that passes need.
        """
        width = self.width
        adapters = self.adapter_parameters if self.adapters else None
        copied = copies and width < SINGLE and adapters is None
        for shape in models:
            weights = shape.stage(layout.pp).held(layout.tp)
            # Copies of a stage share moments and masters, but not weights and gradients.
            shared_state = MOMENTS + SINGLE if copied else MOMENTS
            adam, _ = trained_bytes(weights, adapters, layout.data_parallel, width, shared_state)
            unshared, _ = trained_bytes(weights, adapters, layout.fsdp, width, STATE - shared_state)
            if adapters is not None and shape not in shared:
                frozen = weight_bytes(shape.stage(layout.pp), layout.tp, width)
                self.put(FROZEN, frozen / layout.fsdp)
            if copied:
                self.put("learner's weights", width * weights)
            resting = round(adam) if moments else 0
            self.put(STATES, round(adam + unshared) - resting)
            if moments:
                self.put("learner's moments", resting, *moments)
            if further_gradients:
                trained = weights if adapters is None else adapters
                self.put("further gradients", further_gradients * SINGLE * trained, "training")
            if versions:
                sync_bytes = width * weights if adapters is None else SINGLE * adapters
                self.put(PUBLISHED, versions * sync_bytes / layout.data_parallel)
        for shape in synced:
            self._put_buckets(shape)
        passes = [self._pass(shape, layout, tokens, checkpointing, copies) for shape in models]
        if not side_by_side:
            passes = [max(passes, key=Counter.total)]
        for parts in passes:
            self.work["training"].update(parts)
            if fused:  # at most as many as of the larger model
                self.put("activations of more micro-batches", parts["activations"], "training")
        if values:
            critic = models[-1]
            activations = layer_activation_bytes(critic, tokens, layout.tp)
            self._put_pass(activations, gathered=gathered_bytes(critic, layout, gradients=False))

    def put_inference(
        self,
        what: str,
        shape: Shape,
        layout: Layout,
        tokens: int,
        learner: Layout | None = None,
        *,
        rows: int | None = None,
        positions: int = 0,
        logits: bool = False,
        rests: bool = False,
        reads: Literal["", "frozen", "all"] = "",
        share: float | None = None,
    ) -> None:
        """Count a generator, or a model that scores, whose weights tables call ``what``.

        Args:
            layout: of one copy. A frozen model is sharded if its slices do not divide the heads.
            tokens: of a pass without gradients.
            learner: the learner that sends its weights; ``None`` for a frozen model.
            rows: responses decoded together, or ``None`` for a model that scores.
            positions: tokens of each response, prompt included.
            logits: a scoring model computes log-probs.
            rests: weights are on the device only in their phase: a scorer's are kept on the host, a
                generator's are made for each step. Shards are gathered from the host.
            reads: weights of the learner in the same process that it uses without a copy.
            share: bytes that a generator reserves for everything but its buckets.
        """
        frozen = reads == "all" or (reads == "frozen" and self.adapters is not None)
        if rows is None and learner is None and not shape.cuts_into(layout.tp):
            layout = Layout(fsdp=layout.ranks)
        sharded = layout.fsdp > 1 or (frozen and layout.tp > 1)  # a learner's slices are, too
        weights = weight_bytes(shape, layout.tp, self.width) / layout.fsdp
        if frozen or (sharded and rests):
            weights = 0.0
        if learner or reads == "frozen":
            weights += SINGLE * self.adapter_parameters
        if learner:
            self._put_buckets(shape)
        if share is not None:
            self.put(SHARE, share, *(("generation", SYNC) if rests else ()))
            return
        activations = layer_activation_bytes(shape, tokens, layout.tp) * self.width / HALF
        activations += _dequantized_bytes(shape, self.width)
        if rows is None:
            self.put(what, weights, *(("scoring",) if rests else ()))
            size = logits_bytes(shape, tokens, gradients=False) if logits else 0
            gathered = gathered_bytes(shape, layout, gradients=False) if sharded else 0
            self._put_pass(activations, size, gathered)
        else:
            self.put(what, weights, *(("generation", SYNC) if rests else ()))
            cache = rows * row_bytes(shape, positions, layout.tp, self.width)
            self.put(CACHE, cache, *(("generation",) if rests else ()))
            self.put("activations", activations, "generation")

    def _pass(
        self, shape: Shape, layout: Layout, tokens: int, checkpointing: bool, copies: bool
    ) -> Counter[str]:
        # A pipeline's first stage holds one micro-batch per stage.
        stage, gradients = shape.stage(layout.pp), self.adapters is None
        shape = replace(shape, layers=layout.pp * stage.layers)
        rounded = self.adapters is not None and self.width < SINGLE  # frozen under adapters
        activations = activation_bytes(
            shape, tokens, layout.tp, checkpointing=checkpointing, frozen=rounded
        )
        parts = Counter(
            activations=round(activations * self.width / HALF),
            logits=round(logits_bytes(shape, tokens, gradients=True)),
        )
        if self.adapters and rounded:  # a float32 pass counts them as inputs of matrices
            inputs = self.adapters.input_bytes(shape.layers, tokens, checkpointing=checkpointing)
            parts["adapters' inputs"] = round(inputs)
        if matrix := _dequantized_bytes(shape, self.width):
            parts["dequantized"] = matrix
        if not copies:
            parts["gathered"] = round(gathered_bytes(stage, layout, gradients=gradients))
        return parts

    def _put_pass(self, activations: float, logits: float = 0, gathered: float = 0) -> None:
        """Count a scoring pass. Of all scoring passes, the largest of each kind counts."""
        sizes = {"activations": activations, "logits": logits, "gathered": gathered}
        for what, size in sizes.items():
            more = round(size) - self.scored[what]
            if more > 0:
                self.scored[what] += more
                self.work["scoring"][what] += more

    def _put_buckets(self, shape: Shape) -> None:
        size = bucket_bytes(shape, width=self.width, bucket=self.bucket)
        if self.adapters is not None:
            size = 2 * min(self.bucket, SINGLE * self.adapter_parameters)
        self.put("buckets", size, SYNC)


def phases_of(
    models: ModelShapes, layout: RunLayout, responses: int, length: int, hardware: Hardware
) -> dict[str, Parts]:
    """Return by phase the memory of the layout's fullest GPU. ``responses`` of ``length`` tokens,
    prompts included, are in flight. On separate GPUs, the learner trains during a weight sync, and
    generators keep their unfinished responses."""
    rows, _ = rows_in_flight(models, layout, responses, length, hardware)
    on = _devices(models, layout, rows, length)
    learner = on["learner"]
    generator = on["generators"]
    scorer = on["scorers"]
    if layout.colocated:
        return {phase: learner.during(phase) for phase in PHASES}
    decoding = ("generation", SYNC)
    concurrent_phases = decoding if layout.sharing == "generators" else ()
    synced = (learner.during("training", SYNC), generator.during(*decoding), scorer.during(SYNC))
    sync_parts: Counter[str] = max(synced, key=Counter.total)
    return {
        "generation": generator.during(*decoding),
        "scoring": scorer.during("scoring", *concurrent_phases),
        "training": learner.during("training"),
        SYNC: sync_parts,
    }


def learner_bytes(models: ModelShapes, layout: RunLayout) -> float:
    """Return the bytes of a learner's GPU in training, and, if not colocated, weight sync."""
    phases = ("training",) if layout.colocated else ("training", SYNC)
    return _devices(models, layout, 0, 0)["learner"].during(*phases).total()


def _devices(
    models: ModelShapes, layout: RunLayout, rows: int, length: int
) -> dict[str, DeviceMemory]:
    """Return the memory of a device by role. Roles that share devices share the object."""
    in_place, learner = layout.in_place, layout.learner
    together = DeviceMemory()
    on = {role: together if role in layout.shared else DeviceMemory() for role in layout.layouts}
    on["learner"].put_learner(
        models.trained,
        learner,
        layout.micro_tokens,
        (models.actor,),
        checkpointing=layout.checkpointing,
        versions=0 if in_place else VERSIONS,
        copies=learner.ranks == 1 or learner.pp > 1,
        values=layout.lends_critic and models.critic is not None,
        moments=("scoring", "training") if layout.offload else (),
        fused=layout.fused,
    )
    tokens = layout.prefill_tokens
    generate = partial(on["generators"].put_inference, "weights", rests=layout.sleeping)
    generate(models.actor, layout.generator, tokens, learner, rows=rows, positions=length)
    score = partial(on["scorers"].put_inference, "frozen", tokens=tokens)
    if models.reward:
        score(shape=models.reward, layout=layout.scorer, rests=layout.offload)
    for shape in models.with_logits:
        score(shape=shape, layout=layout.scorer, rests=layout.offload, logits=True)
    if models.critic and not layout.lends_critic:
        sender = learner if layout.sharing == "none" else None
        score(shape=models.critic, layout=layout.critic, learner=sender)
    return on


def rows_in_flight(
    models: ModelShapes, layout: RunLayout, responses: int, length: int, hardware: Hardware
) -> tuple[int, int]:
    """Return the responses that a generator decodes at once, and the number of rounds it needs.
    Keys and values must fit at full length. One response is decoded even if none fits."""
    share = ceil(responses / layout.generator.dp)
    response_bytes = row_bytes(models.actor, length, layout.generator.tp)
    fit = max(1, int(cache_room_bytes(models, layout, hardware) // response_bytes))
    goes = ceil(share / fit)
    return ceil(share / goes), goes


def cache_room_bytes(models: ModelShapes, layout: RunLayout, hardware: Hardware) -> float:
    """Return the bytes left for keys and values on a generator's GPU, negative if none are. An
    engine in the learner's processes keeps its cache while others work.
    """
    device = _devices(models, layout, 0, 0)["generators"]
    if layout.in_place:
        return hardware.usable_bytes - max(device.during(phase).total() for phase in PHASES)
    phases = ("generation",) if layout.colocated else ("generation", SYNC)
    return hardware.usable_bytes - device.during(*phases).total()


def frozen_bytes(models: ModelShapes, layout: RunLayout) -> float:
    """Return the bytes of a GPU's weights of frozen models, and of a critic that is a copy."""
    copies = () if layout.lends_critic else models.trained[1:]
    pairs = [(layout.scorer, shape) for shape in models.frozen]
    pairs += [(layout.critic, shape) for shape in copies]
    return sum(weight_bytes(shape, on.tp) / on.fsdp for on, shape in pairs)


def host_bytes(models: ModelShapes, layout: RunLayout) -> float:
    """Return the bytes of the host's memory that offloaded tensors of a GPU take."""
    moments = moments_bytes(models, layout.learner)
    return moments + frozen_bytes(models, layout) if layout.offload else 0.0


def moments_bytes(models: ModelShapes, learner: Layout) -> float:
    """Return the bytes of a GPU that offloading moves: moments, and masters of stages."""
    return kept_bytes(models, learner) * (1 if learner.has_stages else MOMENTS / KEPT)


def kept_bytes(models: ModelShapes, learner: Layout) -> float:
    """Return the bytes of a learner's states on a GPU that outlive a step: all but gradients, and
    weights to compute with. Copies share them."""
    parameters = sum(shape.stage(learner.pp).held(learner.tp) for shape in models.trained)
    return KEPT * parameters / learner.data_parallel
