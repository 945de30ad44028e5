"""Part 1: the four models of PPO, who of them is trained, and the memory that they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stretto.config import ModelConfig
from stretto.models.info import measure
from stretto.planner.fitting import TRAINED_ROLES, MemoryPlan, fewest_gpus, memory_plan
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


def plans() -> dict[str, MemoryPlan]:
    """Plan the memory of four models of each of :data:`SCALES`, by the model's name."""
    return {name: memory_plan(measure(ModelConfig(name=name))[0]) for name in SCALES}


def page() -> Iterator[str]:
    """Yield the text of the part."""
    yield heading("1. The four models of PPO")
    found = plans()
    smallest, largest = found[SCALES[0]], found[SCALES[-1]]
    rows = [["role", "trained", "what it does", "16-bit", "mixed"]]
    for role, mixed in smallest.mixed.items():
        each = (str(size // smallest.parameters) for size in (smallest.sixteen_bit[role], mixed))
        rows.append([role, "yes" if role in TRAINED_ROLES else "no", DOES[role], *each])
    yield table(rows, left=3) + "\n"
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
    high = largest.mixed
    learned = sum(size for role, size in high.items() if role in TRAINED_ROLES)
    yield paragraph(
        f"The two trained models take {learned / high.total():.0%} of it in mixed precision. "
        f"{_short(SCALES[0])} needs at least {fewest_gpus(smallest.mixed)} GPUs, "
        f"{_short(SCALES[-1])} {fewest_gpus(high)}."
    )
    yield "\n" + onward("models", f"stretto memory {SCALES[-1]}")


def _sizes(found: Mapping[str, MemoryPlan]) -> list[list[str]]:
    rows = [["four of", "parameters", "counted", "a trained", "a frozen", "all four", "GPUs"]]
    for name, plan in found.items():
        first = [_short(name), f"{plan.parameters / 1e9:.2f} B each"]
        for counted, counting in (("16-bit", plan.sixteen_bit), ("mixed", plan.mixed)):
            sizes = (counting["actor"], counting["reward"], counting.total())
            rows.append([*first, counted, *map(format_size, sizes), f">= {fewest_gpus(counting)}"])
            first = ["", ""]
    return rows


def _short(name: str) -> str:
    return name.rpartition("/")[2]
