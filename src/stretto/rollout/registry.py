"""The engines that ``rollout.engine`` names; ``tests/contracts`` has what each must do."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.rollout.base import Engine
from stretto.rollout.engine import TorchEngine
from stretto.rollout.vllm.engine import VllmEngine

ENGINES: Mapping[str, type[Engine]] = {"torch": TorchEngine, "vllm": VllmEngine}
