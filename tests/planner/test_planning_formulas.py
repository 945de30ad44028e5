"""Shapes, links, memory, traffic and operations, against cases computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from _estimate import StepSizes, chunk_bytes, fsdp_forward_bytes, gathered_first_bytes
from raising import raises
from stretto.config import ModelConfig
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import LLAMAS, Shape, shape_of
from stretto.planner import formulas, memory_model
from stretto.planner.hardware import GPUS, Hardware, Links
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.runtime.sim.costs import Efficiency

SMALL = Shape(layers=2, hidden=4, inner=8, heads=2, kv_heads=1, vocabulary=10, outputs=10)
"""A layer: Q and O 2 x 16, K and V 2 x 4 x 2, the MLP 3 x 4 x 8, norms 8: 152. Around them 84."""
P = 2 * 152 + 84


# -- shapes ----------------------------------------------------------------------------------------


def test_parameters_of_a_small_shape() -> None:
    assert (SMALL.kv_width, SMALL.layer_parameters, SMALL.root_parameters) == (2, 152, 84)
    assert SMALL.parameters == P == 388
    assert replace(SMALL, tied=True).parameters == P - 40
    assert replace(SMALL, gated=False).layer_parameters == 152 - 32
    assert SMALL.valued().parameters == P - 40 + 4
    assert replace(SMALL, tied=True).valued() == SMALL.valued()
    # Layers are cut, the 84 around them are not; of these the embedding's 40 are looked up.
    assert (SMALL.held(1), SMALL.held(2)) == (388, 152 + 84)
    assert (SMALL.multiplied(1), SMALL.multiplied(2)) == (348, 152 + 44)
    assert replace(SMALL, tied=True).multiplied(1) == 348


@pytest.mark.parametrize(
    ("size", "published"),
    [
        ("7B", 6_738_415_616),
        ("13B", 13_015_864_320),
        ("33B", 32_528_943_616),
        ("70B", 68_976_648_192),
    ],
)
def test_llamas_have_their_published_counts(size: str, published: int) -> None:
    assert LLAMAS[size].parameters == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("smollm2-135m", 134_515_008),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494.0e6),
        ("qwen2.5-1.5b", 1.544e9),
        ("qwen2.5-3b", 3.086e9),
        ("Qwen/Qwen2.5-7B-Instruct", 7.616e9),
        ("qwen2.5-32b", 32.76e9),
        ("llama-3.1-8b", 8.030e9),
        ("llama-3.1-70b", 70.55e9),
        ("pythia-410m", 405.3e6),
        ("pythia-1b", 1.0118e9),
        ("pythia-2.8b", 2.775e9),
        ("rho-1b", 1.100e9),
        ("llama-65b", 65.29e9),
    ],
)
def test_known_models_have_their_published_counts(name: str, published: float) -> None:
    """Biases are not counted."""
    assert shape_of(name).parameters == pytest.approx(published, rel=1e-3)


def test_the_fullest_stage_has_layers_and_one_end_of_the_model() -> None:
    """Two layers of 152, the embedding and the output layer of 40 each, a norm of 4."""
    assert SMALL.stage(1) is SMALL
    assert SMALL.stage(2).parameters == 152 + 44
    assert replace(SMALL, layers=3).stage(2).parameters == 2 * 152 + 44
    assert memory_model.trained_bytes(SMALL.stage(2).held(1), None, 4, 2)[0] == 16 * (152 + 44) / 4
    assert Layout(fsdp=4, tp=2, pp=2).ranks == 16


# -- links -----------------------------------------------------------------------------------------


def test_groups_within_a_node_and_across_nodes() -> None:
    links = Links(within_bytes_per_s=450, between_bytes_per_s=50, gpus_per_node=8)
    assert links.bytes_per_s(8, 8) == 450
    assert links.bytes_per_s(16, 8) == 400  # eight adapters a node
    assert links.bytes_per_s(16, 2) == 100
    assert replace(links, between_bytes_per_s=100).bytes_per_s(16, 8) == 450  # NVLink limits


def test_shards_of_tensor_parallel_learners_have_fewer_members_a_node() -> None:
    links = Links(within_bytes_per_s=450, between_bytes_per_s=50, gpus_per_node=8)
    assert links.data_bytes_per_s(Layout(fsdp=2, tp=4)) == 450  # 8 GPUs: both on one node
    assert links.data_bytes_per_s(Layout(fsdp=4, tp=4)) == 100  # 16 GPUs: two on each
    assert links.data_bytes_per_s(Layout(fsdp=16)) == 400
    assert links.data_bytes_per_s(Layout(fsdp=2, tp=8)) == 50


def test_published_hardware_has_the_default_efficiency() -> None:
    assert Hardware.of("h100").assumed == Efficiency()
    assert Hardware.of("h100").links == Links.of(GPUS["h100"]) == Links(450e9, 50e9, 64e9, 8)


# -- memory ----------------------------------------------------------------------------------------


def test_states_are_sixteen_bytes_a_parameter_over_all_devices() -> None:
    assert memory_model.trained_bytes(SMALL.held(1), None, 4, 2)[0] == 16 * 388 / 4
    assert memory_model.trained_bytes(SMALL.held(2), None, 4, 2)[0] == 16 * (152 + 84) / 4
    # ZeRO's own example: 7.5e9 parameters on 64 devices take 1.9 GB.
    seven_and_a_half = 7.5e9 / LLAMAS["7B"].parameters
    sharded, _ = memory_model.trained_bytes(LLAMAS["7B"].held(1), None, 64, 2)
    assert sharded * seven_and_a_half == pytest.approx(1.875e9)


def test_two_layers_and_the_root_are_gathered() -> None:
    assert memory_model.gathered_bytes(SMALL, Layout(fsdp=4, tp=2), gradients=False) == 2 * (
        304 / 2 + 84
    )
    # ... and gradients of a layer and the root, in bfloat16 and float32
    expected = 2 * (304 / 2 + 84) + 6 * (152 / 2 + 84)
    assert memory_model.gathered_bytes(SMALL, Layout(fsdp=4, tp=2), gradients=True) == expected
    assert memory_model.gathered_bytes(SMALL, Layout(tp=2), gradients=True) == 2 * (152 + 84)


def test_activations_of_a_layer() -> None:
    # two norms: 4 x 4 + 2 x 4 bytes; attention and MLP: 2 x 4; Q, K, V and attention's output:
    # 2 x (4 + 2 + 2 + 4); gate, up, the gate's activation and the product: 4 x 2 x 8
    assert memory_model.layer_activation_bytes(SMALL, 3, 1) == 3 * (48 + 16 + 24 + 64)
    assert memory_model.layer_activation_bytes(SMALL, 3, 2) == 3 * (48 + 16 + 12 + 32)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_the_layer_of_korthikanti_without_dropout(tensor: int) -> None:
    """s b h (10 + 24/t) with selective recomputation, of which two masks are 1 s b h each."""
    theirs = Shape(96, 12_288, 4 * 12_288, 96, 96, 51_200, 51_200, gated=False)
    expected = 2048 * 12_288 * (10 + 24 / tensor - 2)
    assert memory_model.layer_activation_bytes(theirs, 2048, tensor) == expected


def test_checkpoints_are_the_layers_inputs_and_one_layer() -> None:
    assert memory_model.activation_bytes(SMALL, 3, 1, checkpointing=False) == 2 * 3 * 152
    assert memory_model.activation_bytes(SMALL, 3, 1, checkpointing=True) == 2 * 2 * 4 * 3 + 3 * 152


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_autograd_keeps_these_activations_of_a_llama(kv_heads: int) -> None:
    """The difference between two and three layers; the log-sum-exp of attention is left out."""
    shape = Shape(1, 512, 1376, 8, kv_heads, 10, 10)
    kept = [kept_bytes(shape, layers, checkpointing=False) for layers in (2, 3)]
    formula = memory_model.layer_activation_bytes(shape, TOKENS, 1)
    assert kept[1] - kept[0] == pytest.approx(formula, rel=0.003)
    kept = [kept_bytes(shape, layers, checkpointing=True) for layers in (2, 3)]
    assert kept[1] - kept[0] == 2 * 512 * TOKENS


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_autograd_keeps_float32_inputs_of_adapters(kv_heads: int) -> None:
    """Beside weights in bfloat16, which are frozen; what adapters of rank 1 make is left out."""
    shape = Shape(1, 512, 1376, 8, kv_heads, 10, 10)
    kept = [kept_bytes(shape, n, checkpointing=False, lora_rank=1) for n in (2, 3)]
    adapters = memory_model.Adapters(0, 6 * 512 + 1376)
    formula = memory_model.layer_activation_bytes(shape, TOKENS, 1, frozen=True)
    formula += adapters.input_bytes(1, TOKENS, checkpointing=False)
    assert kept[1] - kept[0] == pytest.approx(formula, rel=0.003)


TOKENS = 64


def kept_bytes(shape: Shape, layers: int, *, checkpointing: bool, lora_rank: int = 0) -> int:
    """Bytes that the forward pass of a Llama keeps for its backward pass, weights not counted."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaModel

    from stretto.models.load import set_checkpointing

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
    )
    model = LlamaModel(config).bfloat16()
    if lora_rank:
        model.requires_grad_(False)
        adapters = LoraConfig(r=lora_rank, target_modules="all-linear")
        model = get_peft_model(model, adapters)
        model.enable_input_require_grads()  # as if adapters came before
    if checkpointing:
        set_checkpointing(model, ModelConfig(gradient_checkpointing="on"))
        model.train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()  # kept alive, so that no address comes twice
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def test_slices_of_logits() -> None:
    """As ``models/logits.py`` cuts them on a GPU."""
    from stretto.models.logits import MIN_SLICE, _slices

    shape = LLAMAS["7B"]
    for tokens in (64, 8192, 10**6):
        start, stop = _slices(tokens, shape.vocabulary, "cuda")[0]
        expected = 2 * 4 * tokens * (stop - start)
        assert memory_model.logits_bytes(shape, tokens, gradients=False) == expected
    assert memory_model.SLICE_ENTRIES == MIN_SLICE
    assert memory_model.logits_bytes(SMALL, 3, gradients=True) == 4 * 4 * 3 * 10 + 4 * 3 * 4
    assert memory_model.logits_bytes(SMALL.valued(), 3, gradients=False) == 2 * 4 * 3


def test_keys_and_values_of_a_token() -> None:
    assert memory_model.cache_bytes(LLAMAS["7B"], 1) == 2 * 32 * 32 * 128 * 2  # half a megabyte
    assert memory_model.cache_bytes(LLAMAS["70B"], 4) == 2 * 80 * 2 * 128 * 2
    assert memory_model.cache_bytes(SMALL, 1) == 2 * 2 * 2 * 2


def test_two_buckets_a_side() -> None:
    assert memory_model.bucket_bytes(LLAMAS["7B"]) == 2 * 64 * 2**20
    assert memory_model.bucket_bytes(SMALL) == 2 * 2 * 388  # all of it
    shape = replace(SMALL, vocabulary=50 * 2**20)  # a matrix of 400 MiB, which is cut
    assert memory_model.bucket_bytes(shape) == 2 * 64 * 2**20


def test_the_memory_plan_counts_states_alike() -> None:
    from stretto.planner.fitting import memory_plan

    plan = memory_plan(int(SMALL.parameters)).mixed
    assert plan["actor"] == memory_model.trained_bytes(SMALL.held(1), None, 1, 2)[0]
    assert plan["reference"] == memory_model.weight_bytes(SMALL, 1)


# -- traffic ---------------------------------------------------------------------------------------


def test_collectives() -> None:
    assert formulas.gather_bytes(100, 4) == 75
    assert formulas.gather_bytes(100, 1) == 0


def test_traffic_of_shards() -> None:
    # layers twice and the root once in bfloat16, all gradients in float32; three of four come in
    expected = 5 * (2 * (2 * 152 + 84) + 4 * (152 + 84)) * 3 / 4
    assert formulas.fsdp_training_bytes(SMALL, Layout(fsdp=4, tp=2), 5) == expected
    assert fsdp_forward_bytes(SMALL, Layout(fsdp=4, tp=2), 5) == 5 * 2 * (152 + 84) * 3 / 4
    assert formulas.fsdp_training_bytes(SMALL, Layout(tp=2), 5) == 0


def test_traffic_of_tensor_parallelism() -> None:
    # two layers, two all-reduces each, of 3 tokens x 4 x 2 bytes, 2 x (t - 1) / t of it
    assert formulas.tensor_bytes(SMALL, 3, 4, 2) == 2 * 2 * 24 * 1.5
    assert formulas.tensor_bytes(SMALL, 3, 1, 2) == 0


def test_traffic_of_weight_syncs() -> None:
    assert formulas.broadcast_bytes(SMALL) == 2 * 388
    assert gathered_first_bytes(SMALL, Layout(fsdp=2, tp=2)) == 2 * 388 * (3 / 4 + 1)
    # of what a generator's device holds, an eighth of all weights is there
    assert formulas.reshard_bytes(SMALL, Layout(fsdp=8), Layout(dp=4, tp=2)) == 2 * (
        152 + 84 - 388 / 8
    )
    assert formulas.reshard_bytes(SMALL, Layout(), Layout()) == 0
    assert chunk_bytes(1000, 3) == 24_000


def test_states_to_the_host() -> None:
    models = ModelShapes.of_one_size(SMALL)
    assert memory_model.kept_bytes(models, Layout(fsdp=4)) == 12 * (388 + 352) / 4
    assert memory_model.kept_bytes(models, Layout(fsdp=2, tp=2)) == 12 * (152 + 84 + 152 + 48) / 2
    assert memory_model.moments_bytes(models, Layout(fsdp=4)) == 8 * (388 + 352) / 4
    # Two pipelines of two stages share moments and masters, which stages have next to weights.
    stages, held = Layout(dp=2, pp=2), 152 + 44 + 152 + 44
    assert memory_model.moments_bytes(models, stages) == 12 * held / 2


# -- operations ------------------------------------------------------------------------------------


def test_operations() -> None:
    # 2 x 348 a token; a token sees half of 10 others, at 4 operations a layer and unit of width
    assert formulas.forward_flops(SMALL, 30, 10, 1) == 30 * (696 + 4 * 2 * 4 * 5)
    assert formulas.forward_flops(SMALL, 30, 10, 2) == 30 * (2 * (152 + 44) + 4 * 2 * 4 * 5 / 2)
    forward = formulas.forward_flops(SMALL, 30, 10, 1)
    assert formulas.training_flops(SMALL, 30, 10, 1, checkpointing=False) == 3 * forward
    assert formulas.training_flops(SMALL, 30, 10, 1, checkpointing=True) == 4 * forward


def test_a_decode_step() -> None:
    assert formulas.decode_flops(SMALL, 5, 10, 2) == 5 * (2 * (152 + 44) + 4 * 2 * 4 * 10 / 2)
    # the layers' halves and the head; of keys and values of 10 tokens of five rows the half
    assert formulas.decode_read_bytes(SMALL, 5, 10, 2) == 2 * (152 + 44) + 50 * 16 / 2
    assert formulas.optimizer_bytes(SMALL, Layout(fsdp=4, tp=2)) == 32 * (152 + 84) / 4
    # Four pipelines read and clear all gradients of a stage, and share masters and moments.
    assert formulas.optimizer_bytes(SMALL, Layout(dp=4, pp=2)) == (8 + 24 / 4) * (152 + 44)


# -- what is refused -------------------------------------------------------------------------------


def test_layouts_that_cannot_be() -> None:
    with raises(ConfigError, "empty-layout", "fsdp = 0"):
        Layout(fsdp=0)
    with raises(ConfigError, "colocated-sizes-differ", "4, 2, 4"):
        RunLayout(Layout(fsdp=4), Layout(dp=2), Layout(dp=4), "all")
    with raises(ConfigError, "offload-without-turns"):
        RunLayout(Layout(fsdp=4), Layout(dp=2), Layout(dp=4), "none", offload=True)
    with raises(ConfigError, "empty-passes", "0 and 8192"):
        RunLayout(Layout(fsdp=4), Layout(dp=4), Layout(dp=4), "all", micro_tokens=0)
    with raises(ConfigError, "empty-step", "0 responses"):
        StepSizes(responses=0)
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Efficiency(link=1.2)


def test_models_that_cannot_be_divided() -> None:
    links, models = Links(450e9), ModelShapes.of_one_size(LLAMAS["33B"])
    layout = RunLayout(Layout(tp=8), Layout(dp=2, tp=4), Layout(dp=2, tp=4), "all")
    with raises(ConfigError, "heads-not-divided", 8, "52 heads, 52"):
        layout.check(models, links)
    layout = RunLayout(Layout(tp=4), Layout(dp=2, tp=2), Layout(dp=2, tp=2), "all")
    with raises(ConfigError, "tensor-across-nodes", 4, "2 GPUs"):
        layout.check(models, replace(links, gpus_per_node=2))
    layout = RunLayout(Layout(pp=64), Layout(dp=64), Layout(dp=64), "all")
    with raises(ConfigError, "too-many-stages", 64, "60 layers"):
        layout.check(models, links)
