"""The steps of a weight transfer to followers in other processes, and its verification.

No processes and no clock are involved. Control calls, which may raise, come first: the learner
offers a version and announces its plan to each follower, which compares it with its own. Then the
tensors move bucket by bucket on a separate group, with a deadline. Then they are verified: by marks
of the received data, by the model's fingerprint (which the follower computes), and by the log-probs
of a fixed probe from both engine and learner. If a failure leaves other followers without weights,
they are told to abort, which detects those that hang. The rest try once more on a new group.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from stretto.errors import EngineError, RoleLostError, TransferError
from stretto.runtime.process_messages import Loaded, Offer
from stretto.types import FloatArray, Reply, WeightsRef

TRIES = 2  # maximum attempts at a transfer

Outcome = Reply[Loaded] | Exception
"""Result of a follower's part in a transfer."""


class Action(StrEnum):
    """Requests of a transfer. The comments describe the answers."""

    OFFER = "offer"  # the learner's offers of the version, one per rank
    ANNOUNCE = "announce"  # the plan to a follower: None, or the error if it is gone
    SEND = "send"  # mark of the sent data ("" after a failure) and each follower's outcome
    ABORT = "abort"  # to a follower without weights: None, or the error if it hangs


def transfer_steps(
    ref: WeightsRef, followers: Sequence[str], tolerance: float
) -> Generator[tuple[Action, Sequence[str]], Any, dict[str, Outcome]]:
    """Yield the actions of a transfer and their followers. Return verified outcomes."""
    waiting, outcomes = list(followers), dict[str, Outcome]()
    for _ in range(TRIES):
        offers: Sequence[Offer] = yield Action.OFFER, tuple(waiting)
        for name in waiting:
            if (gone := (yield Action.ANNOUNCE, (name,))) is not None:
                waiting.remove(name)
                outcomes[name] = RoleLostError(name, str(gone), gone.code)
                broken = TransferError(f"{name} is gone: {gone}")
                outcomes |= dict.fromkeys(waiting, broken)
                break
        else:
            mark, answers = yield Action.SEND, tuple(waiting)
            for name, outcome in answers.items():
                outcomes[name] = proved(name, outcome, ref, offers[0], mark, tolerance)
        waiting = [name for name in waiting if isinstance(outcomes[name], TransferError)]
        for name in tuple(waiting):
            if (hangs := (yield Action.ABORT, (name,))) is not None:
                waiting.remove(name)
                why = f"{name} hangs in a weight sync: {hangs}"
                outcomes[name] = RoleLostError(name, why, "hangs-in-weight-sync")
        if not waiting:
            break
    return outcomes


def proved(
    name: str, outcome: Outcome, ref: WeightsRef, offer: Offer, sent: str, tolerance: float
) -> Outcome:
    """Return the outcome, or an error if the follower holds other weights than were sent."""
    if isinstance(outcome, Exception):
        return outcome
    loaded = outcome.value
    if sent and loaded.mark != sent:
        return EngineError(
            f"version {ref.version} of the {ref.model} was sent with the mark {sent}, and "
            f"{name} received {loaded.mark}: what is between them changes data",
            "weights-changed-on-the-way",
        )
    if offer.probe is not None and loaded.probe is not None:
        gap = difference(offer.probe, loaded.probe)
        if not gap <= tolerance:
            return EngineError(
                f"after the sync of version {ref.version} of the weights, {name} and the learner "
                f"differ by {gap:.4g} nats (root mean square) on the log-probs of the probe; "
                f"{tolerance:g} is allowed. Their kernels or types differ: look at model.dtype and "
                "the devices, or raise cluster.probe_tolerance",
                "probe-differs",
            )
    return outcome


def difference(one: FloatArray, two: FloatArray) -> float:
    squares = (one.astype(np.float64) - two.astype(np.float64)) ** 2
    return math.sqrt(squares.mean())
