"""The weight channel within one process, and the interface that followers need of any channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from stretto.errors import EngineError
from stretto.models.backend import backend_of
from stretto.models.weights import require_fingerprint
from stretto.types import WeightsRef


class WeightChannel(Protocol):
    """A follower's end of a channel. ``name`` is the one in tickets."""

    name: str

    def get(self, ref: WeightsRef) -> Mapping[str, Any]:
        """Return the tensors of a ticket, or a :class:`~stretto.models.shards.TensorPart` of each.
        Raises EngineError if they are not here.
        """
        ...


def fetched(channel: WeightChannel | None, ref: WeightsRef) -> Mapping[str, Any]:
    """Return a ticket's tensors, none if memory is shared. EngineError without a connection."""
    if not ref.channel:
        return {}
    if channel is None or channel.name != ref.channel:
        raise EngineError(
            f"version {ref.version} of the {ref.model} is in the channel '{ref.channel}', to which "
            "the receiver has no access",
            "other-channel",
        )
    return channel.get(ref)


class SharedChannel:
    """Both ends of a channel within one process. Tensors are passed on without copies."""

    name = "shared"

    def __init__(self) -> None:
        self._offered: dict[str, dict[int, Mapping[str, Tensor]]] = {}

    def put(self, ref: WeightsRef, tensors: Mapping[str, Tensor]) -> None:
        """Keep a ticket's trained tensors, which must not change any more, for the followers."""
        self._keep(ref.model, {**self._offered.get(ref.model, {}), ref.version: tensors})

    def get(self, ref: WeightsRef) -> Mapping[str, Tensor]:
        """Return the tensors of a ticket for the current stream, and drop older versions."""
        tensors, versions = self.kept(ref), self._offered[ref.model]
        self._keep(ref.model, {v: t for v, t in versions.items() if v >= ref.version})
        for tensor in tensors.values():  # a later version may free it while it is being copied
            backend_of(tensor.device).read_on(None, tensor)
        return tensors

    def kept(self, ref: WeightsRef) -> Mapping[str, Tensor]:
        """Return a ticket's tensors without dropping any. Raises EngineError without them."""
        versions = self._offered.get(ref.model, {})
        if ref.version not in versions:
            raise EngineError(
                f"version {ref.version} of the {ref.model} is not in the channel '{self.name}', "
                f"which holds {sorted(versions) or 'none'}",
                "version-not-kept",
            )
        return versions[ref.version]

    def _keep(self, model: str, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._offered[model] = dict(versions)  # replaced, as a thread may be reading it


class OwnWeights:
    """The channel of a follower that computes with the learner's own weights, in all of its ranks.
    It brings no tensors, but compares the weights with the ticket. A collective.
    """

    def __init__(self, sender: SharedChannel, fingerprint: Callable[[], str]) -> None:
        self.name = sender.name
        self._sender = sender
        self._fingerprint = fingerprint

    def get(self, ref: WeightsRef) -> Mapping[str, Any]:
        self._sender.kept(ref)  # raises for another version than the learner's
        require_fingerprint(ref, self._fingerprint(), f"the learner's {ref.model}")
        return {}
