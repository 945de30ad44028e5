"""The two sides of ``handover.py``, for processes of their own."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.types import Reply, WeightsRef
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Route

CPU = torch.device("cpu")


def weights(megabytes: int) -> dict[str, Tensor]:
    """Tensors of 4 MiB each, in float32."""
    return {f"layer {i}": torch.full((1 << 20,), float(i)) for i in range(megabytes // 4)}


class Side:
    """The learner, or a follower.

    Args:
        megabytes: of the weights.
        bucket_mb: MiB that travel at a time.
    """

    def __init__(self, megabytes: int, bucket_mb: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.tensors = weights(megabytes)
        self.sender = WeightSender(CPU, bucket_mb << 20, keep=2)
        self.receiver = WeightReceiver(self.tensors, CPU, bucket_mb << 20)

    def put(self, ref: WeightsRef) -> Reply[str]:
        """Offer the weights; return the mark of their plan."""
        self.sender.put(ref, self.tensors)
        return Reply(self.sender.plan(ref).mark)

    def send(self, ref: WeightsRef, route: Route) -> Reply[float]:
        """Send them; return the seconds."""
        start_s = time.perf_counter()
        self.sender.send(ref, route)
        return Reply(time.perf_counter() - start_s)

    def load(self, ref: WeightsRef, mark: str, route: Route) -> Reply[float]:
        """Receive them into the tensors that are here; return the seconds."""
        start_s = time.perf_counter()
        self.receiver.expect(ref, mark, route)
        for name, part in self.receiver.get(ref).items():
            self.tensors[name][part.to].copy_(part.tensor)
        return Reply(time.perf_counter() - start_s)

    def plain(self, route: Route) -> Reply[float]:
        """Broadcast each tensor into its place, without buckets or proof; return the seconds."""
        timeout = timedelta(seconds=route.timeout_s)
        store = dist.TCPStore(route.host, route.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        own = dist.PrefixStore(route.prefix, store)  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroupGloo(own, route.rank, route.size, timeout)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        start_s = time.perf_counter()
        for tensor in self.tensors.values():
            group.broadcast([tensor], options).wait()
        return Reply(time.perf_counter() - start_s)
