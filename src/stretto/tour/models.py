"""Part 1: the four models of PPO, who of them is trained, and the memory that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stretto.config import ModelConfig
from stretto.models.info import measure
from stretto.planner.fitting import TRAINED_ROLES, MemoryPlan, memory_plan
from stretto.saying import format_size
from stretto.tour.page import heading, onward, paragraph, table

SCALES = (
    "huggyllama/llama-7b",
    "huggyllama/llama-13b",
    "huggyllama/llama-30b",
    "meta-llama/Llama-3.1-70B",
)
"""Models whose shapes are known without fetching anything, small to large."""

DOES = {
    "actor": "answers: y ~ pi(.|x); learns by the policy loss",
    "critic": "values each state, V(s_t); learns by the value loss",
    "reference": "the actor as it was, pi_ref; holds it back, by the KL",
    "reward": "scores prompt and response, r(x, y)",
}
"""What each role is for."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A model's name, and the plan of four models of its size."""

    name: str
    plan: MemoryPlan


def scales() -> list[Scale]:
    """Count the parameters of :data:`SCALES` and plan their memory."""
    found = []
    for name in SCALES:
        parameters, _ = measure(ModelConfig(name=name))
        found.append(Scale(name, memory_plan(parameters)))
    return found


def page() -> Iterator[str]:
    """Yield the text of the part."""
    yield heading("1. The four models of PPO")
    found = scales()
    yield table(_roles(found[0].plan), left=3) + "\n"
    yield paragraph(
        "Bytes a parameter are counted in two ways. 16-bit: weights and Adam states at 16 bits, no "
        "gradients kept, as systems papers count. Mixed: fp32 master weights, gradients and Adam "
        "states of what is trained, frozen weights in bfloat16, which is what Stretto keeps."
    )
    yield "\n" + table(_sizes(found)) + "\n"
    yield paragraph(
        "Four models of one size. GPUs are those of 80 GB that weights, gradients and Adam states "
        "fill by themselves; activations and the cache of keys and values come on top."
    )
    smallest, largest = found[0], found[-1]
    low, high = smallest.plan.mixed, largest.plan.mixed
    trained = sum(r.total_bytes for r in high.roles if r.role in TRAINED_ROLES)
    yield paragraph(
        f"The two trained models take {trained / high.total_bytes:.0%} of it in mixed precision. "
        f"{_short(smallest.name)} needs at least {low.gpus()} GPUs, "
        f"{_short(largest.name)} {high.gpus()}."
    )
    yield "\n" + onward("models", f"stretto memory {largest.name}")


def _roles(plan: MemoryPlan) -> list[list[str]]:
    rows = [["role", "trained", "what it does", "16-bit", "mixed"]]
    for low, mixed in zip(plan.sixteen_bit.roles, plan.mixed.roles, strict=True):
        each = (str(role.total_bytes // plan.parameters) for role in (low, mixed))
        trained = "yes" if mixed.role in TRAINED_ROLES else "no"
        rows.append([mixed.role, trained, DOES[mixed.role], *each])
    return rows


def _sizes(found: list[Scale]) -> list[list[str]]:
    rows = [["four of", "parameters", "counted", "a trained", "a frozen", "all four", "GPUs"]]
    for scale in found:
        plan = scale.plan
        first = [_short(scale.name), f"{plan.parameters / 1e9:.2f} B each"]
        for name, counting in (("16-bit", plan.sixteen_bit), ("mixed", plan.mixed)):
            actor, reward = counting.roles[0], counting.roles[-1]
            sizes = (actor.total_bytes, reward.total_bytes, counting.total_bytes)
            rows.append([*first, name, *map(format_size, sizes), f">= {counting.gpus()}"])
            first = ["", ""]
    return rows


def _short(name: str) -> str:
    return name.rpartition("/")[2]
