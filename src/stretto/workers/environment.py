"""Which variables of the driver's environment go along to ranks on other machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from stretto.errors import ConfigError

PATTERNS = (
    "NCCL_*",
    "GLOO_*",
    "TORCH_*",
    "PYTORCH_*",
    "OMP_*",
    "MKL_*",
    "GOMP_*",
    "HF_*",
    "TRANSFORMERS_*",
    "TOKENIZERS_*",
    "WANDB_*",
    "VLLM_*",
    "CUDA_*",
    "STRETTO_*",
)
"""Names of variables that are forwarded. All others stay: most belong to this machine."""

_PLACED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables by which each rank is told its GPU; the driver's would put all of them on one."""
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH)S?(_|$)")
_LOGIN = re.compile(r"://[^/]*@")


def forwarded(environment: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """Choose what is forwarded.

    Args:
        also: more names, or patterns such as ``MY_*``.

    Raises:
        ConfigError: a variable that decides about GPUs is asked for.
    """
    also = tuple(also)
    if asked := set(_PLACED).intersection(also):
        raise ConfigError(
            f"'{min(asked)}' cannot be forwarded: each rank gets the GPU of its place, and the "
            "driver's would put all of them on one; leave it out"
        )
    return {
        name: value
        for name, value in sorted(environment.items())
        if name not in _PLACED and any(fnmatchcase(name, p) for p in (*PATTERNS, *also))
    }


def described(variables: Mapping[str, str]) -> str:
    """Say in a line what is forwarded; values only of the usual names, and never a secret's."""
    told = ", ".join(
        f"{name}={value}" if _may_be_shown(name, value) else name
        for name, value in variables.items()
    )
    return f"environment of the ranks: {told}" if told else "environment of the ranks: nothing"


def _may_be_shown(name: str, value: str) -> bool:
    usual = any(fnmatchcase(name, pattern) for pattern in PATTERNS)
    return usual and not _SECRET.search(name.upper()) and not _LOGIN.search(value)
