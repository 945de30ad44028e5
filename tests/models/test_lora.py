"""LoRA on a model that the caller brings, and what adapters are refused."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import bitsandbytes

import stretto
from engine_helpers import engine, finish, rollouts
from helpers import VOCABULARY, critic_of, llama
from raising import raises
from rounding import rounding
from stretto import Config
from stretto.assembly.run_models import Overrides, make_actor, with_adapters
from stretto.config import ModelConfig, recipes
from stretto.errors import ConfigError, MissingExtraError, ModelError, RewardError
from stretto.models.devices import Backend, CudaBackend
from stretto.models.heads import critic_from_actor, reward_model_from
from stretto.models.info import described, with_adapter_settings
from stretto.models.load import (
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    save_model,
)
from stretto.models.lora import (
    FusedAdapters,
    add_lora,
    load_lora,
    merge_lora,
    starting_policy,
    trained_names,
)
from stretto.models.weights import fingerprint_of, with_own_structure, with_own_weights
from stretto.observe import RunDirectory
from stretto.planner.memory_model import NF4
from stretto.saying import silent
from stretto.scoring.model_scorers import reference_scorer

ROWS = [{"prompt": f"say {word}", "answer": word} for word in ("cat", "dog", "cow")]
IDS = torch.arange(40).view(2, 20)
CPU = torch.device("cpu")


def letters(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(len(set(a) & set(c))) for a, c in zip(answer, completions, strict=True)]


def interrupting(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    interrupting.calls += 1  # type: ignore[attr-defined]
    if interrupting.calls > 2:  # type: ignore[attr-defined]
        raise KeyboardInterrupt
    return letters(completions, answer)


def failing(completions: Sequence[str]) -> list[float]:
    raise ValueError("no rewards today")


@pytest.fixture
def tiny(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


def train(model: Any, folder: Path, out: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "steps": 2,
        "out": str(out),
        "reward": letters,
        "dataset": ROWS,
        "rollout": {"batch": 4, "max_new_tokens": 4},
        "training__lr": 1e-2,
        "model__lora_rank": 2,
        "model__dtype": "float32",
        "observe__progress": "off",
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return stretto.train(Config(), model=model, tokenizer=tokenizer, **{**settings, **changes})


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS).logits
    return out


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_model_that_was_brought_is_the_trained_policy_afterwards(
    tiny: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    names, start = list(state(tiny)), logits(tiny)
    result = train(tiny, tiny_folder, tmp_path / "runs")
    assert list(state(tiny)) == names
    assert not hasattr(tiny, "peft_config")
    assert all(p.requires_grad for p in tiny.parameters())
    trained = logits(tiny)
    assert (trained - start).abs().max() > 1e-3
    tiny.save_pretrained(tmp_path / "own")
    for folder in (result.model, tmp_path / "own"):
        saved = state(AutoModelForCausalLM.from_pretrained(folder))
        assert all(torch.equal(saved[name], p) for name, p in state(tiny).items())

    train(tiny, tiny_folder, tmp_path / "runs")
    again = logits(tiny)
    assert not torch.equal(again, trained)
    train(tiny, tiny_folder, tmp_path / "runs", model__lora_rank=0)
    assert not torch.equal(logits(tiny), again)


@pytest.mark.parametrize("preset", ["sync", "stretto"])
def test_an_interrupted_run_leaves_it_whole_too(
    tiny: Any, tiny_folder: Path, tmp_path: Path, preset: str
) -> None:
    names, start = list(state(tiny)), logits(tiny)
    interrupting.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        train(
            tiny,
            tiny_folder,
            tmp_path,
            steps=9,
            reward=interrupting,
            schedule={"preset": preset},
        )
    assert list(state(tiny)) == names
    assert all(p.requires_grad for p in tiny.parameters())
    assert not torch.equal(logits(tiny), start)
    train(tiny, tiny_folder, tmp_path)


def test_what_was_frozen_stays_frozen(tiny: Any, tiny_folder: Path, tmp_path: Path) -> None:
    tiny.requires_grad_(False)
    tiny.model.norm.requires_grad_(True)
    train(tiny, tiny_folder, tmp_path)
    assert trained_names(tiny) == {"model.norm.weight"}


def test_a_critic_gets_its_trained_head_back() -> None:
    critic = critic_of(llama())
    names = list(state(critic))
    trained = trained_names(critic)
    wrapped = add_lora(critic, ModelConfig(lora_rank=2), "SEQ_CLS")
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        expected = wrapped(IDS[:1]).logits
    merge_lora(wrapped, trained)
    assert list(state(critic)) == names
    assert trained_names(critic) == trained
    with torch.no_grad():
        torch.testing.assert_close(critic(IDS[:1]).logits, expected, rtol=1e-4, atol=1e-5)


# -- targets -------------------------------------------------------------------------------------


def untied() -> Any:
    model = llama()
    model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 16))
    model.config.tie_word_embeddings = False
    return model


def test_embeddings_of_their_own_take_adapters_that_merge_into_the_policy() -> None:
    model = untied()
    ids = torch.arange(20)[None]
    trained = trained_names(model)
    wrapped = add_lora(model, ModelConfig(lora_rank=2, lora_targets=("embed_tokens",)), "CAUSAL_LM")
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter))
        before, expected = model.lm_head.weight.clone(), wrapped(ids).logits
        merge_lora(wrapped, trained)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize(
    ("targets", "codes", "facts"),
    [
        (("q_prj",), {"unknown-lora-target"}, ["'q_prj'", "Did you mean 'q_proj'?"]),
        (("q_proj", "value"), {"unknown-lora-target"}, ["'value'", "LlamaForCausalLM"]),
        (("q_proj", "mlp"), {"unknown-lora-target", "no-adapters-there"}, ["'mlp'"]),
        (("embed_tokens",), {"adapter-on-tied"}, ["model.embed_tokens and lm_head"]),
        (("q_proj", "lm_head"), {"adapter-on-tied"}, ["lm_head and model.embed_tokens"]),
        (("lm_head",), {"adapter-on-tied"}, ["lm_head and model.embed_tokens", "tied"]),
    ],
)
def test_targets_that_cannot_be_are_refused_in_a_line_and_leave_nothing(
    tiny: Any,
    tiny_folder: Path,
    tmp_path: Path,
    targets: tuple[str, ...],
    codes: set[str],
    facts: list[str],
) -> None:
    before, flags = state(tiny), trained_names(tiny)
    for brought in (True, False):
        named = {"name": str(tiny_folder), "lora_rank": 2, "lora_targets": targets}
        start = (
            partial(train, tiny, tiny_folder, tmp_path, model__lora_targets=targets)
            if brought
            else partial(
                stretto.train,
                Config(),
                out=str(tmp_path),
                dataset=ROWS,
                reward=letters,
                observe__progress="off",
                model=named,
            )
        )
        with pytest.raises(ConfigError) as caught:
            start()
        assert caught.value.code in codes
        assert all(fact in str(caught.value) for fact in facts)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
    after = state(tiny)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert trained_names(tiny) == flags


def test_an_error_after_the_adapters_are_on_takes_them_off(
    tiny: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    before = state(tiny)
    with pytest.raises(RewardError):
        train(tiny, tiny_folder, tmp_path, reward=failing)
    after = state(tiny)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_model_with_adapters_of_its_own_keeps_them(
    tiny: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    wrapped: Any = get_peft_model(tiny, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    with raises(ConfigError, "adapters-already", "model__lora_rank=0"):
        train(wrapped, tiny_folder, tmp_path)
    result = train(wrapped, tiny_folder, tmp_path, model__lora_rank=0)
    # The reference is the policy as it starts, as with an adapter's folder.
    first = RunDirectory.open(result.model.parent).read_metrics()[0]
    assert abs(first["objective/kl"]) < 1e-4
    trained = logits(wrapped)
    loaded = AutoModelForCausalLM.from_pretrained(result.model)
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-4, atol=1e-5)
    base = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tiny_folder))
    wrapped.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(again), trained, rtol=1e-4, atol=1e-5)


def test_adapters_start_the_same_in_whatever_order_models_are_loaded(tiny: Any) -> None:
    """Each draws from a generator of its own, and leaves torch's as it was."""
    config = Config.model_validate({"seed": 5, "model": {"lora_rank": 2, "device": "cpu"}})

    def adapters(seed: int, kinds: Sequence[Any]) -> dict[str, dict[str, torch.Tensor]]:
        torch.manual_seed(seed)
        before, found = torch.get_rng_state(), {}
        for kind in kinds:
            base = critic_from_actor(tiny) if kind == "SEQ_CLS" else copy.deepcopy(tiny)
            model = with_adapters(base, config.model, config.seed, kind, None)
            found[kind] = {n: p.clone() for n, p in model.named_parameters() if "lora_A" in n}
        assert torch.equal(torch.get_rng_state(), before)
        return found

    one, two = adapters(1, ["CAUSAL_LM", "SEQ_CLS"]), adapters(2, ["SEQ_CLS", "CAUSAL_LM"])
    for kind in one:
        assert one[kind]
        assert all(torch.equal(one[kind][name], two[kind][name]) for name in one[kind])
    actor, critic = (next(iter(one[kind].values())) for kind in ("CAUSAL_LM", "SEQ_CLS"))
    assert not torch.equal(actor, critic)


# -- folders of adapters --------------------------------------------------------------------------


@pytest.fixture(params=["lora", "rslora", "dora"])
def adapter(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> Path:
    """A PEFT folder, beside its model, with adapters that change what it computes."""
    return saved_adapter(tiny_folder, tmp_path, **{f"use_{request.param}": True})


def saved_adapter(base: Path, where: Path, **changes: Any) -> Path:
    from peft import LoraConfig, get_peft_model

    changes.pop("use_lora", None)
    lora = LoraConfig(
        **{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **changes}
    )
    torch.manual_seed(0)
    wrapped: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(where / "adapter")
    return where / "adapter"


def with_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def rewritten(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def kind_of(folder: Path) -> str:
    saved = json.loads((folder / "adapter_config.json").read_text())
    return "dora" if saved["use_dora"] else "rslora" if saved["use_rslora"] else "lora"


def test_a_folder_of_adapters_is_the_model_with_them_merged_in(
    adapter: Path, tiny_folder: Path
) -> None:
    want = logits(with_peft(tiny_folder, adapter))
    model = load_causal_lm(adapter, torch.float32, CPU)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    assert all(p.requires_grad for p in model.parameters())
    assert load_tokenizer(adapter).vocab_size == load_tokenizer(tiny_folder).vocab_size
    assert described(str(adapter)).parameters == described(str(tiny_folder)).parameters
    shutil.copytree(tiny_folder, adapter / "base")
    rewritten(adapter, base_model_name_or_path="base")
    model = load_causal_lm(adapter, torch.float32, CPU)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", ["sync", "stretto"])
@pytest.mark.parametrize("fresh", [False, True], ids=["saved", "fresh"])
def test_adapters_of_each_kind_are_trained_and_merged(
    adapter: Path, tiny_folder: Path, tmp_path: Path, preset: str, fresh: bool
) -> None:
    kind, start = kind_of(adapter), logits(with_peft(tiny_folder, adapter))
    changes: dict[str, Any] = {"model__name": str(adapter), "model__lora_rank": 0}
    if fresh:
        start = logits(AutoModelForCausalLM.from_pretrained(tiny_folder))
        changes = {"model__name": str(tiny_folder), "model__lora_kind": kind}
    result = train(None, tiny_folder, tmp_path, schedule={"preset": preset}, **changes)
    first = RunDirectory.open(result.model.parent).read_metrics()[0]
    # The policy samples as the reference scores; float32, two layers of sums of up to 192 terms.
    assert abs(first["objective/kl"]) < 1e-4
    assert kind_of(result.model / "adapter") == kind
    trained = with_peft(tiny_folder, result.model / "adapter")
    assert (logits(trained) - start).abs().max() > 1e-3
    saved = load_causal_lm(result.model, torch.float32, CPU)
    torch.testing.assert_close(logits(saved), logits(trained), rtol=1e-4, atol=1e-4)


def test_the_reference_is_the_policy_as_it_starts(adapter: Path, tiny_folder: Path) -> None:
    settings = with_adapter_settings(ModelConfig(name=str(adapter), device="cpu", dtype="float32"))
    assert (settings.lora_rank, settings.lora_alpha) == (2, 6.0)
    assert settings.lora_targets == ("q_proj", "up_proj")
    assert settings.lora_kind == kind_of(adapter)
    base = make_actor(settings, Overrides(), silent, merged=False)
    actor = with_adapters(base, settings, 0, "CAUSAL_LM", None)
    want, trained = logits(actor), trained_names(actor)
    assert trained
    assert all("lora_" in name for name in trained)
    reference = starting_policy(actor)
    assert not trained_names(reference)
    own = {id(p) for p in reference.parameters()}
    assert {n for n, p in actor.named_parameters() if id(p) not in own} == trained
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if name in trained:
                parameter.add_(1.0)
    assert not torch.equal(logits(actor), want)
    assert torch.equal(logits(reference), want)
    assert reference_scorer(reference, 1.0, 64).model is reference


@pytest.mark.parametrize(
    ("error", "code", "saved", "model"),
    [
        (ConfigError, "adapter-contradicted", {}, {"lora_rank": 4}),
        (ConfigError, "adapter-contradicted", {}, {"lora_targets": ["v_proj"]}),
        (ConfigError, "adapter-not-trained", {"peft_type": "IA3"}, {}),
        (ConfigError, "adapter-not-trained", {"modules_to_save": ["lm_head"]}, {}),
        (ModelError, "adapter-without-base", {"base_model_name_or_path": None}, {}),
        (ModelError, "adapter-not-loaded", {"r": 3}, {}),
        (ModelError, "adapter-not-loaded", {"target_modules": ["q_proj", "v_proj"]}, {}),
        (ModelError, "no-model-folder", {"base_model_name_or_path": "./not/here"}, {}),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(
    tiny_folder: Path,
    tmp_path: Path,
    error: Any,
    code: str,
    saved: dict[str, Any],
    model: dict[str, Any],
) -> None:
    folder = saved_adapter(tiny_folder, tmp_path)
    rewritten(folder, **saved)
    named = {f"model__{key}": value for key, value in {"lora_rank": 0, **model}.items()}
    with raises(error, code):
        train(None, tiny_folder, tmp_path, model__name=str(folder), **named)


def test_an_adapter_is_no_reward_model(tiny_folder: Path, tmp_path: Path) -> None:
    with raises(ModelError, "adapter-of-classifier", "merge_and_unload"):
        load_sequence_classifier(saved_adapter(tiny_folder, tmp_path), torch.float32, CPU)


def test_a_warm_up_under_saved_adapters_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = saved_adapter(tiny_folder, tmp_path)
    with raises(ConfigError, "adapter-with-warmup"):
        changes = {"model__lora_rank": 0, "warmup_examples": 8}
        train(None, tiny_folder, tmp_path, model__name=str(folder), **changes)


# -- weights in 4 bits ----------------------------------------------------------------------------

LORA = ModelConfig(lora_rank=2)


@pytest.fixture
def in_4bit(tiny_folder: Path) -> Any:
    pytest.importorskip("bitsandbytes")
    return load_causal_lm(tiny_folder, torch.float32, CPU, load_in_4bit=True)


def drawn(model: nn.Module, kind: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM") -> Any:
    """The model in adapters that change what it computes."""
    torch.manual_seed(0)
    wrapped = add_lora(model, LORA, kind)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("4bit-without-adapters", {"model": {"load_in_4bit": True}}),
        ("4bit-with-warmup", {"warmup_examples": 8}),
        ("4bit-with-dora", {"model": {"load_in_4bit": True, "lora_rank": 2, "lora_kind": "dora"}}),
        ("4bit-with-vllm", {"runtime": "local", "rollout": {"engine": "vllm"}}),
        ("4bit-in-parts", {"pipeline": {"ranks": 2}}),
        (
            "4bit-in-parts",
            {"runtime": "local", "cluster": {"processes": [{"roles": ["learner"], "ranks": 2}]}},
        ),
    ],
)
def test_4_bits_are_refused_where_they_cannot_be(code: str, changes: dict[str, Any]) -> None:
    with raises(ConfigError, code):
        recipes.build({"model": {"load_in_4bit": True, "lora_rank": 2}, **changes}, "here")


def test_adapters_of_a_folder_are_trained_on_4_bits(
    in_4bit: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    folder, four = saved_adapter(tiny_folder, tmp_path), {"model__load_in_4bit": True}
    start = logits(load_lora(in_4bit, folder))
    result = train(None, tiny_folder, tmp_path, model__name=str(folder), **four)
    first = RunDirectory.open(result.model.parent).read_metrics()[0]
    assert abs(first["objective/kl"]) < 1e-4
    base = load_causal_lm(tiny_folder, torch.float32, CPU, load_in_4bit=True)
    trained = logits(load_lora(base, result.model / "adapter"))
    assert (trained - start).abs().max() > 1e-3
    saved = logits(load_causal_lm(result.model, torch.float32, CPU))
    # In float32: two layers of sums of up to 192 terms.
    assert (saved - trained).abs().max() < 1e-5 * trained.abs().max()


def test_dora_of_a_folder_on_4_bits_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = saved_adapter(tiny_folder, tmp_path, use_dora=True)
    with raises(ConfigError, "4bit-with-dora"):
        with_adapter_settings(ModelConfig(name=str(folder), load_in_4bit=True, lora_rank=2))


def test_4_bits_are_for_models_by_name(tiny: Any) -> None:
    with raises(ConfigError, "4bit-of-loaded"):
        make_actor(ModelConfig(lora_rank=2, load_in_4bit=True), Overrides(actor=tiny), silent)


def test_4_bits_are_asked_of_transformers(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the library: nothing is quantized."""
    load = partial(load_causal_lm, tiny_folder, torch.float32, CPU, load_in_4bit=True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises(MissingExtraError, "missing-library", "model.load_in_4bit"):
        load()
    given, read = list[Any](), AutoModelForCausalLM.from_pretrained

    def spy(*args: Any, quantization_config: Any, device_map: Any, **kwargs: Any) -> Any:
        given.append((quantization_config, device_map))
        return read(*args, **kwargs)

    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    load()
    ((config, device_map),) = given
    assert config.load_in_4bit
    assert config.bnb_4bit_use_double_quant
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_compute_dtype) == ("nf4", torch.float32)
    assert device_map == {"": CPU}


class Codes(nn.Linear):
    """A stand-in for bitsandbytes' layer: codes from -7 to 7, and a scale at the side."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        scale = linear.weight.detach().abs().max() / 7
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight.quant_state = {"scale": scale}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantized(self.weight))


def dequantized(weight: Any) -> Tensor:
    whole: Tensor = weight.detach() * weight.quant_state["scale"]
    return whole


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> Any:
    monkeypatch.setattr(bitsandbytes, "dequantize_bnb_weight", dequantized)
    for name, module in [*tiny.named_modules()]:
        if isinstance(module, nn.Linear) and "layers" in name:
            tiny.set_submodule(name, Codes(module))
    return tiny.eval()


@pytest.mark.parametrize("kind", ["stood_in", "in_4bit"])
def test_the_saved_model_is_the_trained_one_in_whole_numbers(
    kind: str, request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path
) -> None:
    """Merged in 4 bits, adapters as small as these would be rounded away."""
    wrapped = drawn(request.getfixturevalue(kind))
    before = logits(wrapped)
    save_model(wrapped, load_tokenizer(tiny_folder), tmp_path / "saved")
    assert logits(wrapped).equal(before)
    saved = load_causal_lm(tmp_path / "saved", torch.float32, CPU)
    assert "quantization" not in (tmp_path / "saved" / "config.json").read_text()
    # In float32: two layers of sums of up to 192 terms.
    assert (logits(saved) - before).abs().max() < 1e-5 * before.abs().max()
    assert (tmp_path / "saved" / "adapter" / "adapter_model.safetensors").is_file()


@torch.no_grad()
def test_a_saved_reward_model_scores_as_the_trained_one(
    stood_in: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    wrapped = drawn(reward_model_from(stood_in, 0), "SEQ_CLS")
    want = wrapped(IDS[:1]).logits
    save_model(wrapped, load_tokenizer(tiny_folder), tmp_path / "saved")
    saved = load_sequence_classifier(tmp_path / "saved", torch.float32, CPU)
    assert (saved(IDS[:1]).logits - want).abs() < 1e-5 * want.abs()


def held_in_4bit(model: nn.Module) -> set[tuple[int, int, int]]:
    """Weights, their scales, and those that bitsandbytes' modules know; by their ids."""
    found = [m for m in model.modules() if hasattr(m._parameters.get("weight"), "quant_state")]
    assert len(found) == 14
    states = [(m.weight, m.weight.quant_state, getattr(m, "quant_state", None)) for m in found]  # type: ignore[union-attr]
    return {(id(weight), id(scales), id(known)) for weight, scales, known in states}


@pytest.mark.parametrize("kind", ["stood_in", "in_4bit"])
def test_all_roles_read_the_same_weights_in_4_bits(
    kind: str, request: pytest.FixtureRequest
) -> None:
    actor: Any = request.getfixturevalue(kind)
    critic: Any = critic_from_actor(actor, shares=True)
    plain = logits(actor)
    wrapped = drawn(actor)
    for other in (critic, with_own_structure(wrapped), with_own_weights(wrapped)):
        assert held_in_4bit(other) == held_in_4bit(wrapped)
    own = with_own_weights(wrapped)
    assert logits(own).equal(logits(wrapped))
    assert fingerprint_of(own) == fingerprint_of(wrapped)
    with wrapped.disable_adapter():
        assert logits(wrapped).equal(plain)


def test_4_bits_take_the_bytes_of_the_memory_plan(in_4bit: Any) -> None:
    weights = [p for p in in_4bit.parameters() if hasattr(p, "quant_state")]
    assert len(weights) == 14
    for weight in weights:
        state = weight.quant_state
        held = [weight.data, state.absmax, state.state2.absmax]
        size = sum(t.numel() * t.itemsize for t in held)
        # Blocks of 256 scales that are not full have a scale of their own, too.
        assert 0 <= size - NF4 * state.shape.numel() < 4


def test_gradients_pass_weights_in_4_bits_after_a_pass_without(in_4bit: Any) -> None:
    """Some CPUs would have their weights repacked for inference, and then no gradients."""
    wrapped = drawn(in_4bit)

    def gradients() -> list[Tensor]:
        wrapped.zero_grad()
        wrapped(IDS).logits.logsumexp(-1).sum().backward()
        return [p.grad.clone() for p in wrapped.parameters() if p.requires_grad]

    before, _ = gradients(), logits(wrapped)
    assert all(a.equal(b) for a, b in zip(before, gradients(), strict=True))
    assert all(g.any() for g in before)


@pytest.mark.parametrize("preset", ["sync", "stretto"])
def test_a_run_trains_adapters_on_4_bits(
    in_4bit: Any, tiny_folder: Path, tmp_path: Path, preset: str
) -> None:
    start = logits(in_4bit)
    result = train(
        None,
        tiny_folder,
        tmp_path,
        schedule={"preset": preset},
        model__name=str(tiny_folder),
        model__load_in_4bit=True,
    )
    assert (logits(load_causal_lm(result.model, torch.float32, CPU)) - start).abs().max() > 1e-3


def adapted(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model in adapters that change what it computes, as trained ones in their own type."""
    config = ModelConfig(lora_rank=4, lora_alpha=6, **changes)
    model: Any = add_lora(llama(dtype=dtype), config, "CAUSAL_LM")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    return model


@torch.inference_mode()
def logits_of(model: Any, fused: FusedAdapters | None = None) -> Tensor:
    with fused or nullcontext():
        logits: Tensor = model(IDS).logits
    return logits.double()


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_fused_adapters_are_the_same_function(kind: str) -> None:
    """Each layer in float64, to its rounding; and the logits in float32, to that of float32."""
    model = adapted(lora_kind=kind)
    plain, fused, calls = logits_of(model), FusedAdapters(model), list[Any]()
    assert len(fused.layers) == 2 * 7
    for layer in fused.layers:
        layer.lora_A["default"].register_forward_hook(lambda *given: calls.append(given) or None)
    got = logits_of(model, fused)
    assert not calls  # otherwise peft has computed it
    scale = plain.abs().max().item()
    assert (got - plain).abs().max().item() <= 10 * scale * rounding(200)
    assert torch.equal(logits_of(model), plain)
    assert len(calls) == 2 * 7
    fused = FusedAdapters(model.double())
    for layer in fused.layers:
        x = torch.randn(
            2, 9, layer.in_features, generator=torch.Generator().manual_seed(2)
        ).double()
        with torch.inference_mode():
            expected, base = layer(x), layer.get_base_layer()(x)
            with fused:
                got = layer(x)
        scale = expected.abs().max().item()
        assert (expected - base).abs().max().item() > 0.01 * scale
        assert (got - expected).abs().max().item() <= scale * rounding(200, torch.float64)


def test_fused_adapters_keep_small_updates_in_bfloat16() -> None:
    """Merged into weights in bfloat16, most of such an update is lost."""
    model = adapted(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 2.0**-12
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    merged = layer.get_base_layer().weight + layer.get_delta_weight("default").bfloat16()
    delta = (merged - layer.get_base_layer().weight).float()
    true = layer.get_delta_weight("default").float()
    assert (delta - true).norm() > 0.5 * true.norm()
    x = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(2)).bfloat16()
    low = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    update = x.double() @ low[0].double().T @ low[1].double().T * layer.scaling["default"]
    fused = FusedAdapters(model)
    with torch.inference_mode(), fused:
        layer.get_base_layer().weight.data.zero_()
        got = layer(x).double()
    assert (got - update).norm() <= 2.0**-7 * update.norm()


def test_fused_adapters_follow_the_trained_ones_in_the_same_memory() -> None:
    """CUDA graphs hold addresses, and an optimizer changes weights in place."""
    model = adapted(torch.bfloat16)
    fused = FusedAdapters(model)
    first = logits_of(model, fused)
    places = [copy.data_ptr() for copy in fused._copies]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
    assert (logits_of(model, fused) - first).abs().max() > 0.1
    assert torch.equal(logits_of(model, fused), logits_of(model, FusedAdapters(model)))
    assert [copy.data_ptr() for copy in fused._copies] == places


def test_layers_of_another_kind_are_not_fused() -> None:
    assert not FusedAdapters(llama()).layers
    assert not FusedAdapters(adapted(lora_kind="dora")).layers
    assert not FusedAdapters(adapted(), on=False).layers
    model = adapted()
    with model.disable_adapter():
        assert not FusedAdapters(model).layers


def test_an_engine_on_a_gpu_fuses_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of peft's passes, and the layers are peft's again afterwards."""
    found = []
    for fuses in (False, True):
        monkeypatch.setattr(Backend, "fuses_adapters", fuses)
        model = adapted()
        e = engine(model)
        made = rollouts([[3, 4, 5], [7, 8], [9]])
        e.admit([r.response() for r in made])
        finish(e, made)
        assert len(e._adapters.layers) == (14 if fuses else 0)
        assert not any("forward" in vars(m) for m in model.modules())
        found.append(made)
    assert CudaBackend.fuses_adapters
    for ours, theirs in zip(*found, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
