"""A pretended GPU: tensors that report cuda:0, and hold their data on the CPU.

It refuses operands on two devices, and in a capture everything that CUDA forbids there. A vector
clock of each stream finds accesses that no event orders. Kernels, memory and NCCL are not imitated.
Importing this module replaces parts of torch. It has to come before stretto, whose decorators
read ``torch.inference_mode``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
INNER = torch.device("meta", 0)
"""The device by which C++ knows these tensors: true meta tensors have no index."""

HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
LOCK = threading.RLock()
MISTAKES: Counter[str] = Counter()
WAITS: Counter[str] = Counter()
"""Operations for which the host waits, by name."""


class Local(threading.local):
    """State of one thread."""

    stream: Stream | None = None
    recording: list[Callable[[], None]] | None = None


LOCAL = Local()


def mistake(text: str) -> None:
    MISTAKES[text] += 1
    raise RuntimeError(text)


def forbidden_in_capture(what: str) -> None:
    if LOCAL.recording is not None:
        mistake(f"operation not permitted when stream is capturing: {what}")


def host_waits(what: str) -> None:
    forbidden_in_capture(what)
    WAITS[what] += 1


# -- streams -------------------------------------------------------------------------------------

Clocks = dict["Stream", int]
HOST: Clocks = {}
"""Work that the host has waited for by a stream. Reads of numbers are not counted, so that an
order that they would bring about by chance does not hide a missing event."""


def advance(clocks: Clocks, other: Mapping[Stream, int]) -> None:
    with LOCK:
        for stream, count in other.items():
            clocks[stream] = max(clocks.get(stream, 0), count)


class Event:
    def __init__(self, *args: Any, **options: Any) -> None:
        self.clocks: Clocks = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clocks = dict((stream or current_stream()).clocks)

    def synchronize(self) -> None:
        host_waits("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.clocks: Clocks = {}

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        advance(self.clocks, event.clocks)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        host_waits("Stream.synchronize")
        advance(HOST, self.clocks)


DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    return LOCAL.stream or DEFAULT


@contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    before, LOCAL.stream = LOCAL.stream, stream or LOCAL.stream
    try:
        yield
    finally:
        LOCAL.stream = before


class Accesses:
    """The last write of a storage, and the reads since then, as counts of streams."""

    def __init__(self) -> None:
        self.write: Clocks = {}
        self.reads: Clocks = {}


STORAGES: dict[int, Accesses] = {}
STREAMS: set[Stream] = set()
"""Streams that have worked."""


def access(name: str, reads: list[Tensor], writes: list[Tensor], fresh: list[Tensor]) -> None:
    """Account for an operation on the current stream; refuse it if an access is not ordered."""
    stream = current_stream()
    with LOCK:
        advance(stream.clocks, HOST)
        STREAMS.add(stream)
        count = stream.clocks[stream] = stream.clocks.get(stream, 0) + 1
        for tensor in fresh:
            STORAGES[storage_key(tensor)] = Accesses()
        for tensor in (*reads, *writes):
            accesses = STORAGES.setdefault(storage_key(tensor), Accesses())
            earlier = dict(accesses.write)
            if any(tensor is written for written in writes):
                advance(earlier, accesses.reads)
            if any(stream.clocks.get(other, 0) < number for other, number in earlier.items()):
                mistake(f"{name}: a tensor of another stream without a wait for it")
        for tensor in reads:
            STORAGES[storage_key(tensor)].reads[stream] = count
        for tensor in (*writes, *fresh):
            accesses = STORAGES[storage_key(tensor)]
            accesses.write, accesses.reads = {stream: count}, {}


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# -- graphs --------------------------------------------------------------------------------------


class Graph:
    """Records the operations of a capture, and repeats them in place."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        for step in self.steps:
            step()

    def pool(self) -> int:
        return 1


@contextmanager
def capture(graph: Graph, pool: Any, side: Stream, **options: Any) -> Iterator[None]:
    side.wait_stream(current_stream())
    with stream_context(side):
        LOCAL.recording = graph.steps
        try:
            yield
        finally:
            LOCAL.recording = None
    current_stream().wait_stream(side)


# -- tensors -------------------------------------------------------------------------------------


class PretendedTensor(torch.Tensor):
    """A tensor of the pretended GPU around one on the CPU."""

    held: Tensor
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendedTensor:
        strides, offset = held.stride(), held.storage_offset()
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides, offset, dtype=held.dtype, device=INNER
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, PretendedTensor):
            mistake("data of a tensor on the GPU set to a tensor on the CPU")
        self.held = value.held

    def tolist(self) -> Any:
        host_waits("tolist")
        return self.held.tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        mistake("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def record_stream(self, stream: Any) -> None:
        """Do nothing, as memory is not imitated."""

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.clone()
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if parameter else copy
        return memo[id(self)]


def inner(value: Any) -> Any:
    return value.held if isinstance(value, PretendedTensor) else value


def outer(value: Any) -> Any:
    return PretendedTensor(value) if type(value) is torch.Tensor else value


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of ATen on the tensors that are held, after the checks."""
    name = func._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_gpu = [x for x in tensors if isinstance(x, PretendedTensor)]
    device = renamed(kwargs.get("device"))  # in a backward pass there is no OnInner
    to_gpu = device == INNER if device is not None else bool(on_gpu)
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if not on_gpu and not to_gpu:
        return func(*args, **kwargs)
    if name == "_fused_sdp_choice":
        return 0  # in terms of other operations
    check(name, args, tensors, to_gpu)
    written = writes_of(func, args, kwargs)
    plain_args, plain = tree_map(inner, (args, kwargs))
    if to_gpu and device is not None:
        plain["device"] = torch.device("cpu")
    result = func(*plain_args, **plain)
    made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    if alias is not None and not alias.is_write:  # a view
        return tree_map(outer, result)
    fresh = [] if written or not to_gpu else made
    held = [x.held for x in on_gpu]
    changed = [x.held for x in written if isinstance(x, PretendedTensor)]

    def account() -> None:
        access(name, [x for x in held if not any(x is y for y in changed)], changed, fresh)

    account()
    if LOCAL.recording is not None:

        def again() -> None:
            account()
            for old, new in zip(made, tree_leaves(func(*plain_args, **plain)), strict=True):
                if not written:
                    old.copy_(new)

        LOCAL.recording.append(again)
    if written:
        return written[0] if len(returns) == 1 else tuple(written) if returns else None
    return tree_map(outer, result) if to_gpu else result


def check(name: str, args: Any, tensors: list[Tensor], to_gpu: bool) -> None:
    """Refuse operands on two devices, and in a capture what needs the host."""
    on_cpu = [x for x in tensors if not isinstance(x, PretendedTensor)]
    if name in ("_to_copy", "copy_"):
        source_on_gpu = isinstance(tensors[-1], PretendedTensor)
        target_on_gpu = to_gpu if name == "_to_copy" else isinstance(tensors[0], PretendedTensor)
        if source_on_gpu and not target_on_gpu:
            host_waits("a copy to the CPU")
        elif target_on_gpu and not source_on_gpu:
            forbidden_in_capture("a copy from the CPU")
        return
    if name in HOST_READS:
        host_waits(name)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [x for x in args[1] if x is not None]
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            host_waits("an index by a mask")
        if isinstance(args[0], PretendedTensor):  # torch copies indices to the GPU
            on_cpu = [x for x in on_cpu if not any(x is index for index in indices)]
    if any(x.dim() for x in on_cpu):
        mistake(f"Expected all tensors to be on the same device, cuda:0 and cpu, in {name}")
    if on_cpu:
        forbidden_in_capture(f"a number on the CPU in {name}")


def writes_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to; lists of tensors in one piece."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            found += tree_leaves(value)
    return [x for x in found if isinstance(x, torch.Tensor)]


# -- installation --------------------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class OnInner(TorchFunctionMode):
    """Gives C++ the device that it knows the tensors by."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        options = {name: renamed(value) for name, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and options.get("device") == INNER:
            del options["device"]  # C++ would make an empty meta tensor
            return func(*args, **options).to(INNER)
        return func(*map(renamed, args), **options)


def renamed(value: Any) -> Any:
    named = isinstance(value, str) and value.split(":")[0] == "cuda"
    return INNER if named or (isinstance(value, torch.device) and value.type == "cuda") else value


@contextmanager
def pretending() -> Iterator[None]:
    with OnInner(), Dispatched():
        yield


def _install() -> None:
    """Put the pretended GPU in the place of CUDA. Threads that start later use it."""
    size = 80 * 10**9
    features = SimpleNamespace(
        total_memory=size, name="a pretended GPU", uuid="GPU-0", multi_processor_count=132
    )
    sizes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    actions = ("_lazy_init", "empty_cache", "set_device", "set_rng_state")
    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        "device_count": 1,
        "current_device": 0,
        "get_device_name": features.name,
        "get_device_properties": features,
        "get_device_capability": (9, 0),
        "mem_get_info": (size - 10**10, size),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(sizes, 10**9),
        **dict.fromkeys((*actions, "manual_seed", "manual_seed_all"), None),
    }

    def constant(answer: Any) -> Callable[..., Any]:
        return lambda *args, **options: answer

    stand_ins: dict[str, Any] = {
        **{name: constant(answer) for name, answer in answers.items()},
        "Event": Event,
        "Stream": Stream,
        "stream": stream_context,
        "current_stream": current_stream,
        "CUDAGraph": Graph,
        "graph": capture,
        "synchronize": lambda *args: host_waits("synchronize"),
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    # Wrappers have no version counters in inference mode.
    torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment, misc]
    torch.__future__.set_swap_module_params_on_conversion(True)
    plain_run = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with pretending():
            plain_run(self)

    threading.Thread.run = run  # type: ignore[method-assign]


_install()
