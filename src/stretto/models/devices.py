"""Computing on a CPU and on a CUDA GPU: what the seam :mod:`stretto.models.backend` chooses."""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.errors import ConfigError, ModelError, require
from stretto.models.attention import PACKED, use_attention
from stretto.models.forward import decoder_layers, unwrapped
from stretto.models.mapped import final_dtype
from stretto.models.row_products import CANONICAL, RowLinear, linear, pack, packed_linear

Outputs = tuple[Tensor, ...]


class RoleStream:
    """The order between the calls of roles that work on threads; a CPU needs no more than this.

    - A call follows all calls of all roles that had returned before it began.
    - Calls in progress at the same time do not follow each other.
    - The caller's stream, on which everything but roles works, follows a call that has returned.

    So arguments and results need no events of their own. The caller's stream is the one that was
    current when this was made, usually the default stream.
    """

    def call(self) -> AbstractContextManager[object]:
        """Return the context of one call. Its result is passed on after the end of the context."""
        return nullcontext()

    def follow(self) -> None:
        """Let the caller's stream follow all that the role has begun, calls in progress too."""


class CudaRoleStream(RoleStream):
    """A CUDA stream of a role. Hand-overs from role to role go through the caller's stream."""

    def __init__(self, stream: torch.cuda.Stream, callers: torch.cuda.Stream) -> None:
        self._stream = stream
        self._callers = callers

    @contextmanager
    def call(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(self._callers)
            try:
                yield
            finally:
                self.follow()

    def follow(self) -> None:
        self._callers.wait_stream(self._stream)


class Backend:
    """A CPU; :class:`CudaBackend` has what is different on a GPU.

    Attributes:
        graphs: whether decode steps can be replayed as CUDA graphs.
        steps_unread: decode steps that an engine launches, at most, before it reads their tokens.
        fuses_adapters: whether an engine computes LoRA's adapters in fewer kernels than peft does.
        pinned: whether copies to the device are faster from pinned memory.
        collectives: torch's name of the backend for several ranks.
    """

    graphs = False
    steps_unread = 1
    fuses_adapters = False
    pinned = False
    collectives = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def fastest_dtype(self, threads: int) -> tuple[torch.dtype, str]:
        """Return the type that the device computes fastest in, and how that is known."""
        if not cpu_has_bfloat16():
            return torch.float32, "the CPU has no instructions for bfloat16"
        speeds = product_speeds(threads or torch.get_num_threads())
        return speeds.choice, str(speeds)

    def use_fastest_attention(self, model: nn.Module) -> None:
        use_attention(model)

    def use_cudnn_attention(self) -> None:
        """Let torch choose cuDNN's attention, which is off by default, in this process."""

    def use_liger_kernel(self, model: Any) -> None:
        """Put Liger's kernels into a transformers model, in place. Raises ConfigError on a CPU,
        MissingExtraError without the library, ModelError for a model that it does not know.
        """
        raise ConfigError(
            "model.use_liger_kernel = true is for GPUs, and the model is on a CPU; leave it out",
            "liger-on-cpu",
        )

    def compile_layers(self, model: nn.Module) -> None:
        """Have torch.compile compile a model's layers when they are first called, in place, for
        sequences of any length. Raises ConfigError on a CPU.
        """
        raise ConfigError(
            "model.torch_compile = true is for GPUs, and the model is on a CPU; leave it out",
            "compile-on-cpu",
        )

    def pack_sequences(self, model: nn.Module) -> None:
        """Let a model that only trains lay sequences end to end, where that is faster."""

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def spare_bytes(self) -> int:
        """Return the bytes that this process has never needed so far, and could have."""
        return 0  # a CPU's memory is shared, and peaks of it are not known

    def random_states(self) -> dict[str, Tensor]:
        return {"cpu": torch.get_rng_state()}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])

    def new_stream(self) -> Any:
        return None

    def role_stream(self, *, urgent: bool = False) -> RoleStream:
        """Return a new stream for a role, whose kernels go before others' if it is ``urgent``."""
        return RoleStream()

    def begun(self) -> Any:
        """Mark what the device has begun, for :meth:`copy` to wait for."""
        return None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any, begun: Any) -> None:
        """Copy each second tensor into the first, after what has begun; return when it is done."""
        for to, source in pairs:
            to.copy_(source)

    def on(self, stream: Any, begun: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def read_on(self, stream: Any, tensor: Tensor) -> Tensor:
        """Return a tensor of another stream, whose memory stays until this one has read it.
        ``None`` is the current stream.
        """
        return tensor

    def synchronize(self) -> None:
        """Wait until the current stream has done all that it was given."""

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all elements, [] in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for tensor in tensors:
            total += tensor.double().square().sum()
        return total

    def timer(self) -> Callable[[], float]:
        """Begin to time what this thread has the device do from now on. The function returned waits
        for that, and gives the seconds; infinity where calls return when their work is done, so
        that a clock tells.
        """
        return lambda: math.inf

    def capture(self, run: Callable[[], Outputs], pool: Any) -> tuple[Any, Outputs]:
        """Capture ``run``, in a pool of CUDA graphs' memory; return the graph and its outputs.
        Raises RuntimeError where that cannot be; the thread's stream is then what it was.
        """
        raise NotImplementedError


@lru_cache(maxsize=1)  # a later choice of the user's stays
def _turn_off_cudnn_attention() -> None:
    """Turn off cuDNN's attention, which torch prefers on sm_90. It prepares itself for each new
    shape of its inputs for some 30 ms, and nearly all shapes are new here.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage, as a graph that is freed during a capture makes the capture invalid."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_CAPTURES = Lock()
"""Held during a capture: torch allows one at a time in a process."""


class CudaBackend(Backend):
    """A CUDA GPU."""

    graphs = True
    steps_unread = 8
    fuses_adapters = True
    pinned = True
    collectives = "nccl"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._capturing: Any = None
        _turn_off_cudnn_attention()

    def fastest_dtype(self, threads: int) -> tuple[torch.dtype, str]:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU computes in it"
        return torch.float32, "the GPU has no bfloat16"

    def use_cudnn_attention(self) -> None:
        torch.backends.cuda.enable_cudnn_sdp(True)

    def use_liger_kernel(self, model: Any) -> None:
        require("liger_kernel", "liger", "model.use_liger_kernel = true")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

        if (kind := model.config.model_type) not in KNOWN:
            raise ModelError(
                f"Liger has no kernels for models of type '{kind}'; leave model.use_liger_kernel "
                "out",
                "no-liger-kernels",
            )
        # Losses are not the model's own here, and never hold all logits.
        apply(model=unwrapped(model), cross_entropy=False, fused_linear_cross_entropy=False)

    def compile_layers(self, model: nn.Module) -> None:
        for layer in decoder_layers(model):  # one by one, as shards are gathered
            layer.compile(dynamic=True)

    def pack_sequences(self, model: nn.Module) -> None:
        """Torch's kernel computes in 16 bits, from sm_80 on."""
        bits = final_dtype(next(model.parameters())).itemsize == 2
        if bits and torch.cuda.get_device_capability(self.device) >= (8, 0):
            use_attention(unwrapped(model), PACKED)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def spare_bytes(self) -> int:
        reserved = torch.cuda.memory_reserved(self.device)
        return self.free_bytes() + reserved - torch.cuda.max_memory_allocated(self.device)

    def random_states(self) -> dict[str, Tensor]:
        return {**super().random_states(), str(self.device): torch.cuda.get_rng_state(self.device)}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        super().set_random_states(states)
        if str(self.device) in states:
            torch.cuda.set_rng_state(states[str(self.device)], self.device)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def role_stream(self, *, urgent: bool = False) -> RoleStream:
        stream = torch.cuda.Stream(self.device, priority=-1 if urgent else 0)
        return CudaRoleStream(stream, torch.cuda.current_stream(self.device))

    def begun(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def on(self, stream: Any, begun: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            stream.wait_event(begun)
            yield

    def read_on(self, stream: Any, tensor: Tensor) -> Tensor:
        tensor.record_stream(stream or torch.cuda.current_stream(self.device))
        return tensor

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any, begun: Any) -> None:
        with self.on(stream, begun):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        # The host waits, so that a buffer which is let go of afterwards is free at once.
        stream.synchronize()

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Add up in float64 without copies in it: a GPU converts as it reads, in one kernel for
        many tensors. A CPU would round otherwise, and be no faster.
        """
        if not tensors:
            return super().sum_of_squares(tensors)
        return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square().sum()

    def timer(self) -> Callable[[], float]:
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        start_event.record(stream)

        def seconds() -> float:
            end_event.record(stream)
            end_event.synchronize()
            return float(start_event.elapsed_time(end_event)) / 1e3

        return seconds

    def capture(self, run: Callable[[], Outputs], pool: Any) -> tuple[Any, Outputs]:
        before = torch.cuda.current_stream()
        # torch leaves its own stream in place where a capture fails at its end: hence the second.
        with _CAPTURES, _no_collection(), torch.cuda.stream(before):
            # One stream for all captures, as their pool's memory is the stream's. Kernels of a
            # graph have the priority of the stream that captured them.
            side = self._capturing = self._capturing or torch.cuda.Stream(priority=before.priority)
            side.wait_stream(before)
            with torch.cuda.stream(side):  # lazy allocations and handles come before the capture
                for _ in range(2):
                    run()
            before.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # The default mode would fail where a scorer or learner uses the GPU in another thread.
            with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
                outputs = run()
        return graph, outputs


MOST_ROWS = CANONICAL
"""Rows up to which the packed product is used; with more the layout no longer matters."""


class ReplacedForwards:
    """Layers that have other forward passes while this context manager is entered."""

    layers: Sequence[Any]

    def forwards(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """Return up-to-date forward passes, one per layer."""
        raise NotImplementedError

    def __enter__(self) -> None:
        for layer, forward in zip(self.layers, self.forwards(), strict=True):
            layer.forward = forward

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the layers their own forward passes back. A second call does nothing.

        An interruption can strike within ``__enter__`` or ``__exit__``: call this once more then.
        """
        for layer in self.layers:
            vars(layer).pop("forward", None)


class PackedLinears(ReplacedForwards):
    """The bfloat16 linear layers of a model on a CPU, packed; none anywhere else.

    oneDNN can keep weights in the layout that its kernels read, into which a product of few rows
    spends a third of its time to bring them. The products are the same, bit for bit. As a context
    manager it puts packed forward passes in the layers' places, after packing what has changed.
    """

    def __init__(self, *modules: nn.Module) -> None:
        mkldnn: Any = torch.ops.mkldnn
        supported = torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_linear_pointwise")
        self.layers = [
            layer
            for module in modules
            for layer in module.modules()
            if supported
            and type(layer) in (nn.Linear, RowLinear)
            and layer.weight.dtype == torch.bfloat16
            and layer.weight.device.type == "cpu"
        ]
        self._packed: list[Callable[[Tensor], Tensor]] = []
        self._versions: list[int] = []

    def forwards(self) -> Sequence[Callable[[Tensor], Tensor]]:
        # torch counts the in-place changes of a tensor, of which an optimizer's update is one.
        versions = [layer.weight._version for layer in self.layers]
        if versions != self._versions:
            self._packed = [_pack(layer) for layer in self.layers]
            self._versions = versions
        return self._packed

    def invalidate(self) -> None:
        """Pack again before the next use, and free the memory until then."""
        self._packed = []
        self._versions = []


def _pack(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = layer.weight
    bias = layer.bias
    width = layer.in_features
    packed = pack(weight)
    if isinstance(layer, RowLinear):
        return partial(linear, weight=weight, bias=bias, packed=packed)

    def forward(x: Tensor) -> Tensor:
        if x.numel() > MOST_ROWS * width:
            return F.linear(x, weight, bias)
        return packed_linear(x, packed, bias)

    forward.packed = packed  # type: ignore[attr-defined]
    return forward


ROWS = 256
INNER = 768
OUTER = 3072
"""Sizes of the product: a micro-batch's tokens, a small model's hidden size and 4 times that."""
REPEATS = 6
"""Products of each type, in turn; the fastest counts, as the others were disturbed."""
GAIN = 1.2
"""Least speed-up for which bfloat16 is chosen: float32 is more exact, and a near tie would fall
either way from run to run."""


@dataclass(frozen=True, slots=True)
class ProductSpeeds:
    """Speeds of a matrix product in GFLOP/s, by which ``model.dtype = auto`` chooses.

    Instruction sets do not tell them: bfloat16 (AVX512-BF16) is at half the speed of float32 on one
    CPU, and at twice its speed on another.
    """

    float32: float
    bfloat16: float

    @property
    def choice(self) -> torch.dtype:
        return torch.bfloat16 if self.bfloat16 >= GAIN * self.float32 else torch.float32

    def __str__(self) -> str:
        return f"products at {self.bfloat16:.0f} GFLOP/s in bfloat16, {self.float32:.0f} in float32"


@lru_cache
def product_speeds(threads: int) -> ProductSpeeds:
    """Measure both types with so many threads of torch, once in a process: some 50 ms."""
    before = torch.get_num_threads()
    if threads != before:
        torch.set_num_threads(threads)
    try:
        return measure(product_timer())
    finally:
        if threads != before:
            torch.set_num_threads(before)


def measure(timer: Callable[[torch.dtype], float]) -> ProductSpeeds:
    """Return the speed of the fastest of several products of each type, after one warms up."""
    types = torch.float32, torch.bfloat16
    _, *rounds = ([timer(dtype) for dtype in types] for _ in range(REPEATS + 1))
    work = 2 * ROWS * INNER * OUTER / 1e9
    return ProductSpeeds(*(work / min(seconds) for seconds in zip(*rounds, strict=True)))


def product_timer() -> Callable[[torch.dtype], float]:
    """Return a timer of a linear layer's product in a type; its numbers are fixed, not drawn."""
    fixed = torch.ones(ROWS, INNER), torch.ones(OUTER, INNER)

    @torch.inference_mode()
    def timed(dtype: torch.dtype) -> float:
        x, w = (tensor.to(dtype) for tensor in fixed)
        start_s = time.perf_counter()
        F.linear(x, w)
        return time.perf_counter() - start_s

    return timed


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 itself; elsewhere it is emulated, and far slower.

    On x86, oneDNN already says yes to AVX512 alone, so the instruction sets are asked for by name.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        has_onednn = torch.backends.mkldnn.is_available()
        return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
