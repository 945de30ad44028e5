"""Memory of one GPU, phase by phase, in bytes.

Each phase is a mapping from what takes memory to its bytes; the phase takes their sum. Weights and
activations are in bfloat16 where nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stretto.models.shapes import Shape
from stretto.planner.hardware import Hardware
from stretto.planner.layout import Layout, Mesh, Models, Workload

Parts = Mapping[str, float]
"""Bytes of a GPU in a phase, by what takes them."""

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


def state_bytes(shape: Shape, mesh: Mesh) -> float:
    """Return bytes of a trained model's states, in shards (ZeRO stage 3).

    Rajbhandari et al. 2020: 16 P / n, with P what a tensor-parallel device holds.
    """
    return STATE * shape.stage(mesh.stages).held(mesh.tensor) / mesh.data


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
    For a Llama layer this is what autograd keeps, measured on a CPU (``tests/planning``).
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


def bucket_bytes(shape: Shape, mesh: Mesh) -> float:
    """Return bytes of one side's two buckets at a hand-over of a learner's shards.

    No tensor is cut but by the shards: a larger one has a bucket of its own.
    """
    return 2 * max(BUCKET, HALF * shape.largest_tensor / mesh.data)


def frozen_bytes(models: Models, layout: Layout) -> float:
    """Return bytes of the frozen models on a scorer's GPU.

    Unless all roles are colocated, they have a copy of the critic beside them, which computes
    values.
    """
    shapes = models.frozen if layout.colocated else models.scoring
    return sum(weight_bytes(shape, layout.scorer.tensor) for shape in shapes)


def resident(models: Models, layout: Layout, role: str) -> Parts:
    """Return what a role, and those on the same GPUs, keep there whoever of them is at work.

    Args:
        role: learner, generators or scorers.
    """
    here = layout.shared if role in layout.shared else (role,)
    if layout.offload:
        return {}
    parts = {}
    if "learner" in here:
        parts["learner's states"] = _states(models, layout)
        if not layout.colocated:
            parts["snapshots"] = _snapshots(models, layout)
    if "scorers" in here:
        parts["frozen"] = frozen_bytes(models, layout)
    return parts


def _total(parts: Parts) -> float:
    return sum(parts.values())


def _states(models: Models, layout: Layout) -> float:
    return sum(state_bytes(shape, layout.learner) for shape in models.trained)


def _snapshots(models: Models, layout: Layout) -> float:
    mesh = layout.learner
    stages = [shape.stage(mesh.stages) for shape in models.trained]
    held = sum(weight_bytes(shape, mesh.tensor) / mesh.data for shape in stages)
    return layout.versions * held


def _masters(shape: Shape, learner: Mesh) -> float:
    return SINGLE * shape.stage(learner.stages).held(learner.tensor) / learner.data


def rows_in_flight(
    models: Models, layout: Layout, workload: Workload, hardware: Hardware
) -> tuple[int, int]:
    """Return how many responses a generator decodes at a time, and in how many goes.

    All of its share at once, where their keys and values fit at full length; else as few goes as
    possible, and one response at a time where none fits.
    """
    share = math.ceil(workload.responses / layout.generator.data)
    free = cache_room_bytes(models, layout, hardware)
    fit = max(1, int(free // _row_bytes(models.actor, layout, workload)))
    goes = math.ceil(share / fit)
    return math.ceil(share / goes), goes


def cache_room_bytes(models: Models, layout: Layout, hardware: Hardware) -> float:
    """Return what a generator's GPU has left for keys and values; negative if nothing."""
    others = {**_generator(models, layout), **resident(models, layout, "generators")}
    return hardware.usable_bytes - _total(others)


def _generator(models: Models, layout: Layout) -> dict[str, float]:
    """What is there whatever the number of rows; of a prefill, as much as a layer would keep."""
    actor, tensor = models.actor, layout.generator.tensor
    parts = {
        "weights": weight_bytes(actor, tensor),
        "activations": layer_activation_bytes(actor, layout.prefill_tokens, tensor),
    }
    if not layout.colocated:  # else they are freed after the hand-over
        parts["buckets"] = bucket_bytes(actor, layout.learner)
    return parts


def _row_bytes(actor: Shape, layout: Layout, workload: Workload) -> float:
    return workload.length * cache_bytes(actor, layout.generator.tensor) + SINGLE * actor.outputs


def generation(models: Models, layout: Layout, workload: Workload, hardware: Hardware) -> Parts:
    """Return the memory of a generator's GPU.

    Prompts are prefilled ``prefill_tokens`` at a time. Set apart, responses stay while new weights
    come, and so there is room for these, too.
    """
    rows, _ = rows_in_flight(models, layout, workload, hardware)
    cache = {"keys and values": rows * _row_bytes(models.actor, layout, workload)}
    return {
        **resident(models, layout, "generators"),
        **_generator(models, layout),
        **cache,
    }


def scoring(models: Models, layout: Layout, workload: Workload, hardware: Hardware) -> Parts:
    """Return the memory of a scorer's GPU.

    Colocated, values come from the learner's critic, whose layers are gathered; of an offloaded
    critic the masters are brought back for that. Beside generators, these keep what they have.
    """
    tokens, tensor = layout.prefill_tokens, layout.scorer.tensor
    critic = models.critic
    passes = [(shape, tokens, tensor) for shape in models.frozen]
    if critic and layout.colocated:
        passes.append((critic, layout.micro_tokens, layout.learner.tensor))
    elif critic:
        passes.append((critic, tokens, tensor))
    reads = models.reference
    work = {
        "activations": max((layer_activation_bytes(*each) for each in passes), default=0.0),
        "logits": logits_bytes(reads, tokens, gradients=False) if reads else 0.0,
    }
    if critic and layout.colocated:
        work["gathered"] = gathered_bytes(critic, layout.learner, gradients=False)
        if layout.offload:
            work["critic's masters"] = _masters(critic, layout.learner)
    if layout.offload:
        work["frozen"] = frozen_bytes(models, layout)
    kept = resident(models, layout, "scorers")
    if layout.sharing == "generators":
        kept = generation(models, layout, workload, hardware)
    return {**kept, **work, "activations": work["activations"] + kept.get("activations", 0.0)}


def training(models: Models, layout: Layout) -> Parts:
    """Return the memory of a learner's GPU: states of trained models, and one of them in a pass.

    Unless all roles are colocated, it also keeps bfloat16 copies of them in shards: versions that
    are being handed over, or may be, while it trains on.
    """
    tokens, mesh = layout.micro_tokens, layout.learner
    passes = [
        {
            "gathered": gathered_bytes(shape.stage(mesh.stages), mesh, gradients=True),
            # A pipeline's first stage holds as many micro-batches as there are stages.
            "activations": activation_bytes(
                shape, tokens, mesh.tensor, checkpointing=layout.checkpointing
            ),
            "logits": logits_bytes(shape, tokens, gradients=True),
        }
        for shape in models.trained
    ]
    largest = max(passes, key=_total)
    states = {"learner's states": _states(models, layout)}  # also of one that was offloaded
    return {**resident(models, layout, "learner"), **states, **largest}


def handover(models: Models, layout: Layout, workload: Workload, hardware: Hardware) -> Parts:
    """Return the memory of the GPU that has the most while weights are handed over.

    Colocated, the actor's masters and the generator's new weights are there at once. Set apart, the
    learner trains meanwhile, and generators keep the responses that they have begun.
    """
    buckets = bucket_bytes(models.actor, layout.learner)
    if layout.colocated:
        weights = weight_bytes(models.actor, layout.generator.tensor)
        masters = {}
        if layout.offload:
            masters = {"actor's masters": _masters(models.actor, layout.learner)}
        return {
            **resident(models, layout, "learner"),
            **masters,
            "weights": weights,
            "buckets": 2 * buckets,
        }
    return max(
        {**training(models, layout), "buckets": buckets},
        generation(models, layout, workload, hardware),
        {**resident(models, layout, "scorers"), "buckets": buckets},
        key=_total,
    )


def host_bytes(models: Models, layout: Layout) -> float:
    """Return bytes in the host's memory for each GPU: of what is offloaded."""
    if not layout.offload:
        return 0.0
    return kept_bytes(models, layout.learner) + frozen_bytes(models, layout)


def kept_bytes(models: Models, learner: Mesh) -> float:
    """Return bytes of a learner's states on a GPU that are worth keeping between steps."""
    held = sum(shape.stage(learner.stages).held(learner.tensor) for shape in models.trained)
    return KEPT * held / learner.data
