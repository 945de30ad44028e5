"""What is refused before a run's first response, rather than in its midst."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import stretto
from helpers import llama
from raising import raises
from scorer_helpers import byte_rollout, reward_model, stream
from stretto.assembly import roles
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.config import Config, recipes
from stretto.errors import ConfigError, ModelError, RewardError, TaskError
from stretto.models.devices import Backend
from stretto.models.forward import positions
from stretto.models.load import load_causal_lm, load_sequence_classifier
from stretto.models.tiny import byte_tokenizer
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.runtime.run import Run, start
from stretto.schedules.rollout import Rollout
from stretto.scoring.model_scorers import RewardModelScorer
from stretto.tasks import load
from stretto.testing.contracts import scores_of
from stretto.types import FinishReason, Prompt
from stretto.weights.channel import SharedChannel

ROOM: dict[str, Any] = {
    "task": {"max_prompt_tokens": 60},
    "rollout": {"batch": 4, "max_new_tokens": 4},
    "reward": {"sources": ("one",)},
}


def one(completions: list[str]) -> list[float]:
    """A reward."""
    return [1.0] * len(completions)


def assemble(folder: Path, given: Overrides = NO_OVERRIDES, say: Any = id, **sections: Any) -> Run:
    """The parts of a run of the tiny model whose prompts have up to 60 tokens and responses 4."""
    data = recipes.load("tiny").model_dump() | {"warmup_examples": 0, "steps": 1, "threads": 1}
    for name, values in {**ROOM, "model": {"name": str(folder)}, **sections}.items():
        data[name] = data[name] | ROOM.get(name, {}) | values
    with ExitStack() as stack:
        given = replace(given, functions={"one": one})
        return start(Config.model_validate(data), stack, say, given)


def saved(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def brought(folder: Path, **parts: Any) -> Overrides:
    """The tiny model and its tokenizer as objects."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return replace(Overrides(actor=model, tokenizer=tokenizer), **parts)


# -- positions -----------------------------------------------------------------------------------


def gpt2(positions: int) -> Any:
    """With a table of positions, so that one too many is an error of torch."""
    return GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=259, n_positions=positions)
    )


def short(model: Any, positions: int) -> Any:
    """A model that says that it has so many positions."""
    model.config.max_position_embeddings = positions
    return model


def test_positions_are_what_a_model_can_read() -> None:
    assert positions(gpt2(9)) == 9
    assert positions(llama()) == 512
    config = RobertaConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8, max_position_embeddings=14, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    roberta = RobertaForSequenceClassification(config).eval()
    assert positions(roberta) == 12
    roberta(input_ids=torch.full((1, 12), 5))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        roberta(input_ids=torch.full((1, 13), 5))


@pytest.mark.parametrize("what", ["the actor", "reward model", "the critic", "the reference"])
def test_a_model_with_too_few_positions_is_refused(
    what: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """64 are needed; one less would be found out by the first long prompt, or never."""
    for enough, count in ((True, 64), (False, 63)):
        given = brought(tiny_folder)
        sections: dict[str, Any] = {}
        small = short(reward_model(), count)
        folder = saved(tmp_path / str(count), small, byte_tokenizer())
        if what == "the actor":
            given = replace(given, actor=gpt2(count))
            sections = {"critic": {"init": str(tiny_folder)}, "algorithm": {"name": "rloo"}}
            sections["rollout"] = {"samples_per_prompt": 2}
        elif what == "the reference":
            given = replace(given, reference=gpt2(count))
        elif what == "the critic":
            sections = {"critic": {"init": folder}}
        else:
            sections = {"reward": {"sources": (f"model:{folder}",)}}
        if enough:
            assemble(tiny_folder, given, **sections)
        else:
            with raises(ConfigError, "too-few-positions", what, "63 tokens", 64):
                assemble(tiny_folder, given, **sections)


def other_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["the"])
    return tokenizer


def test_a_reward_model_without_room_for_a_response_is_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Of its own tokens a text may take more or less; the shortest prompt alone shows enough."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "eighteen tokens..."}\n{"prompt": "ten tokens"}\n')
    task = {"kind": "dataset", "name": str(rows), "settings": {}, "held_out": 0, "size": 0}
    for count in (10, 11):
        model = short(reward_model(vocabulary=260), count)
        folder = saved(tmp_path / str(count), model, other_tokenizer())
        sections: dict[str, Any] = {"task": task, "reward": {"sources": (f"model:{folder}",)}}
        if count == 11:
            assemble(tiny_folder, **sections)
        else:
            with pytest.raises(ModelError, match=r"10 positions, and of the first 2 .* takes 10"):
                assemble(tiny_folder, **sections)


@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("own", [False, True])
def test_a_text_that_does_not_fit_is_a_failure_and_no_other_row_is_harmed(
    own: bool, slots: int
) -> None:
    tokenizer = other_tokenizer() if own else byte_tokenizer()
    model = short(reward_model(vocabulary=260), 24)
    scorer = RewardModelScorer(
        "model:x", model, tokenizer, byte_tokenizer(), 100, slots=slots, say=pytest.fail
    )
    assert scorer.same_tokenizer is not own
    made = []
    for i, text in enumerate(("it is so", "much too long a text it is", "long")):
        r = byte_rollout(i, "is it cold? ", text)
        made.append(Rollout(i, Prompt(i, r.prompt.tokens, r.prompt.text), i, r.tokens))
        made[-1].finish = FinishReason.STOP
    if slots:
        streamed = stream(scorer, made, 5)
        assert [len(values) for values in streamed] == [1, 0, 1]
        scorer._failures.clear()
    fits, fails, last = scores_of(scorer, made)
    expected = (
        f"'model:x' has 24 positions, and reads rollout 1 with its prompt as {12 + 27} tokens"
    )
    assert fails.failure is not None
    assert fails.failure.startswith(expected)
    assert len(fails.values) == 0
    assert fits.failure is last.failure is None
    alone = RewardModelScorer("model:x", model, tokenizer, byte_tokenizer(), 100)
    (again,) = scores_of(alone, [made[2]])
    assert last.scalar == pytest.approx(again.scalar, rel=1e-5)


def test_a_run_drops_such_a_row_or_ends_with_a_line(tiny_folder: Path, tmp_path: Path) -> None:
    """Of two prompts, one leaves room for the responses."""
    model = short(reward_model(vocabulary=260), 14)
    folder = saved(tmp_path / "reward", model, other_tokenizer())
    settings: dict[str, Any] = {
        "steps": 1,
        "warmup_examples": 0,
        "rollout": {"batch": 4, "max_new_tokens": 4},
        "reward": {"sources": (f"model:{folder}",), "weights": (), "missing_eos": "off"},
        "dataset": [{"prompt": "short"}, {"prompt": "a longer prompt"}],
        "model": str(tiny_folder),
        "observe__progress": "off",
        "out": str(tmp_path / "runs"),
    }
    line = (
        r"14 positions, and reads rollout \d with its prompt as \d+ tokens. Lower rollout__max_new"
    )
    with pytest.raises(RewardError, match=line):
        stretto.train("tiny", **settings)
    result = stretto.train("tiny", **settings, reward__on_failure="drop")
    assert result.stats["rejected"] == 2


# -- ends, types, numbers ------------------------------------------------------------------------


def without_end() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def test_responses_that_nothing_ends_are_not_penalised_for_it(tiny_folder: Path) -> None:
    given = brought(tiny_folder, tokenizer=without_end())
    assert given.actor is not None
    given.actor.generation_config.eos_token_id = None  # type: ignore[union-attr]
    with raises(ConfigError, "nothing-ends-responses", "missing_eos = 'replace'"):
        assemble(tiny_folder, given)
    for sections in ({"reward": {"missing_eos": "off"}}, {"rollout": {"stop": ["\n"]}}):
        assemble(tiny_folder, given, **sections)
    assemble(tiny_folder, replace(given, end_tokens=frozenset({3})))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_types_that_are_not_trained_are_refused(dtype: torch.dtype, tiny_folder: Path) -> None:
    given = brought(tiny_folder)
    assert given.actor is not None
    wrong = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype)
    match = rf"the model has weights of {dtype} \(model.embed_tokens.weight\)"
    with pytest.raises(ModelError, match=match):
        assemble(tiny_folder, replace(given, actor=wrong))
    with pytest.raises(ModelError, match=f"the critic has weights of {dtype}"):
        assemble(tiny_folder, replace(given, critic=reward_model().to(dtype)))


def test_weights_that_are_no_numbers_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    for bad, number in (("model.norm.weight", torch.nan), ("lm_head.weight", torch.inf)):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder)
        with torch.no_grad():
            dict(model.named_parameters(remove_duplicate=False))[bad][-1] = number
        folder = saved(tmp_path / bad, model, byte_tokenizer())
        says = r"weights that are NaN or infinite, in 1 tensors \(model\."
        with pytest.raises(ModelError, match=rf"'{folder}' has {says}"):
            load_causal_lm(Path(folder), torch.float32, torch.device("cpu"))
        with pytest.raises(ModelError, match=rf"the model has {says}"):
            assemble(tiny_folder, replace(brought(tiny_folder), actor=model))
    broken = reward_model()
    broken.score.weight.data[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"NaN or infinite, in 1 tensors \(score.weight is the"):
        load_sequence_classifier(
            saved(tmp_path / "reward", broken, byte_tokenizer()),
            torch.float32,
            torch.device("cpu"),
        )


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    ['"half \\ud83d"', '[{"role": "user", "content": "half \\udc00"}]'],
)
def test_rows_that_are_no_unicode_are_found_when_the_task_is_opened(
    prompt: str, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    whole = '{"prompt": "\\ud83d\\ude00"}\n'  # a pair is a character
    config = Config().task.model_copy(update={"kind": "dataset", "name": str(rows)})
    rows.write_text(whole)
    assert load(config, 0).row(0).prompt == "😀"
    rows.write_text(f'{{"prompt": {prompt}}}\n')
    with raises(TaskError, "invalid-unicode", "row 0, column 'prompt'"):
        load(config, 0)


def test_prompts_that_spell_control_tokens_are_remarked_on(
    tiny_folder: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    task = {"kind": "dataset", "name": str(rows), "settings": {}, "held_out": 0, "size": 0}
    for text, remarks in (("say <eos><bos>", 1), ("say it", 0)):
        rows.write_text(f'{{"prompt": "{text}"}}\n')
        said: list[str] = []
        assemble(tiny_folder, say=said.append, task=task)
        marked = [line for line in said if "spell control tokens (<bos>, <eos>)" in line]
        assert len(marked) == remarks


@pytest.mark.parametrize(
    ("settings", "synced", "level"),
    [
        ({}, True, 2),
        ({}, False, 1),  # as in an evaluation, which decodes again over the same weights
        ({"schedule": {"lag": 1}}, True, 1),
        ({"schedule": {"migrate": "auto"}, "rollout": {"engines": 2}}, True, 1),
        ({"rollout": {"engines": 2}}, True, 2),
    ],
)
def test_an_engine_may_drop_weights_where_a_sync_comes_before_the_next_decode(
    settings: dict[str, Any],
    synced: bool,
    level: int,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = list[EngineSettings]()

    class Spy(TorchEngine):
        @classmethod
        def open(cls, model: Any, settings: EngineSettings) -> Any:
            opened.append(settings)

    monkeypatch.setattr(roles, "engine_of", lambda _: Spy)
    config = Config.model_validate(settings)
    model = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    channel = SharedChannel() if synced else None
    factory = RoleFactory(config, print)
    factory.make_engine(model, byte_tokenizer(), 4, frozenset({0}), channel)
    assert opened[0].sleep_level == level


@pytest.mark.parametrize("own_weights", [False, True])
def test_own_engines_decode_by_the_kernels_that_train(
    own_weights: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with weights of its own, such as vLLM, has kernels of its own too."""
    changed = list[Any]()

    class Spy(TorchEngine):
        @classmethod
        def open(cls, model: Any, settings: EngineSettings) -> Any:
            return None

    able = replace(TorchEngine.capabilities, own_weights=own_weights)
    monkeypatch.setattr(Spy, "capabilities", able)
    monkeypatch.setattr(roles, "engine_of", lambda _: Spy)
    monkeypatch.setattr(Backend, "use_liger_kernel", lambda _, model: changed.append(model))
    model = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    config = Config.model_validate(
        {"model": {"name": str(tiny_folder), "use_liger_kernel": True, "dtype": "float32"}}
    )
    factory = RoleFactory(config, print)
    factory.make_engine(model, byte_tokenizer(), 4, frozenset({0}), SharedChannel())
    assert changed == ([] if own_weights else [model])
