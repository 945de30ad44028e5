"""TRL's arguments of generation by vLLM, turned into settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.trl.config import PPOConfig

MODES = ("colocate", "server")
CORRECTIONS = {
    f"{level}_{kind}": (kind, level)
    for level in ("token", "sequence")
    for kind in ("truncate", "mask")
}
"""Values of ``vllm_importance_sampling_mode``: the kind and the level of importance weights."""


def check(args: PPOConfig) -> None:
    """Refuse what cannot be done here.

    Raises:
        ConfigError: an argument has a value that nothing here corresponds to.
    """
    if args.vllm_mode not in MODES:
        raise ConfigError(f"vllm_mode = {args.vllm_mode!r}: must be one of {', '.join(MODES)}")
    mode = args.vllm_importance_sampling_mode
    if mode not in CORRECTIONS:
        raise ConfigError(
            f"vllm_importance_sampling_mode = {mode!r}: must be one of {', '.join(CORRECTIONS)}"
        )
    if args.vllm_tensor_parallel_size < 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size = {args.vllm_tensor_parallel_size}: must be 1 or more"
        )


def settings(args: PPOConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of a run that generates with vLLM, by section; none without it.

    vLLM is started with the run, in a process of its own, whatever ``vllm_mode`` says. With
    ``"colocate"`` it is given the share of the GPU that ``vllm_gpu_memory_utilization`` names.
    """
    if not args.use_vllm:
        return {}
    options: dict[str, Any] = {"model_impl": args.vllm_model_impl}
    if args.vllm_enable_sleep_mode:
        options["enable_sleep_mode"] = True
    if args.vllm_mode == "colocate":
        options["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
    found: dict[str, dict[str, Any]] = {"rollout": {"engine": "vllm", "engine_args": options}}
    if args.vllm_tensor_parallel_size > 1:
        generator = {"roles": ("generator",), "tp": args.vllm_tensor_parallel_size}
        found["cluster"] = {"processes": [generator]}
    if args.vllm_importance_sampling_correction:
        kind, level = CORRECTIONS[args.vllm_importance_sampling_mode]
        found["algorithm"] = {
            "old_policy": "proximal",
            "correction": kind,
            "correction_level": level,
            "correction_cap": args.vllm_importance_sampling_cap,
        }
    return found
