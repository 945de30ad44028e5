"""Tools and environments that tests run, in each shape that is known, and some that misbehave."""

import asyncio
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: another one
    """
    return a + b


async def greet(name: str) -> dict[str, str]:
    """Greet somebody, after a while.

    Args:
        name: who it is
    """
    await asyncio.sleep(0.01)
    return {"said": f"hello {name}"}


def slow(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "slept"


def block(seconds: float) -> str:
    """Sleep in a coroutine.

    Args:
        seconds: how long
    """
    return _blocking(seconds)  # type: ignore[return-value]


async def _blocking(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def big(characters: int) -> str:
    """Return much.

    Args:
        characters: how much
    """
    return "x" * characters


def raises(why: str) -> str:
    """Raise.

    Args:
        why: the error's text
    """
    raise ValueError(why)


def leave() -> None:
    """Exit."""
    sys.exit(3)


def die() -> None:
    """End the process at once."""
    os._exit(7)


def split() -> str:
    """Fork, with two processes that go on."""
    return "child" if os.fork() == 0 else "parent"


async def split_later() -> str:
    """Fork in a coroutine, with two processes that go on."""
    return "child" if os.fork() == 0 else "parent"


def die_once() -> str:
    """End the process at once, the first time."""
    here = Path(os.environ["DIED"])
    if here.exists():
        return "alive"
    here.touch()
    os._exit(7)


def odd() -> Any:
    """Return what no text can hold."""
    return {"half": "\ud800", "object": SimpleNamespace(a=1), "nan": float("nan")}


def noise() -> bytes:
    """Return bytes that are no text."""
    return b"\xff\xfeok"


def nothing() -> None:
    """Return nothing."""
    print("said to standard output")


CALLS: list[float] = []


def counted(n: int) -> int:
    """Count its calls.

    Args:
        n: any number
    """
    CALLS.append(n)
    time.sleep(0.05)
    return len(CALLS)


counted.deterministic = True  # type: ignore[attr-defined]


class Counter:
    """Counts turns; Stretto's own protocol."""

    deadline_s = 5.0

    def open(self, row: dict[str, Any]) -> str:
        self.total = row["start"]
        return f" from {self.total}"

    async def step(self, turn: Any) -> dict[str, Any]:
        if turn.text == "bad":
            raise ValueError("no number")
        self.total += int(turn.text or 0)
        return {"observation": str(self.total), "reward": 0.5, "done": self.total >= 10}

    def close(self) -> None:
        with Path(os.environ.get("CLOSED", os.devnull)).open("a") as file:
            file.write(f"{self.total}\n")


class Random(Counter):
    """Another answer each time."""

    async def step(self, turn: Any) -> dict[str, Any]:
        return {"observation": str(time.time_ns()), "reward": 0.0, "done": False}


class Sleeper(Counter):
    """Sleeps at a turn."""

    async def step(self, turn: Any) -> dict[str, Any]:
        if turn.text == "sleep":
            await asyncio.sleep(60)
        return await super().step(turn)


class Late(Counter):
    """Takes a while to open."""

    def open(self, row: dict[str, Any]) -> str:
        time.sleep(0.1)
        return super().open(row)


class EndsInReset:
    """Ends its process when it is reset."""

    def reset(self) -> None:
        os._exit(9)

    def step(self, action: str) -> str:
        return "on"


class Stays:
    """Never ends to close."""

    async def open(self, row: dict[str, Any]) -> None:
        pass

    async def step(self, turn: Any) -> str:
        return "on"

    async def close(self) -> None:
        await asyncio.sleep(60)


class Killer(Counter):
    """Ends its process at a turn."""

    async def step(self, turn: Any) -> dict[str, Any]:
        if turn.text == "die":
            os._exit(9)
        return await super().step(turn)


class Vault:
    """TRL's environment: a number that a tool tells, to be said at the end."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.looked = 0

    def reset(self, secret: int, **row: Any) -> str:
        self.secret, self.looked = secret, 0
        return f" There are {secret % 3} locks."

    def look(self, lock: int) -> int:
        """Look behind a lock.

        Args:
            lock: its number
        """
        self.looked += 1
        return self.secret + lock

    async def get_reward(self) -> float:
        return float(self.looked)

    def _hidden(self) -> None:
        raise AssertionError


class Cracked(Vault):
    """A vault without a reward of its own."""

    get_reward = None  # type: ignore[assignment]


def looks(
    prompts: Any, completions: Any, completion_ids: Any, environments: Any, secret: Any, **_: Any
) -> list[float]:
    """Read the state of a vault after its episode, and what was said in it."""
    (vault,), (asked,), (said,) = environments, prompts, completions
    assert isinstance(vault, Vault)
    assert vault.secret == secret[0]
    assert asked[-1]["content"].startswith("go There are")
    return [10.0 * vault.looked + len(said)]


async def by_name(completions: Any, environments: Any, log_extra: Any) -> list[Any]:
    """Score no vaults."""
    log_extra("kind", [type(environments[0]).__name__])
    return [None if isinstance(environments[0], Vault) else 1.0]


class Counts:
    """Number its calls."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, completions: Any, environments: Any) -> list[float]:
        assert isinstance(environments[0], Vault)
        self._calls += 1
        return [float(self._calls)]


def fails(completions: Any, environments: Any) -> list[float]:
    """Raise, never end, end the process, or return nonsense, as a secret says."""
    secret = environments[0].secret
    if secret == 1:
        raise KeyError("no such drawer")
    if secret == 2:
        time.sleep(60)
    if secret == 3:
        os._exit(9)
    return [1.0, 2.0] if secret == 4 else [float(secret)]


class Drawn:
    """TRL's environment whose ``reset`` draws a number, of which no tool tells."""

    def reset(self, **row: Any) -> str:
        self.number = time.time_ns()
        return f" It ends with {self.number % 1000}, in process {os.getpid()}."

    def look(self) -> str:
        """Look."""
        return "it is hidden"


def vault() -> Vault:
    """Make a vault."""
    return Vault()


class Gym:
    """gymnasium's five values."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.goal = int(options["goal"])
        assert seed is not None
        return "guess", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        guess = int(action)
        right = guess == self.goal
        said = "right" if right else ("higher" if guess < self.goal else "lower")
        return said, float(right), right, False, {}


class OldGym:
    """Four values, and an array as observation."""

    def reset(self) -> Any:
        return None

    def step(self, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        import numpy as np

        return np.array([1, 2]), 0.25, action == "end", {}


class Sky:
    """SkyRL-gym's dict."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        self.extras = extras

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": "sky"}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        said = {"role": "user", "content": f"not {action}"}
        done = action == str(self.extras["goal"])
        return {"observations": [] if done else [said], "reward": float(done), "done": done}


class Rlhf:
    """OpenRLHF's states."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        done = states["action_text"] == states["label"]
        return {"rewards": float(done), "environment_feedback": "again", "done": done}


class Result(SimpleNamespace):
    """A result with attributes, as OpenEnv's."""


class Open:
    """OpenEnv's client."""

    async def reset(self, **row: Any) -> Result:
        return Result(observation="ready", reward=None, done=False)

    async def step(self, action: str) -> Result:
        return Result(observation=f"did {action}", reward=0.1, done=action == "end")


class Tink:
    """Tinker's names."""

    async def initial_observation(self) -> str:
        return "begin"

    async def step(self, action: str) -> Result:
        return Result(next_observation="more", reward=1.0, episode_done=action == "end", metrics={})


class Endless:
    """Never done."""

    def reset(self) -> None:
        return None

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "on", 0.0, False, {}


class NoNumber:
    """Rewards with what is no number."""

    def reset(self) -> None:
        return None

    def step(self, action: str) -> Any:
        return "on", float("nan"), False, {}


class TwoValues(NoNumber):
    """Returns too few values."""

    def step(self, action: str) -> Any:
        return "on", 1.0


class Nothing:
    """Returns nothing."""

    def reset(self) -> None:
        return None

    def step(self, action: str) -> None:
        return None


WORLDS = {"vault": Vault, "gym": Gym}


async def program(data: Any, base_url: str, api_key: str) -> float:
    """Hold its own loop."""
    return float(data["n"]) + len(base_url)
