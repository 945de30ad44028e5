"""Reward functions that look at environments: called where these live, as an episode ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from stretto.environments.running import CallError, Runner
from stretto.environments.shapes import Episode
from stretto.environments.threads import needs_main_thread
from stretto.errors import RewardError
from stretto.scoring.conventions import (
    ENVIRONMENTS,
    Log,
    Sample,
    TrainerState,
    Verdict,
    convention_of,
    listed,
)


class Judges:
    """TRL's reward functions with the parameter ``environments``, by their reward sources.

    An object is reset for the next episode soon after, so each is called with a batch of one.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], run: Runner) -> None:
        self._functions, self._run = functions, run

    async def scores(self, episode: Episode, samples: Mapping[str, Sample]) -> dict[str, Verdict]:
        own = episode.own
        return {name: await self._score(name, own, sample) for name, sample in samples.items()}

    async def _score(self, name: str, episode: Episode, sample: Sample) -> Verdict:
        function, log = self._functions[name], Log(1)
        signature = inspect.signature(function)
        convention = convention_of(signature, "", name).convention
        arguments: dict[str, Any] = {
            **convention.arguments([sample]),
            "trainer_state": TrainerState(**sample["state"]),
            "log_extra": log.add,
            "log_metric": log.metric,
            ENVIRONMENTS: [episode.environment],
        }
        parameters = signature.parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments = {key: value for key, value in arguments.items() if key in parameters}
        thread = None if needs_main_thread(function) else episode.thread
        try:
            result = await self._run(partial(function, **arguments), thread=thread)
            (entry,) = listed(log.scores(result), 1)
            return log.beside(0, convention.entry(entry))
        except CallError as error:
            episode.sound &= not error.timed_out
            return {"error": error.place}
        except RewardError as error:
            return {"error": str(error)}
