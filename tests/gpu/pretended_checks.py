"""Checks on the pretended GPU, in a process of their own: pretended_checks.py FOLDER CHECK [FAULT].

FOLDER has a tiny model. A fault is planted before the check, which then has to fail.
``PYTHONPATH`` has to have ``src`` and ``tests``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretended
import torch
from pretended import GPU

from run_helpers import run, settings
from stretto.config import OptimizerConfig
from stretto.models.offload import CopyStream, OffloadedTensors
from stretto.testing import contracts
from stretto.training.losses import MicroBatch
from stretto.training.trained import LearningRate, TrainedModel
from stretto.types import WeightsRef
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Meeting, open_store

PRIORITIES = {"sync": [0, 0], "rlhfuse": [-1, -1, -1, -1, 0, 0]}
"""Of the streams of a run: -1 of each engine and its captures, 0 of the default, scorers and
learner. ``sync`` has one thread for all roles, and the scorers of ``rlhfuse`` use the engines'.
"""
SMALL = {**contracts.SMALL, "tie_word_embeddings": True}


def check_contracts(folder: Path) -> None:
    for name, check in contracts.CONTRACTS.items():
        print(name, check(GPU))


def check_ppo(folder: Path, preset: str, **sections: Any) -> None:
    with tempfile.TemporaryDirectory() as out:
        model = {"device": "cuda", "dtype": "bfloat16", **sections.pop("model", {})}
        config = settings(folder, model=model, schedule={"preset": preset}, steps=3, **sections)
        _, result = run(config, Path(out))
        print(preset, result.steps)
    priorities = sorted(stream.priority for stream in pretended.STREAMS)
    assert priorities == PRIORITIES.get(preset, [-1, -1, 0, 0, 0]), priorities


def check_engines(folder: Path) -> None:
    check_ppo(folder, "rlhfuse", rollout={"engines": 2})


def check_lora(folder: Path) -> None:
    check_ppo(folder, "stretto", model={"lora_rank": 4, "gradient_checkpointing": True})


def check_offload(folder: Path) -> None:
    weights = [trained(away) for away in (False, True)]
    assert all(map(torch.equal, *weights))


def trained(away: bool) -> list[torch.Tensor]:
    model = contracts.random_model(SMALL, GPU, torch.bfloat16).requires_grad_(True)
    actor = TrainedModel(model, LearningRate(1e-2, 10), OptimizerConfig())
    offloaded = OffloadedTensors("learner", actor.of_updates, CopyStream(GPU))
    if away:
        actor.before_update = offloaded.wait
    for _ in range(3):
        tokens = torch.arange(12, device=GPU).view(2, 6)
        model(input_ids=tokens).logits.float().square().mean().backward()
        actor.update()
        if away:
            offloaded.changed = True
            offloaded.offload()
            assert not any(buffer.device.nbytes for buffer in offloaded._buffers)
            assert actor.of_updates()[0].flatten()[0].isnan()
    if away:
        offloaded.wait()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check_weight_sync(folder: Path) -> None:
    store, port = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", port, 20.0)
    tensors = {f"layer {i}": torch.randn(70, 33, device=GPU).bfloat16() for i in range(5)}
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sender, receiver = WeightSender(GPU, 1 << 12, 2), WeightReceiver(copies, GPU, 1 << 12)
    for version in (1, 2):
        ref = WeightsRef("actor", version, "", "broadcast")
        sender.put(ref, tensors)
        ours, theirs = meeting.routes("weights", 1, 2, "gloo")
        sending = threading.Thread(target=sender.send, args=(ref, ours))
        sending.start()
        receiver.expect(ref, sender.plan(ref).mark, theirs)
        for name, part in receiver.get(ref).items():
            copies[name][part.to].copy_(part.tensor)
        sending.join()
        assert all(torch.equal(copies[name], tensors[name]) for name in tensors)
    del store


def plant_targets_on_cpu() -> None:
    """Leave a micro-batch's targets on the CPU."""
    plain = MicroBatch.to

    def moved(self: MicroBatch, device: torch.device) -> MicroBatch:
        return replace(plain(self, device), targets=self.targets)

    MicroBatch.to = moved  # type: ignore[method-assign]


def plant_no_wait_for_results() -> None:
    """Leave out that the default stream follows a call."""
    _without_wait(lambda waiting, other: waiting is pretended.DEFAULT)


def plant_no_wait_for_callers() -> None:
    """Leave out that a call follows the default stream."""
    _without_wait(lambda waiting, other: other is pretended.DEFAULT)


def _without_wait(left_out: Callable[[Any, Any], bool]) -> None:
    plain = pretended.Stream.wait_stream

    def wait(waiting: Any, other: Any) -> None:
        if not left_out(waiting, other):
            plain(waiting, other)

    pretended.Stream.wait_stream = wait  # type: ignore[method-assign, assignment]


def main(folder: str, name: str, fault: str = "") -> None:
    if fault:
        globals()[f"plant_{fault}"]()
    check = globals().get(f"check_{name}")
    with pretended.pretending():
        check(Path(folder)) if check else check_ppo(Path(folder), name)
    print(dict(pretended.WAITS))
    assert not pretended.MISTAKES, pretended.MISTAKES


if __name__ == "__main__":
    main(*sys.argv[1:])
