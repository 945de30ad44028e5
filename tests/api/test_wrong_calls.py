"""Wrong calls from Python, as users write them, are answered with the rule and a remedy."""

from __future__ import annotations

from typing import Any

import pytest

import stretto
from raising import raises
from stretto.errors import ConfigError, StrettoError, TaskError

CODE = object()
ROWS = [{"prompt": "2+2=", "answer": "4"}] * 4


@pytest.mark.parametrize(
    ("function", "arguments", "named", "code", "fact"),
    [
        ("train", [{"steps": 3}], {}, "settings-not-named", "by keyword"),
        ("train", ["tiny"], {"algorithm": "grpo"}, "model_type", "algorithm__name='grpo'"),
        ("train", ["tiny"], {"observe__trackers": "wandb"}, "tuple_type", "['wandb']"),
        ("train", ["tiny"], {"algorithm": CODE}, "model_type", "algorithm__name"),
        ("train", ["tiny"], {"algorithm__name": CODE}, "literal_error", "algorithm__name"),
        (
            *("train", ["tiny"], {"schedule__controllers": {"overcommit": CODE}}),
            *("string_type", "schedule__controllers__overcommit"),
        ),
        ("train", ["tiny"], {"observe__trackers": [CODE]}, "literal_error", "observe__trackers"),
        ("measure", ["tiny"], {"win_rate_by": "nothing"}, "unknown-source", "win_rate_by=: "),
        (
            *("label_responses", ["tiny"], {"by": "no.py:f", "out": "x.jsonl"}),
            *("no-reward-file", "by=: 'no.py:f'"),
        ),
        ("train", ["tiny"], {"resume": "x"}, "extra_forbidden", "stretto.resume("),
        ("train", ["tiny"], {"dataset": []}, "no-rows", "dataset holds"),
        ("train", ["tiny"], {"reward": 3}, "reward-not-callable", "got 3"),
        ("train", ["tiny"], {"tokenizer": "gpt2"}, "tokenizer-not-object", "AutoTokenizer"),
        ("train", ["tiny"], {"on_step": 3}, "on-step-not-callable", "got 3"),
        ("train", ["tiny"], {"progress": "no"}, "progress-not-display", "observe__progress='off'"),
        ("sft", [], {"data__name": "nowhere.jsonl"}, "missing-file", "'nowhere.jsonl'"),
        ("evaluate", ["tiny"], {"samples": 0}, "greater_than", "samples=0"),
        ("generate", ["tiny", ["a"]], {"max_tokens": 3}, "unknown-argument", "max_new_tokens="),
        ("generate", ["tiny", ["a"]], {"nothing": 3}, "unknown-argument", "temperature="),
        ("generate", ["tiny", [3]], {}, "prompt-not-text", "got 3"),
        ("simulate", ["nowhere.toml"], {}, "not-a-cluster", "Cluster.read"),
    ],
)
def test_a_wrong_call_is_answered(
    function: str, arguments: list[Any], named: dict[str, Any], code: str, fact: str
) -> None:
    with raises(StrettoError, code, fact) as caught:
        getattr(stretto, function)(*arguments, **named)
    assert isinstance(caught.value, ConfigError | TaskError)


def test_supervised_training_needs_no_recipe() -> None:
    with raises(TaskError, "missing-file", "'nowhere.jsonl'"):
        stretto.train_reward_model(data__name="nowhere.jsonl")
