"""Row products: rows whose bits do not depend on their number, and engine and learner that agree.

The canonical product has 64 rows and one thread. Everything else must equal it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

from engine_helpers import EXPERTS, GROUPED, SMALL, from_config, with_adapters
from raising import raises
from rounding import rounding
from stretto.config import RolloutConfig
from stretto.errors import EngineError
from stretto.evaluation.generation import completed
from stretto.models import row_products
from stretto.models.cpu_threads import set_threads
from stretto.models.devices import PackedLinears
from stretto.models.forward import (
    backbone,
    output_head,
    response_hidden,
    response_tokens,
    unwrapped,
)
from stretto.models.logits import OutputHead, token_logprobs
from stretto.models.row_products import EXACT, RowActivation, RowLinear, use_row_products
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.types import Prompt

TYPES = (torch.float32, torch.bfloat16)
FAMILIES: dict[str, Any] = {
    "llama": hf.LlamaConfig(**GROUPED),
    "qwen2": hf.Qwen2Config(**GROUPED),  # biases
    "mistral": hf.MistralConfig(**GROUPED, sliding_window=6),
    "gemma": hf.GemmaConfig(**GROUPED, head_dim=16),  # GELU
    "gpt-neox": hf.GPTNeoXConfig(**SMALL),  # one query head to a key-value head, layer norms
}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_threads(before)


def layer(inner: int, outer: int, dtype: torch.dtype) -> RowLinear:
    torch.manual_seed(0)
    made: Any = torch.nn.Linear(inner, outer).to(dtype)
    made.__class__ = RowLinear
    return made


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inner", "outer"), [(64, 192), (192, 64), (31, 97), (576, 192)])
def test_rows_of_a_layer_have_the_same_bits_in_any_company(
    inner: int, outer: int, dtype: torch.dtype, threads: None
) -> None:
    made = layer(inner, outer, dtype)
    x = torch.randn(300, inner).to(dtype)
    set_threads(1)
    expected = torch.cat(
        [F.linear(part, made.weight) for part in F.pad(x, (0, 0, 0, 20)).split(64)]
    )
    expected = expected[:300] + made.bias
    packed = PackedLinears(made)
    with torch.no_grad():
        for count in (1, 2):
            set_threads(count)
            for n in (*range(1, 34), 64, 65, 128, 300):
                assert torch.equal(made(x[:n]), expected[:n]), n
                assert torch.equal(made(x[-n:][None]), expected[None, -n:]), n
            with packed:
                for n in (1, 2, 3, 8, 33, 64):
                    assert torch.equal(made(x[7 : 7 + n]), expected[7 : 7 + n]), n


def test_a_kernel_that_sums_by_the_number_of_rows_gets_canonical_tiles(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    """The last columns go first in it unless it has 64 rows, and with more threads than one."""
    plain = F.linear

    def changing(x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[-2] == 64 and torch.get_num_threads() == 1:
            return plain(x, weight)
        return plain(x[..., 32:], weight[:, 32:]) + plain(x[..., :32], weight[:, :32])

    made, x = layer(64, 32, torch.float32), torch.randn(100, 64)
    expected = made(x)
    assert not torch.equal(changing(x, made.weight) + made.bias, expected)
    monkeypatch.setattr(row_products, "KERNELS", {"linear": changing})
    row_products._is_canonical.cache_clear()
    for count in (1, 2):
        set_threads(count)
        for n in (1, 40, 100):
            assert torch.equal(made(x[:n]), expected[:n])
        assert torch.get_num_threads() == count
    monkeypatch.undo()
    row_products._is_canonical.cache_clear()


@pytest.mark.parametrize("name", [name for name, functions in EXACT.items() if functions])
@pytest.mark.parametrize("dtype", TYPES)
def test_activations_round_all_elements_alike(name: str, dtype: torch.dtype) -> None:
    functions = EXACT[name]
    assert functions
    activation, plain = RowActivation(*functions), functions[1]
    x = (torch.randn(5_000) * 5).to(dtype).requires_grad_()
    out = activation(x)
    for n in (1, 3, 17, 100):
        assert torch.equal(activation(x[n : 3 * n]), out[n : 3 * n])
    expected = plain(x)
    assert torch.allclose(out, expected, rtol=rounding(8, dtype), atol=1e-6)
    ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (out, expected))
    assert torch.equal(ours, theirs)


def decoded(model: Any, dtype: torch.dtype, **options: Any) -> list[Rollout]:
    """Responses of the engine to 33 prompts of 1 to 30 tokens, in 9 slots."""
    config = RolloutConfig(
        batch=33, max_new_tokens=20, temperature=0.8, slots=9, prefill_tokens=40, **options
    )
    settings = EngineSettings(rollout=config, end_tokens=frozenset({3}), seed=3)
    engine = TorchEngine(model, settings)
    draws = torch.Generator().manual_seed(0)
    rollouts = []
    for i in range(33):
        tokens = torch.randint(97, (1 + i % 30,), generator=draws).tolist()
        rollouts.append(Rollout(i, Prompt(i, tuple(tokens), ""), i))
    list(completed(engine, rollouts, 7))
    return rollouts


def learned(model: Any, rollouts: Sequence[Rollout]) -> Tensor:
    """The learner's log-probs of all sampled tokens."""
    responses = [r.response() for r in rollouts]
    hidden = response_hidden(model, responses)
    targets = response_tokens(responses, hidden.device)
    return token_logprobs(output_head(model), hidden, targets, 0.8)[0]


def engines(rollouts: Sequence[Rollout]) -> Tensor:
    return torch.tensor([logprob for r in rollouts for logprob in r.logprobs])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_compute_equal_bits(
    family: str, dtype: torch.dtype, threads: None
) -> None:
    """In batches of every size, with different numbers of threads, and with drafts."""
    model = from_config(copy.deepcopy(FAMILIES[family])).to(dtype)
    use_row_products(model, backbone(model))
    set_threads(2)
    rollouts = decoded(model, dtype)
    set_threads(1)
    for n in (1, 2, 3, 8, 33):
        assert torch.equal(learned(model, rollouts[-n:]), engines(rollouts[-n:])), n
    drafted = decoded(model, dtype, engine_args={"speculative_tokens": 3, "speculative_rows": 9})
    assert [r.tokens for r in drafted] == [r.tokens for r in rollouts]
    assert torch.equal(engines(drafted), engines(rollouts))


@pytest.mark.parametrize("dtype", TYPES)
def test_adapters_compute_equal_bits(dtype: torch.dtype) -> None:
    model = with_adapters(from_config(copy.deepcopy(FAMILIES["llama"])).to(dtype))
    use_row_products(unwrapped(model), backbone(model))
    rollouts = decoded(model, dtype)
    assert torch.equal(learned(model, rollouts), engines(rollouts))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma"])
def test_gradients_are_those_of_the_plain_model(family: str) -> None:
    model = from_config(copy.deepcopy(FAMILIES[family]))
    rollouts = decoded(model, torch.float32)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        learned(model, rollouts).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    use_row_products(model, backbone(model))
    for name, ours in gradients().items():
        theirs = expected[name]
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max(), name


@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_and_entropies_are_those_of_slices(bias: bool) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(1000, 16), torch.randn(70, 16)
    targets = torch.randint(1000, (70,))
    given = torch.randn(1000) if bias else None
    capped: dict[str, Any] = {"scale": 0.5, "softcap": 3.0}
    for options in ({}, capped):
        plain = token_logprobs(OutputHead(weight, given, **options), hidden, targets, 0.7)
        ours = token_logprobs(
            OutputHead(weight, given, **options, by_rows=True), hidden, targets, 0.7
        )
        for one, other in zip(ours, plain, strict=True):
            assert torch.allclose(one, other, rtol=rounding(1000), atol=1e-5)


def test_models_with_other_products_are_refused() -> None:
    """Experts get as many rows as are routed to them, and GPT-2 has products of its own."""
    refused = [
        hf.MixtralConfig(**GROUPED, **EXPERTS),
        hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4),
        hf.LlamaConfig(**GROUPED, hidden_act="mish"),
        hf.Gemma2Config(**GROUPED, head_dim=16),  # soft caps
    ]
    for config in refused:
        model = from_config(config)
        with raises(EngineError, "match-engine-model"):
            use_row_products(model, backbone(model))
    eager = from_config(copy.deepcopy(FAMILIES["llama"]), "eager")
    with raises(EngineError, "match-engine-model"):
        use_row_products(eager, backbone(eager))


def test_a_model_whose_rows_differ_over_the_cache_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = from_config(copy.deepcopy(FAMILIES["llama"])).to(torch.bfloat16)
    use_row_products(model, backbone(model))
    attend = row_products._attend

    def changed(query: Tensor, *others: Any, **options: Any) -> Tensor:
        out = attend(query, *others, **options)
        return out * 1.01 if query.shape[2] == 1 else out

    monkeypatch.setattr(row_products, "_attend", changed)
    with raises(EngineError, "cache-differs"):
        decoded(model, torch.bfloat16)
