"""``stretto reward``: train a reward model on preferences, or let one label pairs."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.cli.sft import supervised
from stretto.config import RewardModelConfig

_DESCRIPTION = (
    "Train a reward model on pairs of responses of which one was preferred (chosen, rejected), "
    "with a prompt of their own or the beginning that both share. What is saved is a "
    "sequence-classification checkpoint, for reward.sources as model:FOLDER. "
    "'stretto reward label' judges pairs instead."
)


def run(arguments: Sequence[str]) -> int:
    """Train, and say where the results are; or hand over to ``stretto label``."""
    if arguments and arguments[0] == "label":
        from stretto.cli import label

        return label.run(arguments[1:])
    return supervised("reward", _DESCRIPTION, arguments, RewardModelConfig)
