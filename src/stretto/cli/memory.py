"""``stretto memory``: what the four models of PPO take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from math import ceil
from typing import Annotated

import tyro

from stretto.config import ModelConfig
from stretto.errors import ConfigError
from stretto.models.info import described, measure
from stretto.models.shapes import LLAMAS, Shape
from stretto.planner.fitting import format_plan, memory_plan
from stretto.planner.hardware import Hardware
from stretto.planner.layout import Layout, Mesh, Models, Workload
from stretto.planner.memory import Parts, host_bytes, phases_of, rows_in_flight
from stretto.saying import format_size


def run(arguments: Sequence[str]) -> int:
    """Print the memory plan."""
    tyro.cli(_plan, prog="stretto memory", args=list(arguments))
    return 0


def _plan(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL_OR_PARAMETERS")],
    /,
    lora_rank: int = 0,
    lora_targets: tuple[str, ...] = ("all-linear",),
    gpus: int = 0,
    fsdp: int = 0,
    tp: int = 1,
    gpu: str = "h100",
    offload: bool = False,
) -> None:
    """Plan the memory of actor, critic, reference and reward model, all of one size.

    Args:
        model: A number of parameters (7B, 135M), or a model's name or folder.
        lora_rank: Rank of LoRA adapters for actor and critic; 0 trains all weights.
        lora_targets: Modules that get adapters; 'all-linear' takes all but the head.
        gpus: Number of GPUs; above 0, each one's memory is planned, phase by phase and on paper.
        fsdp: Shards of the learner. Where these do not fill the GPUs, roles are apart: a copy of
            the scorers, and generators on the rest. 0 takes all GPUs for every role.
        tp: GPUs that each layer is split over, in every role.
        offload: Roles that are not at work keep their states in the host's memory.
    """
    if lora_rank < 0:
        raise ConfigError(f"--lora-rank {lora_rank}: must be 0 or more")
    if gpus:
        if lora_rank:
            raise ConfigError(
                f"--lora-rank {lora_rank}: on GPUs, all weights are trained; leave it out"
            )
        print(_on_gpus(model, _Wanted(gpus, fsdp, tp, gpu, offload)))
        return
    if fsdp or tp != 1 or offload:
        raise ConfigError(
            "--fsdp, --tp and --offload need to know how many GPUs there are: add --gpus"
        )
    parameters = parse_parameters(model)
    trained = None
    if parameters is None:
        chosen = ModelConfig(name=model, lora_rank=lora_rank, lora_targets=lora_targets)
        parameters, trained = measure(chosen)
    elif lora_rank:
        raise ConfigError(
            f"--lora-rank {lora_rank} needs the shapes of a model's layers, which '{model}' does "
            "not tell; name a model instead"
        )
    print(format_plan(memory_plan(parameters, trained=trained)))


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The options on GPUs."""

    gpus: int
    fsdp: int
    tp: int
    gpu: str
    offload: bool

    def layout(self) -> Layout:
        """The layout that they describe."""
        if min(self.gpus, self.tp) < 1 or self.fsdp < 0 or self.gpus % self.tp:
            raise ConfigError(
                f"--gpus {self.gpus} --fsdp {self.fsdp} --tp {self.tp}: counts are positive, and "
                "--tp divides --gpus"
            )
        everywhere = Mesh(self.gpus // self.tp, self.tp)
        if self.fsdp in (0, everywhere.data):
            return Layout(everywhere, everywhere, everywhere, "all", self.offload)
        rest = everywhere.data - self.fsdp - 1
        if rest < 1:
            raise ConfigError(
                f"--fsdp {self.fsdp} with --tp {self.tp} on {self.gpus} GPUs: that leaves none for "
                f"generators and scorers, with {self.tp} for each. Give --fsdp {everywhere.data}, "
                "where roles share all GPUs, or fewer shards"
            )
        learner, generator = Mesh(self.fsdp, self.tp), Mesh(rest, self.tp)
        return Layout(learner, generator, Mesh(1, self.tp), "none", self.offload)

    def within(self, other: _Wanted) -> bool:
        """Return whether no option asks for more than another's."""
        return all(a <= b for a, b in zip(astuple(self), astuple(other), strict=True))

    def beyond(self, other: _Wanted) -> str:
        """Return the options that differ from another's, as they are written."""
        return " ".join(
            f"--{name}" if name == "offload" else f"--{name} {getattr(self, name)}"
            for name in ("gpus", "fsdp", "tp", "offload")
            if getattr(self, name) != getattr(other, name)
        )


def _on_gpus(model: str, wanted: _Wanted) -> str:
    """The memory of a GPU in each phase.

    Raises:
        ConfigError: a phase takes more than there is.
    """
    hardware, models = Hardware.of(wanted.gpu), Models.of_one_size(_shape(model))
    layout = wanted.layout()
    layout.check(models, hardware.links)
    phases = phases_of(models, layout, Workload(), hardware)
    text = _format(phases, layout, models, hardware)
    name = max(phases, key=lambda name: sum(phases[name].values()))
    parts = phases[name]
    if sum(parts.values()) > hardware.usable_bytes:
        print(text)
        raise ConfigError(
            f"{name} takes {format_size(round(sum(parts.values())))} of each GPU, of which "
            f"{format_size(round(hardware.usable_bytes))} can be filled; most of it: "
            f"{max(parts, key=lambda part: parts[part])}. {_remedy(models, wanted, hardware)}"
        )
    return text


def _remedy(models: Models, wanted: _Wanted, hardware: Hardware) -> str:
    """Say with which options all phases fit, the nearest to those that were given."""
    doubled = [2**k for k in range(7)]
    every = [
        replace(wanted, gpus=n * wanted.gpus, fsdp=m * wanted.fsdp, tp=t * wanted.tp, offload=o)
        for n, m, t, o in product(
            doubled, doubled if wanted.fsdp else [1], doubled, {wanted.offload, True}
        )
    ]
    fitting = [each for each in every if _fits(models, each, hardware)]
    least = [e for e in fitting if not any(o != e and o.within(e) for o in fitting)]
    if not least:
        return f"Neither {every[-1].gpus:,} GPUs nor --tp nor --offload helps: take a smaller model"
    least.sort(key=lambda each: (each.beyond(wanted).count("--"), each.gpus, each.tp))
    return f"All phases fit with {', or with '.join(each.beyond(wanted) for each in least[:3])}"


def _fits(models: Models, wanted: _Wanted, hardware: Hardware) -> bool:
    try:
        layout = wanted.layout()
        layout.check(models, hardware.links)
    except ConfigError:  # such as --tp that does not divide the heads
        return False
    phases = phases_of(models, layout, Workload(), hardware).values()
    return all(sum(parts.values()) <= hardware.usable_bytes for parts in phases)


def parse_parameters(text: str) -> int | None:
    """Read '7B', '135M', '1.5b' or '7_000_000_000' as a count; ``None`` if it is no number."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    return round(float(match[1]) * _UNITS[match[2].upper()])


def _shape(model: str) -> Shape:
    if model.upper() in LLAMAS:
        return LLAMAS[model.upper()]
    if parse_parameters(model) is not None:
        raise ConfigError(
            f"'{model}' does not tell the sizes of a model's layers, which a GPU's memory depends "
            f"on; give a model's name, or one of {', '.join(LLAMAS)} (Llama)"
        )
    return described(model).shape


def _format(phases: Mapping[str, Parts], layout: Layout, models: Models, hardware: Hardware) -> str:
    load, usable = Workload(), hardware.usable_bytes
    roles = (
        ("learner", layout.learner),
        ("generators", layout.generator),
        ("scorers", layout.scorer),
    )
    where = "all on the same GPUs" if layout.colocated else "apart"
    lines = [
        f"Memory of each of {layout.gpus} GPUs, on paper; {format_size(round(usable))} of "
        f"{format_size(round(hardware.gpu.memory_bytes))} can be filled",
        f"  {', '.join(f'{name} {mesh.data}x{mesh.tensor}' for name, mesh in roles)}, {where}",
    ]
    for name, parts in phases.items():
        sizes = sorted(parts.items(), key=lambda item: -item[1])
        held = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in sizes)
        lines.append(f"  {name:<10} {sum(parts.values()) / 1e9:>7.1f} GB   {held}")
    if layout.offload:
        on_host = host_bytes(models, layout)
        lines.append(f"  {'host':<10} {on_host / 1e9:>7.1f} GB   for each GPU")
    rows, goes = rows_in_flight(models, layout, load, hardware)
    if goes > 1 and sum(phases["generation"].values()) <= usable:
        share = ceil(load.responses / layout.generator.data)
        lines.append(
            f"  A generator decodes {rows} of its {share} responses at a time, in {goes} goes: "
            "there is no room for keys and values of more."
        )
    lines.append(
        f"  A step of {load.responses} responses of {load.prompt_tokens} + {load.response_tokens} "
        f"tokens; micro-batches of {layout.micro_tokens} tokens, layers recomputed."
    )
    return "\n".join(lines)
