"""The service of a generator that is vLLM, in its process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from stretto.assembly.checks import check_engine
from stretto.assembly.controls import most_in_flight
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.forward import text_config, unwrapped
from stretto.models.load import end_token_ids
from stretto.models.resolve import resolve
from stretto.rollout.stop import StopStrings
from stretto.rollout.vllm.engine import VllmEngine
from stretto.rollout.vllm.llm import LlmSettings, open_requests
from stretto.rollout.vllm.source import source_of
from stretto.runtime.kv_transfer import KVStore
from stretto.runtime.messages import Setting, on_host
from stretto.runtime.services import GeneratorService, follow_whole, loaded_actor
from stretto.types import IntArray


def generator(setting: Setting, name: str, probe: IntArray) -> GeneratorService:
    """Make a generator's service.

    The actor is loaded on the CPU, to learn what travels. vLLM makes its own from the config, with
    random weights: the first hand-over brings all of them, as every other does.
    """
    setting.prepare()
    config = setting.config
    check_engine(config, VllmEngine.capabilities)
    model, prompts = loaded_actor(on_host(setting))
    inbox, source = follow_whole(model, setting), source_of(model)
    ends = setting.given.end_tokens
    if ends is None:
        ends = end_token_ids(unwrapped(model), prompts.tokenizer)
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    r = config.rollout
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch:
        requests = open_requests(
            LlmSettings(
                folder=_config_folder(setting, model, Path(scratch)),
                rollout=r,
                dtype=dtype,
                device=device,
                rows=r.slots or most_in_flight(config),
                longest=config.task.max_prompt_tokens + r.max_new_tokens,
                kv_bytes_per_token=kv_bytes_per_token(model, dtype),
                end_tokens=ends,
                threads=setting.threads,
                trust_remote_code=config.model.trust_remote_code,
            )
        )
    engine = VllmEngine(
        requests,
        source,
        r,
        end_tokens=ends,
        seed=config.seed,
        stop=StopStrings(r.stop, prompts.tokenizer) if r.stop else None,
        carry=config.schedule.carry,
        channel=inbox,
    )
    kv_store = KVStore(name, device, dist.get_rank())
    return GeneratorService(engine, engine.prefill_tokens_per_s, inbox, kv_store, probe)


def kv_bytes_per_token(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, by the model's config."""
    config = text_config(model)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * kv_heads * width * dtype.itemsize)


def _config_folder(setting: Setting, model: nn.Module, scratch: Path) -> Path | str:
    """Return a folder with the model's config: its own, or that of a model which is an object."""
    if setting.given.actor is None:
        return resolve(setting.config.model.name, lambda _: None)
    plain = unwrapped(model)
    plain.config.architectures = [type(plain).__name__]
    plain.config.save_pretrained(scratch)
    return scratch
