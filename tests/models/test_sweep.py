"""All decoder families of the installed transformers, tiny and with random weights.

``PYTHONPATH=tests python tests/models/test_sweep.py`` writes the table of docs/models.md again.
With names of families after it, it prints their outcomes and writes nothing.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import nn
from transformers.models.auto import modeling_auto as auto

import stretto
from engine_helpers import plain_logprobs
from stretto import Config
from stretto.config import RolloutConfig
from stretto.errors import StrettoError
from stretto.evaluation.generation import completed
from stretto.models.heads import critic_from_actor, scalar_head
from stretto.models.info import language_auto
from stretto.models.load import load_causal_lm, load_sequence_classifier, save_model
from stretto.models.tiny import byte_tokenizer
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.types import Prompt

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARKS = "<!-- families -->\n", "<!-- end of families -->\n"
WORKS = "trained"
NEW = 12
PROMPTS = [[(7 * i + 3 * n) % 250 for i in range(n)] for n in (3, 26, 14, 9)]
"""Some end within the windows and chunks below, some beyond them."""
ROWS = [{"prompt": f"say {word}"} for word in ("cat", "dog", "cow", "a longer thing")]

SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        259: "vocab_size vocab_size_per_layer_input",
        256: "max_position_embeddings n_positions",
        48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff "
        "moe_intermediate_size intermediate_size_mlp shared_expert_intermediate_size "
        "shared_intermediate_size dense_intermediate_size expert_ffn_hidden_size",
        32: "hidden_size n_embd d_model dim embed_dim embedding_size out_hidden_size "
        "text_hidden_size",
        28: "image_size",
        14: "patch_size",
        10: "sliding_window",
        8: "head_dim kv_channels global_head_dim kv_lora_rank q_lora_rank qk_rope_head_dim "
        "qk_nope_head_dim v_head_dim attention_chunk_size hidden_size_per_layer_input "
        "mamba_n_heads mamba_d_head",
        4: "num_hidden_layers n_layer n_layers num_layers depth decoder_layers encoder_layers "
        "num_encoder_layers num_decoder_layers num_attention_heads n_head n_heads num_heads "
        "attention_heads decoder_attention_heads encoder_attention_heads num_experts "
        "n_routed_experts num_local_experts moe_num_experts rotary_dim",
        2: "num_key_value_heads num_experts_per_tok moe_topk moe_k",
        1: "n_group topk_group n_shared_experts",
        0: "pad_token_id num_kv_shared_layers",
        257: "bos_token_id",
        258: "eos_token_id",
        0.2: "initializer_range",
    }.items()
    for name in names.split()
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TURNED = (
    "qwen2_vl_text qwen2_5_vl_text paddleocr_vl_text qwen2_5_omni_text glm4v_text glm46v_text "
    "glm_ocr_text glmga_text cosmos3_edge_text"
)
CHANGES: dict[str, dict[str, Any]] = {
    **{kind: {"rope_parameters": MROPE} for kind in TURNED.split()},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 250},  # which it reads, and has not
}
"""By the types of configs, those of parts as well."""

REASONS = {
    "looks ahead": "sees tokens ahead (encoders; attention within a prefix)",
    "DecoderWrapper|Whisper": "the decoder of an encoder-decoder",
    "layers of type|keeps no such cache|only contain LinearAttention|xLSTM": (
        "layers with more than keys and values (linear or indexed attention, states)"
    ),
    "ALiBi": "ALiBi out of a mask of tokens",
    "cannot read two rows": "reads no text alone, or none over a cache",
    "window": "sees other tokens over a cache",
    "something to its logits|lacks|Unrecognized configuration|does not say which|classifier": (
        "more than a decoder and a linear head"
    ),
    "requires the .* library": "needs another library",
    "": "no small configuration was found",
}
"""By what errors say; the first that fits."""


def families() -> list[str]:
    """Types of configs: of causal language models, then of others that write text."""
    images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return list({**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **images})


def tiny(kind: Any) -> Any:
    """A config with small sizes, parts included."""
    fields = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map)
    given = {name: value for name, value in SIZES.items() if name in fields}
    if {"kv_lora_rank", "num_key_value_heads"} <= fields:
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    if getattr(kind, "sub_configs", {}):
        whole = kind()
        parts = {name: getattr(whole, name, None) for name in kind.sub_configs}
        given |= {name: tiny(type(part)) for name, part in parts.items() if part is not None}
    return kind(**given | CHANGES.get(kind.model_type, {}))


def distinct(completions: Sequence[str]) -> list[float]:
    return [float(len(set(c))) for c in completions]


def outcome(family: str) -> str:
    """Find what a family comes to: :data:`WORKS`, or why it is refused or was not tried."""
    kind: Any = hf.CONFIG_MAPPING[family]  # type: ignore[attr-defined]
    try:
        torch.manual_seed(0)
        made = language_auto(kind).from_config(tiny(kind)).eval()
        size = sum(p.numel() for p in made.parameters())
        if size > 5e7:
            raise ValueError(f"{size} parameters")
    except Exception as error:
        return f"not tried: {reason(str(error))}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(made, Path(folder))
        except StrettoError as error:
            return f"refused: {reason(str(error))}"
    return WORKS


def reason(said: str) -> str:
    return next(words for pattern, words in REASONS.items() if re.search(pattern, said))


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """Tokens by transformers' own decoding, of which none ends it."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def check(made: Any, folder: Path) -> None:
    """Save, load, decode, score and train a model; StrettoError where it is refused."""
    if getattr(made, "generation_config", None) is not None:
        made.generation_config.eos_token_id = None
        made.generation_config.pad_token_id = 0
    made.save_pretrained(folder / "start")
    byte_tokenizer().save_pretrained(folder / "start")
    model: Any = load_causal_lm(folder / "start", torch.float32, CPU)
    settings = RolloutConfig(batch=4, max_new_tokens=NEW, prefill_tokens=11, slots=3, temperature=0)
    engine = TorchEngine(model, EngineSettings(rollout=settings, seed=3))
    rollouts = [Rollout(i, Prompt(i, tuple(p), ""), i) for i, p in enumerate(PROMPTS)]
    list(completed(engine, rollouts, 3))
    for prompt, r in zip(PROMPTS, rollouts, strict=True):
        assert list(r.tokens) == greedy(made, prompt)
        torch.testing.assert_close(
            torch.tensor(r.logprobs), plain_logprobs(made, r), rtol=1e-3, atol=1e-3
        )
    critic: Any = critic_from_actor(model)
    nn.init.normal_(scalar_head(critic).weight, std=0.3)  # type: ignore[arg-type]
    save_model(critic, byte_tokenizer(), folder / "critic")
    loaded: Any = load_sequence_classifier(folder / "critic", torch.float32, CPU)
    assert type(loaded) is type(critic)
    ids = torch.tensor(PROMPTS[1:2])
    with torch.no_grad():
        values = (other(input_ids=ids).logits for other in (loaded, critic))
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)
    for preset in ("sync", "stretto"):
        result = stretto.train(
            Config(),
            model={"name": str(folder / "start"), "dtype": "float32", "device": "cpu"},
            dataset=ROWS,
            reward=distinct,
            steps=2,
            out=str(folder / "runs"),
            rollout={"batch": 4, "max_new_tokens": 8},
            schedule={"preset": preset},
            task__max_prompt_tokens=64,
            observe__progress="off",
        )
        trained = load_causal_lm(result.model, torch.float32, CPU).state_dict()
        before = model.state_dict()
        assert trained.keys() == before.keys()
        assert any(not torch.equal(trained[name], before[name]) for name in before)


def table(outcomes: Mapping[str, str]) -> str:
    """The table of docs/models.md, out of outcomes by family."""
    rows: dict[str, list[str]] = {WORKS: []}
    for family, found in sorted(outcomes.items(), key=lambda pair: (pair[1] != WORKS, *pair[::-1])):
        rows.setdefault(found, []).append(family)
    head = f"| transformers {hf.__version__} | families | types of configs |\n|---|---|---|\n"
    return head + "".join(
        f"| {found} | {len(names)} | {', '.join(sorted(names))} |\n"
        for found, names in rows.items()
        if names
    )


def documented() -> str:
    return PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]


def parsed(text: str) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return {name: found for found, _, names in rows for name in names.split(", ")}


def swept(names: Iterable[str]) -> dict[str, str]:
    with torch.random.fork_rng(devices=[]):
        return {name: outcome(name) for name in names}


def test_the_table_of_families_has_the_sweeps_form() -> None:
    outcomes = parsed(documented())
    head = documented().splitlines()[0].replace(f" {hf.__version__} ", " VERSION ")
    assert head.startswith("| transformers ")
    assert table(outcomes).splitlines()[1:] == documented().splitlines()[1:]
    if "VERSION" in head:
        assert sorted(outcomes) == sorted(families())


@pytest.mark.parametrize("family", ["granitemoe", "llama4", "qwen2_vl", "bloom", "bert", "blip"])
def test_families_are_as_the_table_says(family: str) -> None:
    of = documented().split()[2]
    if Version(hf.__version__) < Version(of):
        pytest.skip(f"the table is of transformers {of}; earlier ones run fewer families")
    assert swept([family])[family] == parsed(documented())[family]


@pytest.mark.slow
def test_the_table_has_what_the_sweep_finds() -> None:
    """All families take some minutes. The module's docstring shows how to write the table."""
    assert table(swept(families())) == documented()


if __name__ == "__main__":
    if names := sys.argv[1:]:
        for name in names:
            print(f"{name}: {swept([name])[name]}")
    else:
        page, (start, end) = PAGE.read_text(encoding="utf-8"), MARKS
        PAGE.write_text(
            page.partition(start)[0]
            + start
            + table(swept(families()))
            + end
            + page.partition(end)[2],
            encoding="utf-8",
        )
