"""Memory of a number of GPUs, for ``stretto memory --gpus``, and remedies if it is too little."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product
from math import ceil

from stretto.config.sections import Gpus
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.planner.hardware import Hardware
from stretto.planner.memory_model import Parts, host_bytes, phases_of, rows_in_flight
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.saying import format_size

RESPONSES = 512  # of a step
PROMPT = 512  # tokens of a prompt
RESPONSE = 512  # tokens of its response
LENGTH = PROMPT + RESPONSE


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of ``stretto memory``.

    Attributes:
        gpus: Number of GPUs. Above 0, estimates the memory of each by phase.
        fsdp: Shards of the learner. If these do not fill the GPUs, roles get separate ones: a copy
            of the scorers, and generators on the rest. 0 takes all GPUs for every role.
        tp: GPUs that each layer is split over, except in scorers that share all GPUs, which are
            sharded over them.
        offload: Idle roles keep moments and frozen weights in the host's memory.
    """

    gpus: Gpus = 0
    fsdp: Gpus = 0
    tp: Gpus = 1
    offload: bool = False
    gpu: str = "h100"

    def layout(self, models: ModelShapes, hardware: Hardware) -> RunLayout:
        """Return the layout of these options. Raises ConfigError if models cannot be divided so."""
        if min(self.gpus, self.tp) < 1 or self.fsdp < 0 or self.gpus % self.tp:
            options = f"`gpus = {self.gpus}`, `fsdp = {self.fsdp}`, `tp = {self.tp}`"
            raise ConfigError(f"{options}: counts are positive, and `tp` divides `gpus`")
        data = self.gpus // self.tp
        learner = Layout(fsdp=self.fsdp or data, tp=self.tp)
        rest = data - self.fsdp - 1
        if learner.fsdp == data:
            generator = Layout(dp=data, tp=self.tp)
            layout = RunLayout(learner, generator, Layout(fsdp=self.gpus), "all", self.offload)
        elif rest > 0:
            generator, scorer = Layout(dp=rest, tp=self.tp), Layout(tp=self.tp)
            layout = RunLayout(learner, generator, scorer, "none", self.offload)
        else:
            raise ConfigError(
                f"`fsdp = {self.fsdp}` with `tp = {self.tp}` on {self.gpus} GPUs leaves none "
                f"for generators and scorers, with {self.tp} for each. Give "
                f"`fsdp = {data}`, where roles share all GPUs, or fewer shards"
            )
        layout.check(models, hardware.links)
        return layout

    def within(self, other: GpuOptions) -> bool:
        return all(a <= b for a, b in zip(astuple(self), astuple(other), strict=True))

    def beyond(self, other: GpuOptions) -> str:
        """Return the options that differ from another's, as command-line flags."""
        return " ".join(
            f"--{name}" if name == "offload" else f"--{name} {getattr(self, name)}"
            for name in ("gpus", "fsdp", "tp", "offload")
            if getattr(self, name) != getattr(other, name)
        )


def memory_table(models: ModelShapes, options: GpuOptions) -> tuple[str, str]:
    """Return a table of a GPU's memory by phase, and the problem if it does not fit."""
    hardware = Hardware.of(options.gpu)
    layout = options.layout(models, hardware)
    phases = phases_of(models, layout, RESPONSES, LENGTH, hardware)
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    fullest, usable = max(totals, key=lambda name: totals[name]), hardware.usable_bytes
    problem = ""
    if totals[fullest] > usable:
        parts = phases[fullest]
        problem = (
            f"{fullest} takes {format_size(round(totals[fullest]))} of each GPU, of which "
            f"{format_size(round(usable))} can be filled; most of it: "
            f"{max(parts, key=lambda part: parts[part])}. {_remedy(models, options, hardware)}"
        )
    return "\n".join(_lines(phases, layout, models, hardware)), problem


def _remedy(models: ModelShapes, options: GpuOptions, hardware: Hardware) -> str:
    current, factors = options, [2**k for k in range(7)]
    variants = [
        replace(current, gpus=n * current.gpus, fsdp=m * current.fsdp, tp=t * current.tp, offload=o)
        for n, m, t, o in product(
            factors, factors if current.fsdp else [1], factors, {current.offload, True}
        )
    ]
    fitting = [variant for variant in variants if _fits(models, variant, hardware)]
    least = [e for e in fitting if not any(o != e and o.within(e) for o in fitting)]
    if not least:
        return (
            f"Neither {variants[-1].gpus:,} GPUs nor `tp` nor `offload` helps: take a smaller model"
        )
    least.sort(key=lambda variant: (variant.beyond(current).count("--"), variant.gpus, variant.tp))
    return f"All phases fit with {', or with '.join(v.beyond(current) for v in least[:3])}"


def _fits(models: ModelShapes, options: GpuOptions, hardware: Hardware) -> bool:
    try:
        layout = options.layout(models, hardware)
    except ConfigError:  # for example, --tp that does not divide the heads
        return False
    phases = phases_of(models, layout, RESPONSES, LENGTH, hardware).values()
    return all(sum(parts.values()) <= hardware.usable_bytes for parts in phases)


def _lines(
    phases: dict[str, Parts], layout: RunLayout, models: ModelShapes, hardware: Hardware
) -> list[str]:
    usable, gpu_size = hardware.usable_bytes, format_size(round(hardware.gpu.memory_bytes))
    roles = ", ".join(f"{role} {of_role}" for role, of_role in layout.layouts.items())
    lines = [
        f"Memory of each of {layout.gpus} GPUs, on paper; {format_size(round(usable))} of "
        f"{gpu_size} can be filled",
        f"  {roles}, {'all on the same GPUs' if layout.colocated else 'apart'}",
    ]
    for name, parts in phases.items():
        sizes = sorted(parts.items(), key=lambda item: -item[1])
        breakdown = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in sizes)
        lines.append(f"  {name:<11} {sum(parts.values()) / 1e9:>7.1f} GB   {breakdown}")
    if layout.offload:
        lines.append(f"  {'host':<11} {host_bytes(models, layout) / 1e9:>7.1f} GB   for each GPU")
    rows, goes = rows_in_flight(models, layout, RESPONSES, LENGTH, hardware)
    if goes > 1 and sum(phases["generation"].values()) <= usable:
        share = ceil(RESPONSES / layout.generator.dp)
        lines.append(
            f"  A generator decodes {rows} of its {share} responses at a time, in {goes} goes: "
            "there is no room for keys and values of more."
        )
    lines.append(
        f"  A step of {RESPONSES} responses of {PROMPT} + {RESPONSE} tokens; micro-batches of "
        f"{layout.micro_tokens} tokens, layers recomputed."
    )
    return lines
