"""Measures of a policy on one set of answers to held-out prompts: accuracy, win-rates, drift."""

from stretto.evaluation.gold import WinRate as WinRate
from stretto.evaluation.harness import Benchmark as Benchmark
from stretto.evaluation.harness import benchmark as benchmark
from stretto.evaluation.labels import LabelResult as LabelResult
from stretto.evaluation.labels import label_pairs as label_pairs
from stretto.evaluation.labels import label_responses as label_responses
from stretto.evaluation.llm_judge import Judgement as Judgement
from stretto.evaluation.llm_judge import LlmJudge as LlmJudge
from stretto.evaluation.measures import EvalResult as EvalResult
from stretto.evaluation.measures import HeldOut as HeldOut
from stretto.evaluation.measures import KlToSft as KlToSft
from stretto.evaluation.measures import Measured as Measured
from stretto.evaluation.measures import evaluate as evaluate
from stretto.evaluation.measures import measure as measure
from stretto.evaluation.measures import open_held_out as open_held_out
