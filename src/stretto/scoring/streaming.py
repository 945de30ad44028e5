"""Rewards by user code that reads responses chunk by chunk during decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import iscoroutine
from typing import Any, Protocol, runtime_checkable

import numpy as np

from stretto import outside
from stretto.config.sections import RewardSource
from stretto.errors import ConfigError
from stretto.plain import is_finite
from stretto.scoring.functions import FunctionScorer
from stretto.types import Chunk, Response, Score, ScorerInfo

SETTING = "reward.sources"


@runtime_checkable
class StreamingReward(Protocol):
    """A user's reward with the methods of :class:`~stretto.protocols.Scorer`, but as plain methods.
    One thread calls them. ``info`` is optional.
    """

    def admit(self, responses: Sequence[Response]) -> None: ...
    def extend(self, chunks: Sequence[Chunk]) -> None: ...
    def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]: ...
    def release(self, rollout_ids: Sequence[int]) -> None: ...


class StreamingScorer:
    """Runs a :class:`StreamingReward` in this process and checks its scores.

    Raises ConfigError if the code cannot be found, lacks methods, raises, or returns no scores.

    Args:
        given: an object or class from the caller of the run. Without it, ``source`` names a class
            or a factory. Both are called with the source's name and the actor's tokenizer.
    """

    in_process = False

    def __init__(self, source: RewardSource, given: Any, tokenizer: Any) -> None:
        self.global_step = 0
        self._code, name = source.model or source.name, source.name
        make = given or outside.load(self._code, SETTING, Callable)
        self._reward = make
        if isinstance(make, type) or not isinstance(make, StreamingReward):
            with outside.raising(self._code, SETTING):
                self._reward = make(name, tokenizer)
            outside.require(self._reward, StreamingReward, f"{SETTING}: the result of '{name}'")
        info = getattr(self._reward, "info", ScorerInfo(name, "reward", reads_text=True))
        outside.require(info, ScorerInfo, f"{SETTING}: info of '{name}'")
        self.info = replace(info, name=name)
        if (info.kind, info.follows) != ("reward", ""):
            raise self._refused("info must have kind='reward' and follows=''", info)

    def admit(self, responses: Sequence[Response]) -> None:
        self._call("admit", responses)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        self._call("extend", chunks)

    def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
        scores = self._call("finish", rollout_ids)
        try:
            if [(s.rollout_id, s.kind) for s in scores] == [(i, "reward") for i in rollout_ids]:
                return [self._checked(score) for score in scores]
        except (AttributeError, TypeError, ValueError):
            pass
        rule = "finish must return a stretto.types.Score of kind 'reward' with at most one number"
        rule += f" for each of the rollouts {list(rollout_ids)}, in order"
        raise self._refused(rule, scores)

    def release(self, rollout_ids: Sequence[int]) -> None:
        self._call("release", rollout_ids)

    def close(self) -> None:
        """Do nothing, because there is no process to end."""

    def _call(self, method: str, argument: Any) -> Any:
        with outside.raising(self._code, SETTING):
            result = getattr(self._reward, method)(argument)
        if iscoroutine(result):
            result.close()  # otherwise Python warns about a missing await
            raise self._refused(f"{method} must be a plain method, not `async def`", result)
        return result

    def _checked(self, score: Score) -> Score:
        values = np.asarray(score.values, np.float64)
        if values.shape not in ((0,), (1,)):
            raise ValueError(score)
        if score.failure is None and not all(map(is_finite, values.tolist())):
            failure = f"'{self.info.name}' gave {values[0]}, which is not finite as float32"
            score, values = replace(score, failure=failure), values[:0]
        return replace(score, source=self.info.name, values=values.astype(np.float32))

    def _refused(self, rule: str, value: object) -> ConfigError:
        return ConfigError(f"{SETTING}: '{self.info.name}': {rule}; got {value!r}", "scorer-answer")


CodeScorer = FunctionScorer | StreamingScorer
"""A scorer of a reward source that is code."""
