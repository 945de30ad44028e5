"""Processes that share GPUs: the order in which they start, and the memory that they hand over."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raising import raises
from stretto.assembly.run_models import NO_OVERRIDES
from stretto.config import Config
from stretto.errors import RankError
from stretto.models.load import load_causal_lm
from stretto.models.lora import add_lora
from stretto.runtime import learner_service as learners
from stretto.runtime import process_messages, scorer_roles
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.placement import places
from stretto.runtime.process_messages import TRAINED, RoleSetup
from stretto.runtime.processes import ProcessWorkers
from stretto.runtime.role_services import ScorerService
from stretto.training.trained import LearningRate, TrainedModel
from stretto.types import WeightsRef


def workers_of(gpus: int, **settings: Any) -> ProcessWorkers:
    """Workers with their placement, and none of them started."""
    workers = object.__new__(ProcessWorkers)
    workers._config = Config.model_validate({"runtime": "local", **settings})
    workers._processes = places(workers._config, 8, gpus)
    workers._overrides = NO_OVERRIDES
    return workers


def opened(workers: ProcessWorkers, fails: str = "") -> list[tuple[str, str]]:
    """Open all; return how each began and ended, in order. Each ends when none can begin."""
    log, lock = list[tuple[str, str]](), Lock()
    names = {process.name for process in workers._processes}
    looks = {p.name for p in workers._processes if p.takes_share(workers._config.rollout)}
    others_began = threading.Event()

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, *_: Any, **__: Any) -> None:
            name = self.name
            with lock:
                log.append(("begins", name))
                if names - looks <= {began for event, began in log if event == "begins"}:
                    others_began.set()
            assert others_began.wait(10)  # none of them waits for another
            if name == fails:
                raise RankError("no", code="failed")
            with lock:
                log.append(("is open", name))

        def close(self) -> None:
            pass

    workers.groups = [Group(process.name) for process in workers._processes]  # type: ignore[misc]
    workers._start_all()
    return log


ENGINES = {"engine": "vllm", "engines": 4}
SHARED: dict[str, Any] = {"cluster": {"processes": [{"roles": ["learner"], "ranks": 2}]}}


def test_vllm_starts_last_and_alone_on_its_gpu() -> None:
    """Four engines on the two GPUs of the learner, of which the scorers have one each."""
    workers = workers_of(2, rollout=ENGINES, **SHARED)
    on = {process.name: set(process.devices) for process in workers._processes}
    assert [on[f"generator {i}"] for i in range(4)] == [{"cuda:0"}, {"cuda:1"}] * 2
    log = opened(workers)
    looks = {f"generator {i}" for i in range(4)}
    assert len(log) == 2 * len(on)
    for name in looks:
        before = log[: log.index(("begins", name))]
        begun = {other for event, other in before if event == "begins" and on[other] & on[name]}
        assert {other for other in on if on[other] & on[name]} - looks <= begun
        assert all(("is open", other) in before for other in begun)


def test_engines_that_share_no_gpu_start_side_by_side() -> None:
    """So does Stretto's own engine, which looks for no memory, wherever it is."""
    for rollout in ({"engine": "torch", "engines": 4}, {"engine": "vllm"}):
        workers = workers_of(2, rollout=rollout, model={"device": "cpu"}, **SHARED)
        waits = [workers._before(process, {}) for process in workers._processes]
        assert not any(waits)
    apart = workers_of(8, rollout=ENGINES, **SHARED)
    opening: dict[str, Future[Any]] = {process.name: Future() for process in apart._processes}
    engines = [p for p in apart._processes if p.name.startswith("generator")]
    for engine in engines:
        assert apart._before(engine, opening) == [opening[engine.name]]


def test_an_engine_does_not_start_beside_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = workers_of(2, rollout=ENGINES, **SHARED)
    with raises(RankError, "failed"):
        opened(workers, fails="learner")


def test_who_shares_gpus_is_told_so() -> None:
    workers = workers_of(2, rollout=ENGINES, **SHARED)
    assert all(map(workers._shares_gpus, workers._processes))
    apart = workers_of(8, rollout=ENGINES, **SHARED)
    assert not any(map(apart._shares_gpus, apart._processes))
    on_cpus = workers_of(0, rollout=ENGINES, **SHARED)
    assert not any(map(on_cpus._shares_gpus, on_cpus._processes))


def setup_of(*, shares_gpus: bool, device: str = "cuda:1") -> RoleSetup:
    return RoleSetup(Config(), NO_OVERRIDES, 1, [device], shares_gpus=shares_gpus)


@pytest.mark.parametrize("shares_gpus", [True, False])
def test_a_learner_frees_what_it_has_reserved_before_its_weights_travel(
    shares_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty_cache"))
    ref = WeightsRef("actor", 1, "mark")

    def publish() -> dict[str, WeightsRef]:
        done.append("publish")
        return {"actor": ref}

    stand_in: Any = SimpleNamespace(publish=publish, train=lambda batch: done.append("train"))
    give_back = setup_of(shares_gpus=shares_gpus).give_back
    nothing: Any = None
    service = LearnerService(stand_in, nothing, nothing, nothing, give_back=give_back)
    service.publish()
    assert done == ["publish", *(["empty_cache"] if shares_gpus else [])]


@pytest.mark.parametrize("streams", [True, False])
def test_a_scorer_frees_what_it_has_reserved_unless_it_streams(streams: bool) -> None:
    done = list[str]()
    info = SimpleNamespace(streams=streams, name="reference")
    scorer: Any = SimpleNamespace(info=info, finish=lambda ids: done.append("finish"))
    service: Any = ScorerService(scorer, give_back=lambda: done.append("give_back"))
    service.finish([1])
    assert done == (["finish"] if streams else ["finish", "give_back"])


@pytest.mark.parametrize(
    ("device", "shares_gpus", "variables", "grows"),
    [
        ("cuda:1", False, {}, True),
        ("cuda:1", True, {}, False),
        ("cpu", False, {}, False),
        ("cuda:1", False, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False),
        ("cuda:1", False, {"PYTORCH_ALLOC_CONF": ""}, False),
    ],
)
def test_segments_of_a_learner_grow_on_gpus_of_its_own(
    device: str,
    shares_gpus: bool,
    variables: dict[str, str],
    grows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[str]()
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    monkeypatch.setattr(process_messages.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(learners, "pick_device", torch.device)
    learners._grow_segments(setup_of(shares_gpus=shares_gpus, device=device))
    assert given == (["expandable_segments:True"] if grows else [])


def test_beside_a_learner_of_adapters_the_reference_is_its_actor_without_them(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_messages.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(process_messages.dist, "get_world_size", lambda: 1)
    model = {"name": str(tiny_folder), "dtype": "float32", "lora_rank": 2}
    config = Config.model_validate({"model": model, "threads": 1})
    device = torch.device("cpu")
    actor = add_lora(load_causal_lm(tiny_folder, torch.float32, device), config.model, "CAUSAL_LM")
    shared = {TRAINED: {"actor": TrainedModel(actor, LearningRate(1.0, 1), config.training)}}
    setup = RoleSetup(config, NO_OVERRIDES, 1, ["cpu"], offload=True, shared=shared)
    service = scorer_roles.reference(setup)
    held = {p.data_ptr() for p in actor.parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in service.worker.model.parameters()} == held
    assert service.offloaded is None  # they are the learner's, too
    alone = scorer_roles.reference(replace(setup, shared={}))
    assert not held & {p.data_ptr() for p in alone.worker.model.parameters()}
    assert alone.offloaded is not None
    assert alone.marks == service.marks
    assert not any("lora" in name for name, _ in alone.worker.model.named_parameters())
