"""An engine over vLLM. A rollout is a request, and a call runs a number of vLLM's iterations.

Nothing runs between calls, so weight syncs and migrations always fall between iterations. Tokens
are read in the iteration that samples them, so that aborting a request loses none. A rollout
continues, here or in another engine, as a new request whose prompt has all its tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.config.capabilities import ENGINES
from stretto.errors import EngineError, RankError
from stretto.models.forward import text_config
from stretto.models.lora import trained_names
from stretto.models.mapped import final
from stretto.models.shards import TensorPart
from stretto.models.weights import (
    RunningFingerprint,
    copy_into,
    fingerprint_of,
    require_fingerprint,
)
from stretto.rollout.base import Engine, EngineSettings, Row
from stretto.rollout.sampling import stream_seed
from stretto.rollout.vllm.llm import LlmRequests, Output, check_version, open_requests
from stretto.types import (
    Chunk,
    FloatArray,
    Hold,
    IntArray,
    KVTransfer,
    Response,
    TopLogprobs,
    WeightsRef,
)
from stretto.weights.channel import fetched

Memory = Literal["weights", "kv_cache"]

UNKNOWN_TO_VLLM = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_qalora",
    "use_bdlora",
)  # fmt: skip
"""Features of peft's adapters that vLLM refuses."""

MOST_RANK = 512
"""Maximum rank of adapters in vLLM."""

SEEDS = 1 << 63
"""Seeds must be below this number, a limit of vLLM's libraries."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRow(Row):
    """A rollout that is decoded as a request.

    Attributes:
        salt: cache salt of its request. See :meth:`VllmEngine.load`.
        request: name of its request, or "" if it has none.
        unread: tokens in the request's prompt that are not yet counted as prefilled.
    """

    salt: str
    request: str = ""
    unread: int = 0


class VllmEngine(Engine):
    """An engine that generates with vLLM in this process, with a separate copy of the weights.

    Sampling is seeded by run, rollout and position. The same seed may still give other tokens in
    another batch, because the order of sums in kernels depends on the batch. Migration loses the
    KV cache. Carried and parked rollouts find theirs in the prefix cache unless evicted.
    """

    capabilities = ENGINES["vllm"]
    check = staticmethod(check_version)
    _held: dict[int, RequestRow]
    _parked: dict[int, RequestRow]

    def __init__(self, requests: LlmRequests, source: Source, settings: EngineSettings) -> None:
        super().__init__(settings, requests.longest)
        self._requests, self._source = requests, source
        self._by_request: dict[str, RequestRow] = {}
        self._named = self._loads = 0
        self._resting: tuple[Memory, ...] = ()
        # If vLLM holds adapters separately, the base weights are sent only once and must survive.
        self._level: Literal[1, 2] = 1 if source.adapters else settings.sleep_level

    @classmethod
    def open(cls, model: nn.Module, settings: EngineSettings) -> Engine:
        config = text_config(model)
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        token_bytes = int(2 * config.num_hidden_layers * kv_heads * width * settings.dtype.itemsize)
        source = source_of(model)
        return cls(open_requests(settings, token_bytes, source.lora_rank), source, settings)

    def load(self, weights: WeightsRef) -> None:
        """Load new weights and start a new cache salt.

        The salt is part of the key of every cached block, so that requests do not find blocks of
        older weights. Rows with a carried KV cache keep their salt.
        """
        rows = sorted(self._held.values(), key=lambda row: row.id)
        self._withdraw(rows)
        self._held = {row.id: row for row in rows}
        arriving = fetched(self.settings.channel, weights)
        self._wake("weights", loads=True)
        self._requests.load(self._source.tensors(arriving), weights.version, self._source.adapters)
        self._wake("kv_cache")  # after the copies of the weights were freed
        require_fingerprint(weights, self._source.fingerprint(), "the engine")
        self.version = weights.version
        self._loads += 1
        for row in (*rows, *self._parked.values()):
            if self.settings.carry == "recompute" or not row.generated:
                row.salt = str(self._loads)

    def hold(self, rollout_ids: Iterable[int], how: Hold) -> None:
        """Do nothing. A parked rollout has no request, and its cached blocks stay until evicted."""

    def logprobs(self, sequences: IntArray) -> FloatArray:
        self._make_idle()
        rows = [row.tolist() for row in sequences]
        prefixes = [row[:at] for row in rows for at in range(1, len(row))]
        next_tokens = [token for row in rows for token in row[1:]]
        logprobs = self._requests.logprobs(prefixes, next_tokens)
        return logprobs.reshape(len(rows), -1)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._requests.kv_bytes_per_token

    def _row(self, r: Response, tokens: list[int], transfer: KVTransfer | None) -> RequestRow:
        parked, prompt = self._parked.get(r.id), r.prompt.tokens
        salt = parked.salt if parked else str(self._loads)
        return RequestRow(
            id=r.id,
            prompt=prompt,
            tokens=tokens,
            reported=len(r),
            sampling=r.sampling or self._sampling,
            turn_start=r.turn_start,
            salt=salt,
        )

    def _decode_steps(self, max_tokens: int, stop_after: int) -> int:
        for row in self._held.values():
            if not row.request:
                self._wake("weights", "kv_cache")
                self._submit(row)
        steps = 0
        while self._held and steps < max_tokens and not 0 < stop_after <= self._finished:
            self._mark_step(steps)
            steps += self._step()
        self._rest()
        return steps

    def _drop(self) -> None:
        self._withdraw([row for row in self._by_request.values() if row.id not in self._held])
        self._rest()

    def _submit(self, row: RequestRow) -> None:
        self._named += 1
        row.request, row.unread = f"{row.id}.{self._named}", len(row.tokens)
        self._by_request[row.request] = row
        seed = stream_seed(*(row.sampling.seed or (self.settings.seed, row.id)))
        if not self._requests.seeds_positions:  # otherwise its first random numbers would repeat
            seed = stream_seed(seed, row.generated)
        sampling = replace(row.sampling, max_new_tokens=row.tokens_left)
        self._requests.add(row.request, row.tokens, row.salt, seed % SEEDS, sampling)

    def _withdraw(self, rows: Iterable[RequestRow]) -> None:
        running = [row for row in rows if row.request]
        self._requests.abort([row.request for row in running])
        for row in running:
            del self._by_request[row.request]
            row.request = ""

    def _read_prompt(self, tokens: int) -> None:
        self._make_idle()
        self._requests.logprobs([[1] * tokens], [1])

    def _make_idle(self) -> None:
        self._withdraw(self._held.values())
        self._wake("weights", "kv_cache")

    def _rest(self) -> None:
        busy = self._held or self._parked  # rollouts may continue before new weights come
        if self._requests.sleeps and not busy and not self._resting:
            self._requests.sleep(self._level)
            self._resting = ("weights", "kv_cache")

    def _wake(self, *memory: Memory, loads: bool = False) -> None:
        if "weights" in self._resting and self._level == 2 and not loads:
            raise RankError(
                "vLLM had dropped its weights, as new ones come before the next round, and got "
                "rollouts of an engine that was lost; it must be started again",
                code="weights-asleep",
            )
        if parts := [part for part in self._resting if part in memory]:
            self._requests.wake(parts)
            self._resting = tuple(part for part in self._resting if part not in memory)

    def _step(self) -> bool:
        if not self._requests.busy:
            raise EngineError(
                f"vLLM has no request left, and rollouts {sorted(self._held)} go on", "no-requests"
            )
        chunks, advanced = [], False
        for output in self._requests.step():
            row = self._by_request[output.request]
            if row.unread:
                self.prefilled_tokens += row.unread - output.cached
                row.unread = 0
            if chunk := self._take(row, output):
                chunks.append(chunk)
            advanced |= bool(output.tokens)
        self._done += sorted(chunks, key=lambda chunk: chunk.rollout_id)
        return advanced

    def _take(self, row: RequestRow, output: Output) -> Chunk | None:
        blanks: list[TopLogprobs | None] = [None] * len(output.tokens)
        likeliest = output.top_logprobs or blanks
        sampled_tokens = zip(output.tokens, output.logprobs, likeliest, strict=True)
        for token, logprob, top_logprobs in sampled_tokens:
            self.context_tokens += len(row.tokens)
            if chunk := self._append(row, token, logprob, top_logprobs):
                break
        else:
            if output.ended:
                raise EngineError(
                    f"vLLM has ended rollout {row.id} after {row.generated} tokens "
                    f"({output.ended}), before an end token, a stop string or the limit of "
                    f"{row.sampling.max_new_tokens}",
                    "ended-early",
                )
            return None
        if output.ended:
            del self._by_request[row.request]
        else:
            self._withdraw([row])
        return chunk


class _FileNames:
    """Converts parameters to the names and shapes in a model's files, as vLLM's loaders expect.

    For example, transformers holds all experts of a layer in one parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        empty = {
            name.replace(".base_layer.", "."): p.detach().to("meta")
            for name, p in model.named_parameters()
            if ".lora_" not in name
        }
        self._same = empty.keys() == self._revert(empty).keys()

    def __call__(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a parameter has in files."""
        if self._same:
            yield name, tensor
        else:
            yield from self._revert({name: tensor}).items()

    def _revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        file_tensors: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return file_tensors


class FullWeights:
    """Weights of a model without adapters: frozen ones and those from the learner."""

    adapters, lora_rank = "", 0

    def __init__(self, model: nn.Module) -> None:
        trainable = trained_names(model)
        parameters = dict(model.named_parameters())
        self._shapes = {n: tuple(p.shape) for n, p in parameters.items()}
        self._still = {n: final(p) for n, p in parameters.items() if n not in trainable}
        self._running, self._as_in_files = RunningFingerprint(parameters), _FileNames(model)

    def tensors(self, arriving: Mapping[str, Tensor | TensorPart]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in chain(self._still.items(), self._full(arriving)):
            self._running.take(name, tensor)
            yield from self._as_in_files(name, tensor)

    def fingerprint(self) -> str:
        return self._running.mark()

    def _full(self, arriving: Mapping[str, Tensor | TensorPart]) -> Iterator[tuple[str, Tensor]]:
        buffers: dict[str, Tensor] = {}
        elements_left: dict[str, int] = {}
        for name, part in arriving.items():
            tensor, to = part if isinstance(part, TensorPart) else (part, ())
            shape = self._shapes[name]
            if tensor.shape == shape:
                yield name, tensor.clone()  # its buffer is reused
                continue
            if name not in buffers:
                buffers[name] = tensor.new_empty(shape)
                elements_left[name] = math.prod(shape)
            buffers[name][to] = tensor
            elements_left[name] -= tensor.numel()
            if not elements_left[name]:
                yield name, buffers.pop(name)


class MergedWeights:
    """Weights of a LoRA model whose adapters vLLM does not support: adapters merged into the base
    weights, rounded to the model's type.
    """

    adapters, lora_rank = "", 0

    def __init__(self, model: Any) -> None:
        self._model = model
        self._as_in_files = _FileNames(self._model.get_base_model())

    @torch.no_grad()
    def tensors(self, arriving: Mapping[str, Tensor | TensorPart]) -> Iterator[tuple[str, Tensor]]:
        for name, part in arriving.items():
            copy_into(self._model, {name: part})
        yield from self._below()

    def fingerprint(self) -> str:
        return fingerprint_of(self._model)

    def _below(self) -> Iterator[tuple[str, Tensor]]:
        base_model = self._model.get_base_model()
        layers = {n: m for n, m in base_model.named_modules() if hasattr(m, "get_delta_weight")}
        for name, weight in base_model.named_parameters():
            layer, _, tail = name.rpartition(".base_layer.")
            if tail == "weight" and layer in layers:
                yield from self._as_in_files(f"{layer}.weight", self._sum(layers[layer], weight))
            elif ".lora_" not in name:
                file_name = name.replace(".base_layer.", ".")
                yield from self._as_in_files(file_name, weight.detach().clone())

    def _sum(self, layer: Any, weight: Tensor) -> Tensor:
        adapters = (a for a in layer.active_adapters if a in layer.scaling)
        delta: Tensor = sum(layer.get_delta_weight(adapter).float() for adapter in adapters)
        return (weight.float() + delta).to(weight.dtype)


class AdapterWeights(MergedWeights):
    """Weights of a LoRA model: the base weights once, then only the adapters, which vLLM holds
    separately. Rounding the sum would lose most of a small update (docs/vllm.md).

    Attributes:
        adapters: folder to which PEFT writes the adapters.
        lora_rank: their rank.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._folder, self._loaded = TemporaryDirectory(prefix="adapters-"), False
        ((name, config),) = self._model.peft_config.items()
        self.adapters, self.lora_rank = self._folder.name, config.r
        if name != "default":  # then peft makes a subfolder
            self.adapters = str(Path(self._folder.name, name))

    @torch.no_grad()
    def tensors(self, arriving: Mapping[str, Tensor | TensorPart]) -> Iterator[tuple[str, Tensor]]:
        """Write the arrived adapters. Yields the base weights the first time."""
        for name, part in arriving.items():
            copy_into(self._model, {name: part})
        # Embeddings have no adapter, and peft would ask the hub about tied ones.
        self._model.save_pretrained(self._folder.name, save_embedding_layers=False)
        if not self._loaded:
            yield from self._below()
            self._loaded = True

    def _sum(self, layer: Any, weight: Tensor) -> Tensor:
        return weight.detach().clone()


Source = FullWeights | MergedWeights


def source_of(model: Any) -> Source:
    """Return the source of a CPU model's weights, which loads arriving adapters into the model."""
    if not hasattr(model, "peft_config"):
        return FullWeights(model)
    if why := _why_merged(model):
        warnings.warn(
            f"vLLM gets the adapters merged into the weights: {why}. In bfloat16 that rounds small "
            "updates away",
            stacklevel=2,
        )
        return MergedWeights(model)
    return AdapterWeights(model)


def _why_merged(model: Any) -> str:
    """Return why a model's adapters must be merged for vLLM, or "" if vLLM supports them."""
    configs = list(model.peft_config.values())
    if len(configs) > 1:
        return "there are several"
    (config,) = configs
    for field in UNKNOWN_TO_VLLM:
        if getattr(config, field, None):
            return f"vLLM does not know peft's {field}"
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        return f"init_lora_weights = '{config.init_lora_weights}' changes the weights below"
    if config.modules_to_save or getattr(config, "bias", "none") != "none":
        return "they have whole layers or biases"
    if config.r > MOST_RANK or config.rank_pattern or config.alpha_pattern:
        return f"they have several ranks, or one above {MOST_RANK}"
    inside = model.get_base_model()
    around = {id(inside.get_input_embeddings()), id(inside.get_output_embeddings())}
    for name, module in inside.named_modules():
        if hasattr(module, "get_delta_weight") and (
            id(module) in around or not isinstance(module.get_base_layer(), nn.Linear)
        ):
            return f"{name} has one"
    return ""
