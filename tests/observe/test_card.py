"""Model cards, and names of the bases of adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

import stretto
from stretto.config import ModelConfig, SftConfig, recipes
from stretto.models import load, resolve
from stretto.models.lora import add_lora
from stretto.observe import RunDirectory
from stretto.observe.card import write_card

SETTINGS: dict[str, Any] = {"steps": 1, "observe": {"progress": "off", "checkpoint_minutes": 0}}


def card_of(folder: Path) -> Any:
    return ModelCard.load(folder / "README.md")  # the hub's own reader


def test_a_run_writes_a_card_that_the_hub_reads(tmp_path: Path) -> None:
    given = {**SETTINGS, "out": str(tmp_path), "model": {"name": "tiny", "lora_rank": 2}}
    result = stretto.train("tiny", **given)
    card = card_of(result.model)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["stretto", "ppo"]
    assert card.data.base_model is None  # 'tiny' is on no hub
    assert card.data.license is None
    assert "A model trained from ` tiny ` by ppo" in card.text
    assert "| command | Python |" in card.text
    for name in ("stretto", "torch", "transformers"):
        assert f"{name} " in card.text
    assert f"| objective/scores | {result.stats['objective/scores']:.5g} |" in card.text
    adapter = card_of(result.model / "adapter")
    assert adapter.data.library_name == "peft"
    assert "An adapter of ` tiny `" in adapter.text


def test_supervised_runs_write_cards_with_the_number_of_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    config = {"model": {"name": "tiny"}, "out": str(tmp_path), "data": {"name": str(data)}}
    config["data"] = {"name": str(data), "held_out": 0, "chat": "off"}
    result = stretto.sft(recipes.build(config, "here", SftConfig))
    card = card_of(result.model)
    assert card.data.tags == ["stretto", "sft"]
    assert "| rows | 6 |" in card.text
    assert str(data) in card.text
    assert card.data.datasets is None


def run_of(tmp_path: Path, **changes: Any) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "tiny", recipes.build(changes, "here"))
    run.model.mkdir()
    run.append_metrics(3, {"objective/scores": 0.25, "timing_s/step": 9.0, "loss/x": float("nan")})
    return run


def test_hub_names_are_metadata_and_hostile_text_is_not(tmp_path: Path) -> None:
    hostile = {"name": "o/n", "split": "train"}
    run = run_of(tmp_path, model={"name": "Qwen/Qwen3-0.6B"}, task={"kind": "dataset", **hostile})
    write_card(run, "grpo", 12)
    card = card_of(run.model)
    assert (card.data.base_model, card.data.datasets) == ("Qwen/Qwen3-0.6B", ["o/n"])
    assert "## Metrics after step 3" in card.text
    assert "timing" not in card.text
    assert "loss/x" not in card.text
    path = "a|b`c\nd: [<b>"
    run = run_of(tmp_path, model={"name": path})
    write_card(run, "a<b>|*\nc&d.py:spec")
    card = card_of(run.model)
    assert card.data.tags == ["stretto"]
    assert card.data.base_model is None
    assert "`` a\\|b`c d: [<b> ``" in card.text
    assert "by a&lt;b&gt;\\|\\* c&amp;d.py:spec, with" in card.text


def test_an_edited_card_is_kept_and_another_is_renewed(tmp_path: Path) -> None:
    run = run_of(tmp_path, model={"name": "tiny"})
    write_card(run, "grpo", 1)
    write_card(run, "grpo", 2)
    file = run.model / "README.md"
    assert "| rows | 2 |" in file.read_text()
    for edited in (file.read_text().replace("# license: fill in", "license: mit"), "mine\n", ""):
        file.write_text(edited)
        write_card(run, "grpo", 3)
        assert file.read_text() == edited


def test_saving_a_model_again_keeps_the_edited_card(tmp_path: Path) -> None:
    path = resolve.resolve("tiny", lambda _: None)
    model = load.load_causal_lm(path, torch.float32, torch.device("cpu"))
    folder, tokenizer = tmp_path / "model", load.load_tokenizer(path)
    load.save_model(model, tokenizer, folder)
    (folder / "README.md").write_text("mine")
    load.save_model(model, tokenizer, folder)
    assert (folder / "README.md").read_text() == "mine"


def test_an_adapter_names_the_hub_repository_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Path(resolve.resolve("tiny", lambda _: None))
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    shutil.copytree(tiny, tmp_path / "cache" / "smollm2-135m")
    base = resolve.resolve("smollm2-135m")
    model = load.load_causal_lm(base, torch.float32, torch.device("cpu"))
    config = ModelConfig(name="smollm2-135m", lora_rank=2, lora_targets=("all-linear",))
    adapted: Any = add_lora(model, config, "CAUSAL_LM")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    tokens = torch.tensor([[1, 2, 3]])
    expected = adapted(tokens).logits
    load.save_model(adapted, load.load_tokenizer(base), tmp_path / "model")
    adapter = tmp_path / "model" / "adapter"
    repository = "HuggingFaceTB/SmolLM2-135M-Instruct"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == repository
    assert "cache" not in " ".join(file.read_text() for file in adapter.glob("*.json"))
    # Here it is on the model that it was trained on, without the hub.
    assert resolve.adapter_base(adapter) == "smollm2-135m"
    ours = load.load_causal_lm(adapter, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(ours(tokens).logits, expected, atol=1e-4, rtol=1e-3)
    # With the repository in the hub's cache peft finds it, offline.
    hub = tmp_path / "hub"
    home = hub / f"models--{repository.replace('/', '--')}"
    shutil.copytree(tiny, home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    from peft import AutoPeftModelForCausalLM

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = AutoPeftModelForCausalLM.from_pretrained(
        str(adapter), cache_dir=str(hub), local_files_only=True
    )
    torch.testing.assert_close(loaded(tokens).logits, expected, atol=1e-4, rtol=1e-3)
    # The repository of another adapter is the hub's own.
    (adapter / "stretto.json").unlink()
    assert resolve.adapter_base(adapter) == repository


def test_a_best_model_and_a_resumed_run_have_cards(tmp_path: Path) -> None:
    observe = {"progress": "off", "checkpoint_every": 1, "eval_every": 1, "eval_prompts": 2}
    result = stretto.train("tiny", out=str(tmp_path), steps=1, observe=observe)
    assert result.best
    assert card_of(result.best.model).data.tags == ["stretto", "ppo"]
    (result.model / "README.md").write_text("---\nlicense: mit\n---\nmine")
    stretto.resume(result.run_dir, steps=2)
    assert card_of(result.model).data.license == "mit"
