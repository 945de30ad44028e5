"""How the processes of a run load models that they do not keep as they are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from stretto.models.load import pick_device, pick_dtype
from stretto.runtime.groups.messages import Setting


def loading(setting: Setting) -> Setting:
    """Return the setting by which a process loads models.

    Ranks that divide a model load it on the CPU, in the type that suits their device, and leave it
    in its files until they take their parts. A warm-up changes all of it before that: then each
    rank loads the whole.
    """
    return setting if dist.get_world_size() == 1 else on_host(setting)


def on_host(setting: Setting) -> Setting:
    """Return the setting by which models are loaded on the CPU, and left in their files."""
    m, run = setting.config.model, setting.of_run
    dtype = str(pick_dtype(m.dtype, pick_device(m.device))).removeprefix("torch.")
    return replace(
        setting,
        of_run=run.model_copy(update={"model": run.model.model_copy(update={"dtype": dtype})}),
        given=replace(setting.given, in_files=not run.warmup_examples),
        devices=["cpu"] * len(setting.devices),
    )
