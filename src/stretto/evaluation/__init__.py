"""Measures of a policy: right answers, win-rates, drift from the SFT model.

A policy answers held-out prompts once; every measure looks at the same responses.
"""

from stretto.evaluation.gold import open_gold
from stretto.evaluation.harness import Benchmark, benchmark
from stretto.evaluation.kl import KlToSft
from stretto.evaluation.labels import LabelResult, label_pairs, label_responses
from stretto.evaluation.llm import Judgement, LlmJudge
from stretto.evaluation.measures import Measured, judge, kl_to_sft, measure, win_rate
from stretto.evaluation.rates import WinRate
from stretto.evaluation.verified import EvalResult, evaluate

__all__ = [
    "Benchmark",
    "EvalResult",
    "Judgement",
    "KlToSft",
    "LabelResult",
    "LlmJudge",
    "Measured",
    "WinRate",
    "benchmark",
    "evaluate",
    "judge",
    "kl_to_sft",
    "label_pairs",
    "label_responses",
    "measure",
    "open_gold",
    "win_rate",
]
