"""Memory of the four models of PPO, in the two ways people count it.

Both count weights, gradients and optimizer states only; activations, the KV cache and buffers come
on top. ``P`` stands for the parameters of one model; all four are taken to be of one size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.config import Config, ModelConfig
from stretto.errors import ConfigError, ModelError
from stretto.machine import usable_gpus

Role = Literal["actor", "critic", "reference", "reward", "model"]
"""Models of a run; ``model`` is the only one in supervised training."""
ROLES: tuple[Role, ...] = ("actor", "critic", "reference", "reward")
TRAINED_ROLES: frozenset[Role] = frozenset({"actor", "critic", "model"})

GPU_BYTES = 80 * 10**9
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Memory of one model, in bytes.

    Attributes:
        weights_bytes: parameters, with adapters where there are any.
        gradients_bytes: of the trained parameters.
        adam_bytes: both moments of the trained parameters.
    """

    role: Role
    weights_bytes: int
    gradients_bytes: int
    adam_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the model."""
        return self.weights_bytes + self.gradients_bytes + self.adam_bytes


@dataclass(frozen=True, slots=True)
class Counting:
    """The plan under one way of counting."""

    roles: tuple[RoleMemory, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all models."""
        return sum(role.total_bytes for role in self.roles)

    def gpus(self, gpu_bytes: int = GPU_BYTES) -> int:
        """Fewest GPUs whose memory together holds all models."""
        return math.ceil(self.total_bytes / gpu_bytes)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of actor, critic, reference and reward model.

    Attributes:
        parameters: P, of each model.
        trained: trained parameters of actor and critic each; P unless LoRA is on.
        sixteen_bit: everything at 16 bits and no gradients kept, as systems papers count:
            weights 2P, Adam 4P, so 6P a trained model, 2P a frozen one, 16P in all.
        mixed: mixed precision, what Stretto's learner keeps: fp32 master weights, gradients and
            Adam moments (16 bytes a trained parameter), frozen weights at the compute type's width.
    """

    parameters: int
    trained: int
    sixteen_bit: Counting
    mixed: Counting


def memory_plan(
    parameters: int,
    *,
    trained: int | None = None,
    roles: Sequence[Role] = ROLES,
    frozen_bytes: int = 2,
    reward: int | None = None,
) -> MemoryPlan:
    """Count the memory of a run.

    Args:
        parameters: P, of each model.
        trained: trained parameters of actor and critic each, where these are adapters added to
            frozen weights (LoRA); ``None`` trains all P.
        frozen_bytes: bytes of a frozen weight in the mixed counting: 2 (bf16) or 4 (fp32).
        reward: parameters of the reward models, all together, where they are not P.

    Raises:
        ConfigError: a count below 1.
    """
    for count in (parameters, trained, reward):
        if count is not None and count < 1:
            raise ConfigError(f"a number of parameters is 1 or more; got {count}")
    frozen, learned = (0, parameters) if trained is None else (parameters, trained)

    def of(role: Role, width: int, master: int, gradient: int, adam: int) -> RoleMemory:
        if role not in TRAINED_ROLES:
            own = reward if role == "reward" and reward else parameters
            return RoleMemory(role, width * own, 0, 0)
        weights = width * frozen + master * learned
        return RoleMemory(role, weights, gradient * learned, adam * learned)

    return MemoryPlan(
        parameters=parameters,
        trained=learned,
        sixteen_bit=Counting(tuple(of(r, 2, 2, 0, 4) for r in roles)),
        mixed=Counting(tuple(of(r, frozen_bytes, 4, 4, 8) for r in roles)),
    )


def plan_for(config: Config) -> MemoryPlan:
    """The plan of a run: with the models that it has, its adapters and its compute type.

    Raises:
        ModelError: the actor's architecture cannot be read.
    """
    parameters, trained = measure(config.model)
    roles: list[Role] = ["actor"]
    if config.algorithm.definition.critic:
        roles.append("critic")
    if (
        config.algorithm.has_reference and not config.model.lora_rank
    ):  # else the actor, adapters off
        roles.append("reference")
    sources = config.reward.sources
    rewards = [s.removeprefix("model:") for s in sources if s.startswith("model:")]
    if rewards:
        roles.append("reward")
    return memory_plan(
        parameters,
        trained=trained,
        roles=roles,
        frozen_bytes=width(config.model),
        reward=sum(_size_of_reward_model(n, parameters) for n in rewards) or None,
    )


def _size_of_reward_model(name: str, otherwise: int) -> int:
    try:
        return described(name).parameters
    except ModelError:
        return otherwise


def plan_for_one(config: ModelConfig) -> MemoryPlan:
    """The plan of supervised training: one model, with its adapters and its compute type.

    Raises:
        ModelError: the architecture cannot be read.
    """
    parameters, trained = measure(config)
    return memory_plan(parameters, trained=trained, roles=["model"], frozen_bytes=width(config))


def width(config: ModelConfig) -> int:
    """Bytes of a weight in the compute type; where that is to be measured, the wider one's."""
    on_gpu = config.device != "cpu" and usable_gpus() > 0
    return 2 if config.dtype == "bfloat16" or (config.dtype == "auto" and on_gpu) else 4


def parse_parameters(text: str) -> int | None:
    """Read '7B', '135M', '1.5b' or '7_000_000_000' as a count; ``None`` if it is no number."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    return round(float(match[1]) * _UNITS[match[2].upper()])


def format_plan(plan: MemoryPlan) -> str:
    """The plan as a table, both countings side by side, with what each of them means."""
    parameters, trained = format_count(plan.parameters), f"{format_count(plan.trained)} trained"
    if plan.trained == plan.parameters:
        trained = "all trained"
    learned = " and ".join(r.role for r in plan.mixed.roles if r.role in TRAINED_ROLES)
    where = "" if learned == "model" else f" in {learned}"
    lines = [
        f"Memory for weights, gradients and Adam states; {parameters} parameters a model "
        f"({trained}{where})",
        f"  {'model':<10} {'16-bit':>10}   {'mixed precision':>15}",
    ]
    pairs = zip(plan.sixteen_bit.roles, plan.mixed.roles, strict=True)
    for low, mixed in pairs:
        sixteen, own = format_size(low.total_bytes), format_size(mixed.total_bytes)
        lines.append(f"  {low.role:<10} {sixteen:>10}   {own:>15}")
    low_total, mixed_total = plan.sixteen_bit.total_bytes, plan.mixed.total_bytes
    lines += [
        f"  {'total':<10} {format_size(low_total):>10}   {format_size(mixed_total):>15}",
        f"  {'80 GB GPUs':<10} {f'>= {plan.sixteen_bit.gpus()}':>10}   "
        f"{f'>= {plan.mixed.gpus()}':>15}",
        "  16-bit: weights 2 bytes and Adam 4 bytes a parameter, as systems papers count.",
        "  mixed precision: fp32 master weights, gradients and Adam states, 16 bytes a trained "
        "parameter. This is what Stretto uses.",
        "  On top come activations, the KV cache, and the 2 bytes of a trained weight's bfloat16 "
        "copy, where that is computed with.",
    ]
    return "\n".join(lines)
