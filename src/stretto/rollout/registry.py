"""The engines that ``rollout.engine`` names; ``tests/contracts`` has what each must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from stretto.rollout.base import Engine, EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.vllm.engine import VllmEngine, open_engine
from stretto.rollout.vllm.llm import check_version
from stretto.types import Capabilities


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that can be chosen.

    Attributes:
        open: makes one over a model.
        check: raises ``MissingExtraError`` where its library is not installed, and ``ConfigError``
            where that is too old.
        own_weights: whether it has weights of its own, all of which the first weight sync brings.
            The model then stays on the CPU, and says what travels.
    """

    capabilities: Capabilities
    open: Callable[[nn.Module, EngineSettings], Engine]
    check: Callable[[], None] = lambda: None
    own_weights: bool = False


ENGINES: Mapping[str, EngineKind] = {
    "torch": EngineKind(TorchEngine.capabilities, TorchEngine),
    "vllm": EngineKind(VllmEngine.capabilities, open_engine, check_version, own_weights=True),
}
