"""What a policy is worth, and what has it cost: win-rates, drift from the SFT model, benchmarks.

A policy answers held-out prompts once; every measure looks at the same responses.
"""

from stretto.evaluation.gold import open_gold
from stretto.evaluation.harness import Benchmark, benchmark
from stretto.evaluation.labels import LabelResult, label_pairs, label_responses
from stretto.evaluation.llm import Judgement, LlmJudge
from stretto.evaluation.measures import Measured, judge, kl_to_sft, measure, win_rate
from stretto.evaluation.rates import WinRate
from stretto.evaluation.sft import KlToSft

__all__ = [
    "Benchmark",
    "Judgement",
    "KlToSft",
    "LabelResult",
    "LlmJudge",
    "Measured",
    "WinRate",
    "benchmark",
    "judge",
    "kl_to_sft",
    "label_pairs",
    "label_responses",
    "measure",
    "open_gold",
    "win_rate",
]
