"""Optimizers: torch's AdamW, and bitsandbytes' with 8-bit moments or paged memory.

All states have the form of torch's AdamW: float32 moments shaped like the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from stretto.config import OptimizerConfig
from stretto.errors import require

MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""AdamW's names of moments, and the suffixes of bitsandbytes' names."""

_CLASSES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
}
_EXEMPT = ("bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of lower-case parameter names without weight decay."""

_BLOCK = 256
"""Elements that share a scale in 8 bits, in all of bitsandbytes' optimizers."""


def make_optimizer(
    parameters: Sequence[nn.Parameter], lr: float, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer of float32 parameters. MissingExtraError without bitsandbytes."""
    groups = [{"params": [*parameters]}]  # only a group accepts an empty list of parameters
    # The trainer applies weight decay, because norms and biases are exempt from it.
    settings: dict[str, Any] = {"lr": lr, "betas": config.betas, "weight_decay": 0.0}
    if config.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, **settings, fused=True)
    require("bitsandbytes", "bitsandbytes", f"training.optim = '{config.optim}'")
    import bitsandbytes

    name = _CLASSES[config.optim]
    if any(p.device.type == "cpu" for p in parameters):
        name = name.removeprefix("Paged")  # all memory is the host's anyway
    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(groups, **settings)
    return optimizer


def decaying_names(model: nn.Module) -> frozenset[str]:
    """Return all parameters except norms and biases, selected like in transformers' Trainer."""
    names = get_parameter_names(model, [nn.LayerNorm], list(_EXEMPT))  # type: ignore[no-untyped-call]
    return frozenset(names)


def optimizer_state(optimizer: Any, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return AdamW's moments and steps, by name of the parameter. Tensors may share memory."""
    (group,) = optimizer.param_groups
    moments = {}
    for name, parameter in zip(names, group["params"], strict=True):
        if entry := optimizer.state.get(parameter):
            moments[name] = dict(entry)
            if not isinstance(optimizer, torch.optim.AdamW):
                moments[name] = {key: _unpacked(entry, end) for key, end in MOMENTS.items()}
                moments[name]["step"] = float(entry["step"])
    return moments


@torch.no_grad()
def load_optimizer_state(optimizer: Any, names: Sequence[str], moments: Mapping[str, Any]) -> None:
    """Restore a state of :func:`optimizer_state`, even one of another kind of optimizer. The
    optimizer keeps its own settings, because those of a run may change.
    """
    (group,) = optimizer.param_groups
    numbers = {i: moments[name] for i, name in enumerate(names) if name in moments}
    if isinstance(optimizer, torch.optim.AdamW):
        settings = {**group, "params": list(range(len(names)))}
        optimizer.load_state_dict({"state": numbers, "param_groups": [settings]})
        return
    for i, entries in numbers.items():
        parameter = group["params"][i]
        optimizer.init_state(group, parameter, 0, i)
        entry = optimizer.state[parameter]
        entry["step"] = int(entries["step"])
        for name, end in MOMENTS.items():
            _pack(entry, end, entries[name])


def _unpacked(entry: Any, end: str) -> torch.Tensor:
    buffer: torch.Tensor = entry[f"state{end}"]
    if buffer.dtype == torch.float32:
        return buffer
    from bitsandbytes.functional import dequantize_blockwise

    scales, code = entry[f"absmax{end}"], entry[f"qmap{end}"]
    moments: torch.Tensor = dequantize_blockwise(buffer, absmax=scales, code=code, blocksize=_BLOCK)
    return moments


def _pack(entry: Any, end: str, moments: torch.Tensor) -> None:
    buffer: torch.Tensor = entry[f"state{end}"]
    moments = moments.to(buffer.device)
    if buffer.dtype != torch.float32:
        from bitsandbytes.functional import quantize_blockwise

        moments, scales = quantize_blockwise(moments, code=entry[f"qmap{end}"], blocksize=_BLOCK)
        entry[f"absmax{end}"].copy_(scales.absmax)
    buffer.copy_(moments)
