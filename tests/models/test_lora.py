"""LoRA on a model that the caller brings, and what adapters are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import stretto
from helpers import VOCABULARY, critic_of, llama
from raising import raises
from stretto import Config
from stretto.assembly.models import with_adapters
from stretto.config import ModelConfig
from stretto.errors import ConfigError, RewardError
from stretto.models.heads import critic_from_actor
from stretto.models.lora import add_lora, merge_lora, trained_names

ROWS = [{"prompt": f"say {word}", "answer": word} for word in ("cat", "dog", "cow")]
IDS = torch.arange(40).view(2, 20)


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
    with raises(ConfigError, "adapters-already", "model.lora_rank = 0"):
        train(wrapped, tiny_folder, tmp_path)
    result = train(wrapped, tiny_folder, tmp_path, model__lora_rank=0)
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
