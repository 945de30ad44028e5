"""A probe of the engine: log-probs of given tokens by its own decode steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from stretto.config import RolloutConfig
from stretto.models.cached import SlotCache
from stretto.models.packed import PackedLinears
from stretto.rollout.step import ModelPass
from stretto.types import FloatArray, IntArray


class Probe:
    """Fixed token sequences, read by the decode steps of an engine, with the model as it is then.

    Args:
        packed: its layers as the engine decodes with them.
        sequences: token ids [n, t]; all but the first of each are looked at.
    """

    def __init__(
        self, model: nn.Module, packed: PackedLinears, config: RolloutConfig, sequences: IntArray
    ) -> None:
        self.sequences = sequences
        self._packed, self._temperature = packed, config.temperature
        self.cache = SlotCache(len(sequences))
        self._pass = ModelPass(model, self.cache, config)
        self.cache.reserve(sequences.shape[1])
        self._ids = torch.from_numpy(sequences.astype(np.int64)).to(self._pass.device)

    @torch.inference_mode()
    def logprobs(self) -> FloatArray:
        """Return the log-probs [n, t - 1], under the distribution that the engine samples from."""
        ids, found = self._ids, []
        with self._packed:
            for at in range(ids.shape[1] - 1):
                positions = torch.full_like(ids[:, at], at)
                logits = self._pass.next_logits(ids[:, at], positions, at + 1)
                logprobs = (logits.float() / self._temperature).log_softmax(-1)
                found.append(logprobs.gather(1, ids[:, at + 1, None])[:, 0])
        together: FloatArray = torch.stack(found, 1).cpu().numpy()
        return together
