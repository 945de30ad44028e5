"""Families of models on the path of a run: loaded, decoded, scored and trained as the whole model
computes, or refused in a line.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from engine_helpers import EXPERTS, GROUPED, from_config, plain_logprobs
from helpers import told
from raising import raises
from scorer_helpers import stream
from stretto.assembly.roles import RoleFactory
from stretto.config import Config, ModelConfig, RolloutConfig
from stretto.errors import EngineError, ModelError
from stretto.evaluation.generation import completed
from stretto.models.cached import (
    CHECKED,
    CachedPass,
    LayerMasks,
    SlotCache,
    check_cache,
    slots_within,
)
from stretto.models.forward import (
    backbone,
    output_head,
    positions,
    response_hidden,
    response_tokens,
)
from stretto.models.heads import critic_from_actor, scalar_head
from stretto.models.load import (
    load_causal_lm,
    load_sequence_classifier,
    save_model,
    set_checkpointing,
)
from stretto.models.logits import token_logprobs
from stretto.models.tiny import byte_tokenizer
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.steps import ModelPass
from stretto.schedules.rollout import Rollout
from stretto.scoring.model_scorers import critic_scorer, reference_scorer
from stretto.training.trained import training_mode
from stretto.types import Prompt

CPU = torch.device("cpu")
NEW = 8
PROMPTS = [3, 26, 14, 9]
"""Some end within the windows below, some beyond them; all windows are beyond 7 tokens."""

FOUR: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
WINDOWS = {
    **FOUR,
    "head_dim": 8,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
VISION = {**LAYERS, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GEMMA4 = {
    **WINDOWS,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
NOISE = {"router_jitter_noise": 0.4}

FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma3, with vision": lambda: hf.Gemma3Config(
        text_config=WINDOWS, vision_config=VISION, mm_tokens_per_image=4
    ),
    "gemma4, with vision": lambda: hf.Gemma4Config(
        text_config=GEMMA4, vision_config={**VISION, "num_key_value_heads": 2, "head_dim": 16}
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(**GEMMA4),
    "afmoe": lambda: hf.AfmoeConfig(
        **WINDOWS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "jetmoe": lambda: hf.JetMoeConfig(**FOUR, kv_channels=8, **EXPERTS),
    "phimoe, with noise": lambda: hf.PhimoeConfig(**FOUR, **EXPERTS, input_jitter_noise=0.4),
    "mixtral, with noise": lambda: hf.MixtralConfig(**FOUR, **EXPERTS, **NOISE, sliding_window=10),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False
    ),
    "granite": lambda: hf.GraniteConfig(**FOUR, logits_scaling=4.0),
    "llama4": lambda: hf.Llama4TextConfig(
        **FOUR, head_dim=8, intermediate_size_mlp=48, attention_chunk_size=8, num_local_experts=2
    ),
    "mistral3, with vision": lambda: hf.Mistral3Config(
        text_config=hf.Ministral3Config(**FOUR, head_dim=8),
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 16},
    ),
    "qwen3-vl": lambda: hf.Qwen3VLConfig(
        text_config={**FOUR, "head_dim": 8, "rope_parameters": MROPE},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
    ),
}
"""Most of them have no sequence classifier in transformers."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reloaded(FAMILIES[request.param](), tmp_path_factory.mktemp("model"))


def reloaded(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights as a run loads it."""
    from_config(config).save_pretrained(folder)
    return load_causal_lm(folder, dtype, CPU)


def rollouts() -> list[Rollout]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(3, 97) for _ in range(n)) for n in PROMPTS]
    return [Rollout(i, Prompt(i, p, ""), i) for i, p in enumerate(prompts)]


def decoded(model: Any) -> list[Rollout]:
    """Rollouts with sampled responses, out of few slots and prompts in pieces."""
    config = RolloutConfig(batch=4, max_new_tokens=NEW, prefill_tokens=11, slots=3)
    engine = TorchEngine(model, EngineSettings(rollout=config, seed=3))
    made = rollouts()
    list(completed(engine, made, 3))
    return made


def assert_close(got: Sequence[Any], expected: Sequence[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), b, rtol=1e-3, atol=1e-3)


def test_engine_scorers_and_learner_compute_what_the_whole_model_does(model: Any) -> None:
    made = decoded(model)
    expected = [plain_logprobs(model, r) for r in made]
    assert_close([r.logprobs for r in made], expected)
    assert_close(streamed(model, made), expected)
    head = output_head(model)
    with training_mode(model):
        hidden = response_hidden(model, told(made))
        logprobs, _ = token_logprobs(head, hidden, response_tokens(told(made), CPU))
    assert_close(logprobs.detach().split(NEW), expected)
    logprobs.sum().backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert len({n for n, grad in trained.items() if grad is not None}) > 0.8 * len(trained)


@torch.no_grad()
def test_a_critic_values_states_and_is_the_same_once_saved_or_sent(
    model: Any, tmp_path: Path
) -> None:
    critic: Any = critic_from_actor(model)
    head = scalar_head(critic)
    assert not head.weight.any()  # type: ignore[operator, union-attr]
    nn.init.normal_(head.weight, std=0.3)  # type: ignore[arg-type]
    ids = torch.tensor([[5, 6, 7, 20, 31]])
    state = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
    values = critic(input_ids=ids).logits
    torch.testing.assert_close(values[0], head.weight @ state, rtol=1e-4, atol=1e-5)  # type: ignore[operator]
    assert critic_scorer(critic, 64).info.name == "critic"
    sent = pickle.loads(pickle.dumps(critic))
    save_model(critic, byte_tokenizer(), tmp_path / "critic")
    saved = load_sequence_classifier(tmp_path / "critic", torch.float32, CPU)
    for other in (sent, saved, copy.deepcopy(critic)):
        assert type(other) is type(critic)
        torch.testing.assert_close(other(input_ids=ids).logits, values, rtol=1e-4, atol=1e-5)


def streamed(model: Any, made: Sequence[Rollout]) -> list[Any]:
    """Log-probabilities by a reference that reads responses while they grow."""
    said: list[str] = []
    settings = {"schedule": {"preset": "stretto"}, "rollout": {"batch": 4, "max_new_tokens": NEW}}
    slots = RoleFactory(Config.model_validate(settings), said.append).scorer_slots(model)
    scorer = reference_scorer(model, 1.0, 16, slots=slots, say=said.append)
    assert scorer.info.streams
    assert said == []
    return stream(scorer, made, 5)


def test_gradient_checkpointing_recomputes_without_noise(tmp_path: Path) -> None:
    model = reloaded(FAMILIES["phimoe, with noise"](), tmp_path)
    made = decoded(model)
    expected = torch.cat([plain_logprobs(model, r) for r in made])
    head, gradients = output_head(model), []
    for _ in range(2):
        with training_mode(model):
            hidden = response_hidden(model, told(made))
            logprobs, _ = token_logprobs(head, hidden, response_tokens(told(made), CPU))
            torch.testing.assert_close(logprobs.detach(), expected, rtol=1e-3, atol=1e-3)
            logprobs.sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        set_checkpointing(model, ModelConfig(gradient_checkpointing="on"))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-3)


def test_towers_that_no_text_passes_are_frozen(tmp_path: Path) -> None:
    model = reloaded(FAMILIES["gemma3, with vision"](), tmp_path)
    frozen = {n.split(".")[1] for n, p in model.named_parameters() if not p.requires_grad}
    trained = {n.split(".")[1] for n, p in model.named_parameters() if p.requires_grad}
    assert frozen == {"vision_tower", "multi_modal_projector"}
    assert trained == {"language_model"}
    critic = critic_from_actor(model)
    nn.init.normal_(critic.get_submodule("score").weight, std=0.3)  # type: ignore[arg-type]
    made = decoded(model)
    scorer = critic_scorer(critic, 64)
    scorer.admit(told(made))
    ids = torch.tensor([[*made[1].prompt.tokens, *made[1].tokens[:-1]]])
    with torch.no_grad():
        theirs = critic(input_ids=ids).logits[0, 0]
    assert scorer.finish([1])[0].values[-1] == pytest.approx(theirs.item(), abs=1e-4)


# -- what a check at the start sees --------------------------------------------------------------


def windowed(dtype: torch.dtype) -> Any:
    """A model whose windows are far beyond what a check reads."""
    return from_config(hf.Gemma3TextConfig(**{**WINDOWS, "sliding_window": 512})).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "wrong", "refused"),
    [
        (torch.bfloat16, {1}, False),
        (torch.bfloat16, {1, 2}, False),
        (torch.bfloat16, {1, 2, 3}, True),
        (torch.bfloat16, {1, 2, 3, 4, 5}, True),
        (torch.float32, {1}, True),
    ],
)
def test_in_low_precision_single_tokens_may_be_rounded_far(
    dtype: torch.dtype, wrong: set[int], refused: bool
) -> None:
    """As control tokens without a text around them are; of five draws three must agree."""
    own = ModelPass(windowed(dtype), SlotCache(2), RolloutConfig())
    own.cache.reserve(CHECKED)
    calls = itertools.count(1)

    def newest(ids: Tensor, at: Tensor, read: int) -> Tensor:
        logits = own.next_logits(ids, at, read)
        return logits * 2 if next(calls) in wrong else logits

    with raises(EngineError, "cache-differs") if refused else nullcontext():
        check_cache(own, newest, own.head.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", ["none of them", "one kind too many"])
def test_a_window_that_is_not_heeded_is_seen_at_the_start(
    dtype: torch.dtype, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = windowed(dtype)
    config = RolloutConfig(batch=2, max_new_tokens=4)
    TorchEngine(model, EngineSettings(rollout=config))
    assert model.config.sliding_window == model.model.config.sliding_window == 512
    ours = LayerMasks.__call__

    def wrong(self: LayerMasks, positions: Tensor, read: int) -> Any:
        masks = ours(self, positions, read)
        if isinstance(masks, Tensor):
            return masks
        kind = "full_attention" if layers == "none of them" else "sliding_attention"
        return dict.fromkeys(masks, masks[kind])

    monkeypatch.setattr(LayerMasks, "__call__", wrong)
    with raises(EngineError, "window-differs"):
        TorchEngine(model, EngineSettings(rollout=config))
    assert model.config.sliding_window == 512


@torch.no_grad()
def test_a_window_that_is_fixed_when_the_model_is_made_is_refused() -> None:
    """Narrowing it changes nothing, so what the engine masks is not what the model sees."""
    model = windowed(torch.float32)
    plain = model.model.forward

    def fixed(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None:
            narrow, model.model.config.sliding_window = model.model.config.sliding_window, 512
            try:
                return plain(*args, **kwargs)
            finally:
                model.model.config.sliding_window = narrow
        return plain(*args, **kwargs)

    model.model.forward = fixed
    with raises(EngineError, "window-differs"):
        TorchEngine(model, EngineSettings(rollout=RolloutConfig()))


@pytest.mark.parametrize("name", ["gemma3, with vision", "gemma4", "falcon"])
def test_the_memory_of_slots_is_measured(name: str, tmp_path: Path) -> None:
    model = reloaded(FAMILIES[name](), tmp_path)
    slots = SlotCache(3)
    slots.reserve(70)
    CachedPass(model, slots).prefill([0], [0], [[5, 6, 7]])
    taken = sum(x.nbytes for x in (*slots._keys, *slots._values))
    assert slots_within(model, 70, taken) == 3
    assert slots_within(model, 70, taken - 1) == 2


# -- refused -------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    "falcon, alibi": lambda: hf.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "jamba": lambda: hf.JambaConfig(
        **FOUR, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
    ),
    "bart, its decoder": lambda: hf.BartConfig(
        vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=48
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    with pytest.raises((ModelError, EngineError), match=r"^[^\n]+[Cc]hoose|Give [^\n]+$") as caught:
        decoded(reloaded(REFUSED[name](), tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bloom", "falcon, alibi"])
def test_a_reference_that_takes_no_masks_scores_whole(name: str, tmp_path: Path) -> None:
    model = reloaded(REFUSED[name](), tmp_path)
    made = rollouts()
    for r in made:
        r.tokens, r.logprobs = array("i", [5, 6, 7]), array("f", [-1.0] * 3)
        r.versions = array("i", [0] * 3)
    said: list[str] = []
    streaming = Config.model_validate({"schedule": {"preset": "stretto"}})
    slots = RoleFactory(streaming, print).scorer_slots(model)
    scorer = reference_scorer(model, 1.0, 64, slots=slots, say=said.append)
    (line,) = said
    assert line.startswith("'reference' scores rollouts whole, at their end: ")
    scorer.admit(told([Rollout(r.id, r.prompt, r.group) for r in made]))


def test_a_model_without_a_decoder_of_its_own_is_no_raw_error(tmp_path: Path) -> None:
    model = reloaded(FAMILIES["granite"](), tmp_path)
    with raises(ModelError, "no-decoder"):
        backbone(model.model)


def test_llama_4_ends_where_it_would_scale_attention_by_what_the_cache_holds(
    tmp_path: Path,
) -> None:
    model = reloaded(FAMILIES["llama4"](), tmp_path)
    model.config.max_position_embeddings = 1 << 20
    assert positions(model, generating=True) == model.config.floor_scale - 1 == 8191
    assert positions(model) == 1 << 20
