"""Measures of a policy on one set of answers to held-out prompts: accuracy, win-rates, drift."""

from stretto.evaluation.gold import WinRate, open_gold
from stretto.evaluation.harness import Benchmark, benchmark
from stretto.evaluation.labels import LabelResult, label_pairs, label_responses
from stretto.evaluation.llm_judge import Judgement, LlmJudge
from stretto.evaluation.measures import (
    EvalResult,
    HeldOut,
    KlToSft,
    Measured,
    evaluate,
    measure,
    open_held_out,
)

__all__ = [
    "Benchmark",
    "EvalResult",
    "HeldOut",
    "Judgement",
    "KlToSft",
    "LabelResult",
    "LlmJudge",
    "Measured",
    "WinRate",
    "benchmark",
    "evaluate",
    "label_pairs",
    "label_responses",
    "measure",
    "open_gold",
    "open_held_out",
]
