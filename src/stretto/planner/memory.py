"""Memory of a device, phase by phase, in bytes: the one model of it.

:func:`device_memory` counts what the roles on a device hold. ``stretto plan`` and ``stretto memory
--gpus`` ask it about layouts (:func:`phases_of`); a run's check and ``--dry-run`` ask about the
processes of its settings (``fitting.py``). Weights and activations are in bfloat16 where nothing
else is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from stretto.models.shapes import Shape
from stretto.planner.hardware import Hardware
from stretto.planner.layout import Layout, Mesh, ModelShapes

Parts = Mapping[str, float]
"""Bytes of a GPU in a phase, by what takes them."""
SYNC = "weight sync"
PHASES = ("generation", "scoring", "training", SYNC)
CACHE, PUBLISHED, FROZEN = "keys and values", "published weights", "frozen weights"
STATES = "learner's states"

HALF, SINGLE = 2, 4
"""Bytes of a bfloat16 and of a float32."""
STATE = 16
"""Bytes of a trained parameter: master, gradient and two moments of Adam, in float32.

The learner keeps them all the time; gradients are zeroed, not freed (``training/trained.py``).
"""
KEPT = 12
"""... of which are worth keeping between steps: all but the gradient."""
BUCKET = 64 * 2**20
"""Bytes of a bucket in which weights travel (``cluster.bucket_mb``)."""
SLICE = 256 * 2**20
"""Bytes of a slice of logits in float32 (``models/logits.py``)."""
SLICE_ENTRIES = 1024
"""Vocabulary entries that a slice has at least."""


def trained_bytes(
    weights: float, adapters: int | None, shards: int, width: int, state: int = STATE
) -> tuple[float, float]:
    """Return bytes of a trained model's states in shards (ZeRO stage 3), and of frozen weights.

    Rajbhandari et al. 2020: 16 P / n. Weights are frozen beside LoRA adapters, which are few and
    counted as if they were in shards too.
    """
    if adapters is None:
        return state * weights / shards, 0.0
    return state * adapters / shards, width * weights / shards


def state_bytes(shape: Shape, mesh: Mesh) -> float:
    """Return bytes of the states on a device, where all weights are trained."""
    return trained_bytes(shape.stage(mesh.stages).held(mesh.tensor), None, mesh.data, HALF)[0]


def weight_bytes(shape: Shape, tensor: int) -> float:
    """Return bytes of a tensor-parallel device's weights."""
    return HALF * shape.held(tensor)


def gathered_bytes(shape: Shape, mesh: Mesh, *, gradients: bool) -> float:
    """Return bytes of what FSDP2 gathers in a pass of a learner.

    Two layers are there at a time, the one at work and the next one, which is fetched meanwhile;
    embedding and output layer are there throughout (``training/sharded.py``; "FSDP2" in torch's
    documentation of ``fully_shard``). In the backward pass, gradients of a layer and of the root
    come on top, in bfloat16 and, to be reduced, in float32. A learner of one shard has a copy of
    all weights to compute with.
    """
    if mesh.data == 1:
        return weight_bytes(shape, mesh.tensor)
    layer, root = shape.layer_parameters / mesh.tensor, shape.root_parameters
    of_gradients = (HALF + SINGLE) * (layer + root) if gradients else 0
    return HALF * (2 * layer + root) + of_gradients


def layer_activation_bytes(shape: Shape, tokens: int, tensor: int) -> float:
    """Return bytes that a layer keeps for its backward pass.

    Counted as Korthikanti et al. 2022 do (sections 4.1 and 4.2.1), with attention recomputed and
    without dropout. On each tensor-parallel device a token keeps inputs of both norms, of attention
    and of the MLP; divided among them, Q, K, V and the input of attention's output layer, and the
    MLP's intermediate state before and after its activation, twice where it is gated. For their
    layer (no gate, inner = 4 h) that is (8 + 24/t) h: their (10 + 24/t) h less two dropout masks.

    Llama's norms compute in float32, and keep their input so, and what they make of it in bfloat16.
    For a Llama layer this is what autograd keeps, measured on a CPU (``tests/planner``).
    """
    norm = SINGLE + HALF if shape.gated else HALF
    whole = 2 * (norm + HALF) * shape.hidden
    attention = 2 * HALF * (shape.hidden + shape.kv_width)
    mlp = (4 if shape.gated else 2) * HALF * shape.inner
    return tokens * (whole + (attention + mlp) / tensor)


def activation_bytes(shape: Shape, tokens: int, tensor: int, *, checkpointing: bool) -> float:
    """Return bytes of activations of a micro-batch that is trained on.

    With checkpointing each layer keeps its input alone (2 h a token: Korthikanti et al. 2022,
    section 5), and one layer at a time what it computes again.
    """
    layer = layer_activation_bytes(shape, tokens, tensor)
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * HALF * shape.hidden * tokens + layer


def logits_bytes(shape: Shape, tokens: int, *, gradients: bool) -> float:
    """Return bytes of logits, which are made slice by slice (``models/logits.py``).

    Four slices in float32 in a backward pass, and the gradient of the hidden states in float32; two
    slices without gradients. A scalar head has next to nothing.
    """
    entries = min(shape.outputs, max(SLICE_ENTRIES, SLICE // (SINGLE * tokens)))
    slices = (4 if gradients else 2) * SINGLE * tokens * entries
    return slices + (SINGLE * tokens * shape.hidden if gradients else 0)


def cache_bytes(shape: Shape, tensor: int) -> float:
    """Return bytes of a token's keys and values: 2 x layers x KV width / t x 2."""
    return 2 * shape.layers * shape.kv_width / tensor * HALF


def row_bytes(shape: Shape, positions: int, tensor: int, width: int = HALF) -> float:
    """Return bytes of a response that is decoded: keys and values, and a float32 row of logits."""
    return positions * cache_bytes(shape, tensor) * width / HALF + SINGLE * shape.outputs


def bucket_bytes(shape: Shape, mesh: Mesh, *, width: int = HALF, bucket: int = BUCKET) -> float:
    """Return bytes of one side's two buckets at a sync of a learner's shards.

    No tensor is cut but by the shards: a larger one has a bucket of its own. A small model has
    buckets as large as itself (``weights/buckets.py``). A weight has ``width`` bytes on its way.
    """
    whole = width * shape.parameters / mesh.data
    return 2 * min(max(bucket, width * shape.largest_tensor / mesh.data), whole)


# -- what a device holds ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerPart:
    """A learner's part on a device.

    Attributes:
        mesh: shards, slices and stages of each model.
        tokens: of a micro-batch.
        synced: of the models, those whose weights are sent at one time.
        width: bytes of a weight in the type that is computed in.
        adapters: parameters of each model's LoRA adapters; ``None`` where all weights are trained.
        bucket: bytes of a bucket.
        versions: published versions of the weights that are kept.
        copies: weights to compute with are there all the time, beside float32 masters.
        values: the learner's critic computes values while others score.
        moments: phases in which Adam's moments, and masters that are not the weights, are here;
            else they rest on the host. Empty: always.
        offload: all states are on the host but in their phases.
    """

    models: tuple[Shape, ...]
    mesh: Mesh
    tokens: int
    synced: tuple[Shape, ...] = ()
    checkpointing: bool = False
    width: int = HALF
    adapters: int | None = None
    bucket: int = BUCKET
    versions: int = 0
    copies: bool = False
    values: bool = False
    moments: tuple[str, ...] = ()
    offload: bool = False


@dataclass(frozen=True, slots=True)
class InferencePart:
    """The part of a generator, or of a model that scores, on a device.

    Attributes:
        what: its weights, as tables call them.
        tensor: devices that it is split over.
        tokens: of a pass without gradients.
        learner: the mesh of the learner that sends it weights; ``None`` for a frozen model.
        rows: responses that are decoded together; ``None`` for a model that scores.
        positions: of each, prompt included.
        logits: a model that scores gives log-probs.
        width, adapters, bucket: see :class:`LearnerPart`; a frozen model has no adapters.
        rests: weights are here in their phase alone: a scorer's, which are kept on the host, and a
            generator's, which are made for each step.
    """

    what: str
    shape: Shape
    tensor: int
    tokens: int
    learner: Mesh | None = None
    rows: int | None = None
    positions: int = 0
    logits: bool = False
    width: int = HALF
    adapters: int | None = None
    bucket: int = BUCKET
    rests: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, in bytes by what takes them.

    Attributes:
        held: what is there all the time.
        work: what comes on top in each phase.
    """

    held: Counter[str] = field(default_factory=Counter)
    work: dict[str, Counter[str]] = field(
        default_factory=lambda: {phase: Counter() for phase in PHASES}
    )

    def during(self, *phases: str) -> Counter[str]:
        """Return what takes memory while these phases go on side by side."""
        return sum((self.work[phase] for phase in phases), self.held)

    def put(self, what: str, size: float, *phases: str) -> None:
        """Count bytes in some phases, or all the time where none is named."""
        for parts in [self.work[phase] for phase in phases] or [self.held]:
            parts[what] += round(size)

    def add(self, other: DeviceMemory) -> None:
        """Add what other processes on the same device hold."""
        self.held.update(other.held)
        for phase, parts in other.work.items():
            self.work[phase].update(parts)


def device_memory(parts: Iterable[LearnerPart | InferencePart]) -> DeviceMemory:
    """Return the memory of a device: of all roles that take turns on it.

    Of the passes that score, whichever takes the most of each kind counts; of those that train, the
    one that takes the most in all.
    """
    found, scored = DeviceMemory(), Counter[str]()
    for part in parts:
        if isinstance(part, LearnerPart):
            scored |= _train(found, part)
        elif part.rows is None:
            scored |= _score(found, part)
        else:
            _generate(found, part, part.rows)
    found.work["scoring"].update(scored)
    return found


def _train(into: DeviceMemory, part: LearnerPart) -> Counter[str]:
    """Add a learner's part; return what a pass that scores takes."""
    mesh, width, on_host = part.mesh, part.width, ("training",) if part.offload else ()
    copied = part.copies and width < SINGLE and part.adapters is None
    for shape in part.models:
        weights = shape.stage(mesh.stages).held(mesh.tensor)
        states, frozen = trained_bytes(weights, part.adapters, mesh.data, width)
        if part.adapters is not None:
            into.put(FROZEN, frozen)
        if copied:
            into.put("learner's weights", width * weights)
        resting = round(states * (2 + copied) / 4) if part.moments else 0
        into.put(STATES, round(states) - resting, *on_host)
        if part.moments:
            into.put("learner's moments", resting, *part.moments)
        if part.versions:
            sent = width * weights if part.adapters is None else SINGLE * part.adapters
            into.put(PUBLISHED, part.versions * sent / mesh.data)
    _sync(into, part.synced, mesh, part)
    passes = [_pass(shape, part) for shape in part.models]
    into.work["training"].update(max(passes, key=lambda taken: taken.total()))
    if part.offload and part.synced:
        into.put("actor's masters", _masters(part.models[0], mesh), SYNC)
    if not part.values:
        return Counter()
    critic = part.models[-1]
    if part.offload:
        into.put("critic's masters", _masters(critic, mesh), "scoring")
    into.put("gathered", gathered_bytes(critic, mesh, gradients=False), "scoring")
    return Counter(activations=round(layer_activation_bytes(critic, part.tokens, mesh.tensor)))


def _pass(shape: Shape, part: LearnerPart) -> Counter[str]:
    """Count what a forward and a backward pass of a trained model take."""
    mesh, tokens = part.mesh, part.tokens
    # A pipeline's first stage holds as many micro-batches as there are stages.
    kept = activation_bytes(shape, tokens, mesh.tensor, checkpointing=part.checkpointing)
    taken = Counter(
        activations=round(kept * part.width / HALF),
        logits=round(logits_bytes(shape, tokens, gradients=True)),
    )
    if not part.copies:
        stage, gradients = shape.stage(mesh.stages), part.adapters is None
        taken["gathered"] = round(gathered_bytes(stage, mesh, gradients=gradients))
    return taken


def _generate(into: DeviceMemory, part: InferencePart, rows: int) -> None:
    resting = ("generation", SYNC) if part.rests else ()
    into.put(part.what, _weights(part), *resting)
    cache = rows * row_bytes(part.shape, part.positions, part.tensor, part.width)
    into.put(CACHE, cache, *resting[:1])
    into.put("activations", _activations(part), "generation")
    if part.learner:
        _sync(into, (part.shape,), part.learner, part)


def _score(into: DeviceMemory, part: InferencePart) -> Counter[str]:
    """Add the part of a model that scores; return what its pass takes."""
    into.put(part.what, _weights(part), *(("scoring",) if part.rests else ()))
    if part.learner:
        _sync(into, (part.shape,), part.learner, part)
    taken = Counter(activations=round(_activations(part)))
    if part.logits:
        taken["logits"] = round(logits_bytes(part.shape, part.tokens, gradients=False))
    return taken


def _weights(part: InferencePart) -> float:
    size = part.width * part.shape.held(part.tensor)
    return size + (SINGLE * part.adapters if part.adapters and part.learner else 0)


def _activations(part: InferencePart) -> float:
    return layer_activation_bytes(part.shape, part.tokens, part.tensor) * part.width / HALF


def _sync(
    into: DeviceMemory, shapes: Iterable[Shape], mesh: Mesh, part: LearnerPart | InferencePart
) -> None:
    """Add the buckets of models whose weights are sent, or received."""
    for shape in shapes:
        size = bucket_bytes(shape, mesh, width=part.width, bucket=part.bucket)
        if part.adapters is not None:
            size = 2 * min(part.bucket, SINGLE * part.adapters)
        into.put("buckets", size, SYNC)


def _masters(shape: Shape, learner: Mesh) -> float:
    return SINGLE * shape.stage(learner.stages).held(learner.tensor) / learner.data


# -- layouts ---------------------------------------------------------------------------------------


def phases_of(
    models: ModelShapes, layout: Layout, responses: int, length: int, hardware: Hardware
) -> dict[str, Parts]:
    """Return the memory of the GPU that has the most of a layout's in each phase.

    Set apart, the learner trains while weights are synced, and generators keep the responses that
    they have begun, so that there is room for new weights beside them, too.

    Args:
        responses: in flight, on all generators together.
        length: of each, prompt included, in tokens.
    """
    rows, _ = rows_in_flight(models, layout, responses, length, hardware)
    on = _devices(models, layout, rows, length)
    learner, generator, scorer = on["learner"], on["generators"], on["scorers"]
    if layout.colocated:
        return {phase: learner.during(phase) for phase in PHASES}
    decoding = ("generation", SYNC)
    beside = decoding if layout.sharing == "generators" else ()
    syncing = (learner.during("training", SYNC), generator.during(*decoding), scorer.during(SYNC))
    return {
        "generation": generator.during(*decoding),
        "scoring": scorer.during("scoring", *beside),
        "training": learner.during("training"),
        SYNC: max(syncing, key=lambda held: sum(held.values())),
    }


def learner_bytes(models: ModelShapes, layout: Layout) -> float:
    """Return the bytes of a learner's GPU in training; apart, it sends weights meanwhile."""
    phases = ("training",) if layout.colocated else ("training", SYNC)
    return _devices(models, layout, 0, 0)["learner"].during(*phases).total()


def _devices(
    models: ModelShapes, layout: Layout, rows: int, length: int
) -> dict[str, DeviceMemory]:
    """Return the memory of a device of each role; roles that share have the same."""
    colocated, learner, tokens = layout.colocated, layout.learner, layout.prefill_tokens
    trained = LearnerPart(
        models.trained,
        learner,
        layout.micro_tokens,
        (models.actor,),
        checkpointing=layout.checkpointing,
        versions=0 if colocated else layout.versions,
        values=colocated and models.critic is not None,
        offload=layout.offload,
    )
    generates = partial(InferencePart, "weights", models.actor, layout.generator.tensor, tokens)
    scores = partial(InferencePart, "frozen", tensor=layout.scorer.tensor, tokens=tokens)
    scores = partial(scores, rests=layout.offload)
    roles: dict[str, list[LearnerPart | InferencePart]] = {
        "learner": [trained],
        # Colocated, weights are freed after the last response.
        "generators": [generates(learner, rows, length, rests=colocated)],
        "scorers": [scores(shape=models.reward)] if models.reward else [],
    }
    if models.reference:
        roles["scorers"].append(scores(shape=models.reference, logits=True))
    if models.critic and not colocated:
        sender = learner if layout.sharing == "none" else None
        roles["scorers"].append(scores(shape=models.critic, learner=sender))
    together = device_memory(chain.from_iterable(roles[role] for role in layout.shared))
    return {
        role: together if role in layout.shared else device_memory(parts)
        for role, parts in roles.items()
    }


def rows_in_flight(
    models: ModelShapes, layout: Layout, responses: int, length: int, hardware: Hardware
) -> tuple[int, int]:
    """Return how many responses a generator decodes at a time, and in how many goes.

    All of its share at once, where their keys and values fit at full length; else as few goes as
    possible, and one response at a time where none fits.
    """
    share = math.ceil(responses / layout.generator.data)
    each = row_bytes(models.actor, length, layout.generator.tensor)
    fit = max(1, int(cache_room_bytes(models, layout, hardware) // each))
    goes = math.ceil(share / fit)
    return math.ceil(share / goes), goes


def cache_room_bytes(models: ModelShapes, layout: Layout, hardware: Hardware) -> float:
    """Return what a generator's GPU has left for keys and values; negative if nothing."""
    phases = ("generation",) if layout.colocated else ("generation", SYNC)
    others = _devices(models, layout, 0, 0)["generators"].during(*phases)
    return hardware.usable_bytes - others.total()


def frozen_bytes(models: ModelShapes, layout: Layout) -> float:
    """Return bytes of the frozen models on a scorer's GPU, and of the critic's copy beside them."""
    shapes = models.frozen if layout.colocated else models.scoring
    return sum(weight_bytes(shape, layout.scorer.tensor) for shape in shapes)


def host_bytes(models: ModelShapes, layout: Layout) -> float:
    """Return bytes in the host's memory for each GPU: of what is offloaded."""
    if not layout.offload:
        return 0.0
    return kept_bytes(models, layout.learner) + frozen_bytes(models, layout)


def kept_bytes(models: ModelShapes, learner: Mesh) -> float:
    """Return bytes of a learner's states on a GPU that are worth keeping between steps."""
    held = sum(shape.stage(learner.stages).held(learner.tensor) for shape in models.trained)
    return KEPT * held / learner.data
