"""One step of each trainer against TRL's own, on the same responses; run where TRL 1.16 is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import stretto
from rounding import GRADIENT_TERMS, rounding
from stretto.algorithms import advantages

trl = pytest.importorskip("trl", "1.16")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.(is_)?gradient_checkpointing. is deprecated:FutureWarning"
)

LR, TOKENS = 1e-3, 40
PROMPTS = ("one", "three", "seven", "twelve")
SHARED = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_steps": 1,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "temperature": 1.0,
}
GROUPS = {"num_generations": 4, "max_completion_length": TOKENS}
AT_ONCE = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
"""TRL averages the entropy over each micro-batch, and we over an update's tokens: here one."""
BONUS = {**GROUPS, **AT_ONCE, "entropy_coef": 0.5}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", GROUPS),
    "a mean of responses, and the KL": ("GRPO", {**GROUPS, "loss_type": "grpo", "beta": 0.1}),
    "dr_grpo": ("GRPO", {**GROUPS, "loss_type": "dr_grpo", "scale_rewards": "none"}),
    "one deviation": ("GRPO", {**GROUPS, "scale_rewards": "batch"}),
    "each reward normalised": (
        "GRPO",
        {**GROUPS, "multi_objective_aggregation": "normalize_then_sum"},
    ),
    "whole responses": ("GRPO", {**GROUPS, "mask_truncated_completions": True}),
    "cispo": ("GRPO", {**GROUPS, "loss_type": "cispo", "epsilon_high": 5.0}),
    "gspo": (
        "GRPO",
        {**GROUPS, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "luspo": (
        "GRPO",
        {**GROUPS, "loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "entropy, dapo": ("GRPO", BONUS),
    "entropy, grpo": ("GRPO", {**BONUS, "loss_type": "grpo"}),
    "entropy, dr_grpo": ("GRPO", {**BONUS, "loss_type": "dr_grpo"}),
    "entropy, luspo": (
        "GRPO",
        {**BONUS, "loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "weight decay": ("GRPO", {**GROUPS, "weight_decay": 0.1}),
    "rloo": ("RLOO", {**GROUPS, "beta": 0.05}),
    "online dpo": (
        "OnlineDPO",
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        | {"max_new_tokens": TOKENS},
    ),
}


class Recorded:
    """The responses of our run, which TRL's trainer has to train on."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.responses: dict[str, list[list[int]]] = defaultdict(list)

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Numbers of no meaning, rarely the same; padding counts for nothing."""
        pad = self._tokenizer.pad_token_id
        own = [[token for token in ids if token != pad] for ids in completion_ids]
        return [sum(i * token for i, token in enumerate(ids, 3)) % 1009 / 1009 for ids in own]

    def record(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            self.responses[prompt].append(ids)
        return self.reward(completion_ids)

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        pad = self._tokenizer.pad_token_id
        texts = self._tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        rows = [self.responses[text].pop(0) for text in texts]
        padded = [row + [pad] * (TOKENS - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


class Gradients(TrainerCallback):
    """Keeps the gradients of an update."""

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.found = {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with five tokens that end a response, so that about half of the responses end."""
    model, found = AutoModelForCausalLM.from_pretrained(tiny_folder), tmp_path_factory.mktemp("m")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *b"eats"]
    model.save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_trls(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advantages, "STD_EPS", 1e-4)  # TRL's
    name, own = CASES[case]
    settings: dict[str, Any] = {**SHARED, **own}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, recorded = [{"prompt": prompt} for prompt in PROMPTS], Recorded(tokenizer)

    ours = getattr(stretto, f"{name}Trainer")(
        model=str(folder),
        reward_funcs=recorded.record,
        args=getattr(stretto, f"{name}Config")(str(tmp_path / "ours"), **settings),
        train_dataset=rows,
    )
    result = ours.train()

    home: Any = trl
    if name == "OnlineDPO":
        home = import_module("trl.experimental.online_dpo")
    from datasets import Dataset

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.generate = recorded.generate
    gradients = Gradients()
    theirs = getattr(home, f"{name}Trainer")(
        model=model,
        reward_funcs=recorded.reward,
        args=getattr(home, f"{name}Config")(str(tmp_path / "theirs"), **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[gradients],
    )
    output = theirs.train()
    assert not any(recorded.responses.values())

    near = rounding(GRADIENT_TERMS)
    logged = theirs.state.log_history[0]
    assert result.training_loss == pytest.approx(output.training_loss, abs=10 * near)
    of_ours = ours.state.log_history[0]
    for figure in ("reward", "entropy", "grad_norm", "completions/mean_length", "kl"):
        if figure in logged:
            assert of_ours[figure] == pytest.approx(logged[figure], rel=1e-3, abs=1e-5), figure
    after = dict(model.named_parameters())
    for n, p in ours.model.named_parameters():
        gradient = gradients.found[n].abs()
        # AdamW's first update is lr g / |g|: uncertain where rounding decides about the sign.
        least = near * gradient.max() / gradient.clamp_min(1e-30)
        bound = LR * torch.minimum(2 * least, torch.tensor(2.0)) + 4e-7 * start[n].abs() + 1e-9
        assert (p - after[n]).abs().le(bound).all(), n
        assert ((p - start[n]).abs() > bound).float().mean() > 0.5 or gradient.max() == 0, n
