"""Part 1: the four models of PPO, which of them are trained, and the memory that they take."""

from __future__ import annotations

from collections.abc import Iterator

from examples.tour import heading, onward, paragraph
from stretto.config import ModelConfig
from stretto.models.info import measure
from stretto.planner.fitting import TRAINED_ROLES, MemoryPlan, fewest_gpus, memory_plan
from stretto.saying import aligned, format_size

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
"""The purpose of each role."""


def plans() -> dict[str, MemoryPlan]:
    """Plan the memory of four models of each of :data:`SCALES`, by the model's name."""
    return {name: memory_plan(measure(ModelConfig(name=name))[0]) for name in SCALES}


def page() -> Iterator[str]:
    """Yield the text of the part."""
    yield heading("1. The four models of PPO")
    found = {name.rpartition("/")[2]: plan for name, plan in plans().items()}
    (small, smallest), *_, (large, largest) = found.items()
    rows = [["role", "trained", "what it does", "16-bit", "mixed"]]
    for role, mixed in smallest.mixed.items():
        each = (str(size // smallest.parameters) for size in (smallest.sixteen_bit[role], mixed))
        rows.append([role, "yes" if role in TRAINED_ROLES else "no", DOES[role], *each])
    yield aligned(rows, left=3) + "\n"
    yield paragraph(
        "Bytes a parameter: 16-bit weights and Adam states without gradients, as systems papers "
        "count; or mixed, as Stretto keeps them: fp32 master weights, gradients and Adam states "
        "of trained models, bfloat16 weights of frozen ones."
    )
    rows = [["four of", "parameters", "counted", "a trained", "a frozen", "all four", "GPUs"]]
    for name, plan in found.items():
        first = [name, f"{plan.parameters / 1e9:.2f} B each"]
        for counted, counting in (("16-bit", plan.sixteen_bit), ("mixed", plan.mixed)):
            sizes = (counting["actor"], counting["reward"], counting.total())
            rows.append([*first, counted, *map(format_size, sizes), f">= {fewest_gpus(counting)}"])
            first = ["", ""]
    yield "\n" + aligned(rows) + "\n"
    most = largest.mixed
    learned = sum(size for role, size in most.items() if role in TRAINED_ROLES)
    yield paragraph(
        "GPUs: of 80 GB, filled by weights, gradients and Adam states alone; activations and the "
        f"KV cache come on top. The two trained models take {learned / most.total():.0%} of it "
        f"in mixed precision. {small} needs at least {fewest_gpus(smallest.mixed)} GPUs, {large} "
        f"{fewest_gpus(most)}."
    )
    yield onward("models", f"stretto memory {SCALES[-1]}")
