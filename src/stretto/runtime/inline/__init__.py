"""Real models in this process."""

from stretto.runtime.inline.infer import generate
from stretto.runtime.inline.train import TrainResult, train

__all__ = ["TrainResult", "generate", "train"]
