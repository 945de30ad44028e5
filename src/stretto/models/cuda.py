"""Computing on a CUDA GPU, where it differs from a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.cpu import Backend, Outputs


class CudaBackend(Backend):
    """A CUDA GPU; methods as in :class:`~stretto.models.cpu.Backend`."""

    graphs = True
    pinned = True
    collectives = "nccl"

    def fastest_dtype(self, threads: int) -> tuple[torch.dtype, str]:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU computes in it"
        return torch.float32, "the GPU has no bfloat16"

    def use_fastest_attention(self, model: nn.Module) -> None:
        """Leave transformers' choice, torch's fused attention."""

    def rank_device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank)

    def most_ranks(self) -> int | None:
        return torch.cuda.device_count()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def random_states(self) -> dict[str, Tensor]:
        return {**super().random_states(), str(self.device): torch.cuda.get_rng_state(self.device)}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        super().set_random_states(states)
        if str(self.device) in states:
            torch.cuda.set_rng_state(states[str(self.device)], self.device)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def begun(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any, begun: Any) -> None:
        with torch.cuda.stream(stream):
            stream.wait_event(begun)
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        # The host waits, so that a buffer which is let go of afterwards is free at once.
        stream.synchronize()

    def capture(self, run: Callable[[], Outputs], pool: Any) -> tuple[Any, Outputs]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazy allocations and library handles come before capture
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = run()
        return graph, outputs
