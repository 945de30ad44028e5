"""Real models in this process."""

from stretto.runtime.inline.infer import EvalResult, evaluate, generate
from stretto.runtime.inline.train import TrainResult, train

__all__ = ["EvalResult", "TrainResult", "evaluate", "generate", "train"]
