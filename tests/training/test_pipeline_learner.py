"""Training through pipelines: the same steps as in one process, and what may go wrong."""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from episode_helpers import WEIGHTS, as_episodes
from helpers import critic_of, llama, make_learner, make_rollouts, train_on
from learner_helpers import make_batch
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from run_helpers import worker_of
from stretto.config import Config, ModelConfig, PipelineConfig, recipes
from stretto.errors import ConfigError, LearnerError, ModelError, RankError
from stretto.models.lora import add_lora
from stretto.models.weights import fingerprint
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.pipeline_schedule import evaluate
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.training import pipelined
from stretto.training.backprop import into_micro_batches
from stretto.training.learner import PolicyLearner
from stretto.training.pipelined import Planner
from stretto.training.trained import LearningRate
from stretto.workers.forkserver import NAME
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

SHAPES = [(3, 7), (20, 5), (5, 1), (2, 9), (8, 6), (3, 4), (4, 12), (2, 3)]
"""Prompt and response lengths of a batch."""
QUICK = {"ranks": 2, "seconds": 0.2}
UPDATES = 10
ROUNDING = {"val/clipfrac_avg"}
"""Not compared: counts values whose clipped error is larger, be it by a rounding error."""
Stats = Mapping[str, float]


def settings(**sections: Any) -> dict[str, Any]:
    """Settings of a batch whose old policy is not the present one."""
    training = {"lr": 1e-3, "critic_lr": 2e-3, "ratio_tolerance": 100.0, "weight_decay": 0.01}
    sections["training"] = {**training, **sections.get("training", {})}
    sections["rollout"] = {"batch": len(SHAPES), **sections.get("rollout", {})}
    sections["pipeline"] = QUICK | sections.get("pipeline", {})
    return sections


def models(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    actor = llama(dtype=dtype)
    return actor, critic_of(actor)


def partly_frozen_models(dtype: torch.dtype) -> tuple[Any, Any]:
    """On the rank of their first stages both have nothing to train, the critic but its head."""
    actor, critic = models(dtype)
    actor.model.embed_tokens.requires_grad_(False)
    actor.model.layers[0].requires_grad_(False)
    critic.requires_grad_(False)
    critic.score.requires_grad_(True)
    return actor, critic


def lora_models(_: torch.dtype) -> tuple[Any, Any]:
    actor, critic = models()
    lora = ModelConfig(lora_rank=2)
    return add_lora(actor, lora, "CAUSAL_LM"), add_lora(critic, lora, "SEQ_CLS")


class Host:
    """A rank that holds one trainer after the other."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: Any = None

    def make(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._made = make(self._rank, *arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._made, method)(*arguments)


class LentRanks:
    """Two ranks that several tests use in turn, as they take seconds to start."""

    hosts: RankGroup | None = None

    def __init__(
        self, spec: GroupSpec, make: Callable[..., Any], arguments: tuple[Any, ...], **_: Any
    ) -> None:
        assert spec.size == 2
        self._make = make, arguments

    def start(self) -> None:
        if LentRanks.hosts is None:
            LentRanks.hosts = RankGroup(GroupSpec(2), Host).start()
        LentRanks.hosts.call(Host.make, *self._make)

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self.call_each(method, [args, args])

    def call_each(
        self, method: Callable[..., Any], per_rank: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        assert LentRanks.hosts
        try:
            return LentRanks.hosts.call_each(
                Host.call, [(method.__name__, args) for args in per_rank]
            )
        except RankError:
            LentRanks.hosts = None  # they have been ended; the next test starts others
            raise

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def ranks_are_ended() -> Iterator[None]:
    yield
    if LentRanks.hosts:
        LentRanks.hosts.close()
        LentRanks.hosts = None  # the tests of a module may run in two parts


@pytest.fixture
def lent_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "RankGroup", LentRanks)


@contextmanager
def pipelined_learner(
    actor: Any, critic: Any, given: Mapping[str, Any], snapshots: Sequence[str] = ()
) -> Iterator[PolicyLearner]:
    config = Config.model_validate(given)
    t = config.training
    rates: Any = {
        "actor": LearningRate(t.lr, UPDATES),
        "critic": LearningRate(t.critic_lr, UPDATES),
    }
    staged = pipelined.start(actor, critic, config, rates, 2)
    models = staged.models["actor"], staged.models["critic"]
    try:
        yield PolicyLearner(*models, staged, config, WEIGHTS, snapshots=snapshots)
    finally:
        staged.ranks.close()


def local_learner(actor: Any, critic: Any, given: Mapping[str, Any]) -> PolicyLearner:
    return make_learner(actor, critic, {**given, "pipeline": {}}, updates=UPDATES)


def assert_same_figures(got: Stats, expected: Stats, rel: float = rounding(GRADIENT_TERMS)) -> None:
    plain = {k: v for k, v in got.items() if not k.startswith("pipeline/")}
    assert plain.keys() == expected.keys()
    for name in expected.keys() - ROUNDING:
        value = expected[name]
        assert plain[name] == pytest.approx(value, rel=rel, abs=rounding(GRADIENT_TERMS)), name


def assert_same_weights(got: Any, expected: Any, atol: float = rounding(GRADIENT_TERMS)) -> None:
    """After updates that move by 1e-3, and enlarge differences in the smallest gradients."""
    for (name, p), q in zip(got.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=atol, msg=name)


# -- the same steps ------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "fused, ragged, epochs of mini-batches": {
        "training": {
            "epochs": 2,
            "minibatches": 2,
            "microbatch_tokens": 40,
            "grad_clip": 0.5,
            "lr_schedule": "linear",
        },
    },
    "serial, KL in the loss": {
        "pipeline": {"schedule": "serial", "micro_batches": 4},
        "algorithm": {"kl_in": "loss", "kl_target": 0.1, "entropy_coef": 0.03},
    },
    "two pipelines of the critic, which trains alone at first": {
        "pipeline": {"critic_stages": 1},
        "critic": {"freeze_steps": 1},
        "training": {"microbatch_tokens": 40},
    },
    "two pipelines of the actor, proximal policy": {
        "pipeline": {"actor_stages": 1, "micro_batches": 6},
        "algorithm": {"old_policy": "proximal", "correction": "truncate"},
        "training": {"minibatches": 1, "epochs": 2},
    },
    "the policy before the step is the one under training": {
        "algorithm": {"old_policy": "proximal", "correction": "truncate"},
        "training": {"microbatch_tokens": 40},
    },
    "LoRA": {"training": {"microbatch_tokens": 60}},
    "frozen in part": {"training": {"lr_schedule": "linear", "minibatches": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(case: str, lent_ranks: None) -> None:
    """Figures, weights and state, and the state put into a learner of the other kind."""
    makers = {"LoRA": lora_models, "frozen in part": partly_frozen_models}
    make: Callable[[torch.dtype], tuple[Any, Any]] = makers.get(case, models)
    given = settings(**copy.deepcopy(CASES[case]))
    ours, theirs, others = (make(torch.float32) for _ in range(3))
    start = [fingerprint(m.named_parameters()) for m in ours]
    plain = make_rollouts(*models(), SHAPES)
    batches = [plain, plain[:7], plain, plain]
    local = local_learner(*theirs, given)
    with pipelined_learner(*ours, given) as learner:
        for step, batch in enumerate(batches[:3]):
            assert_same_figures(train_on(learner, batch), train_on(local, batch))
            for got, expected in zip(ours, theirs, strict=True):
                assert_same_weights(got, expected)
            frozen = step < learner.config.critic.freeze_steps
            moved = [fingerprint(m.named_parameters()) for m in ours]
            assert (moved[0] == start[0], moved[1] == start[1]) == (frozen, False)
        for each in (learner, local):  # as when there are fewer mini-batches than planned
            each.trained["actor"].skip()
        # What one kind of learner has saved another goes on from, there and back.
        saved = copy.deepcopy(learner.state_dict())
        assert_same_structure(saved, local.state_dict())
        resumed = local_learner(*others, given)
        resumed.load_state_dict(saved)
        expected_figures = train_on(local, batches[3])
        assert_same_figures(train_on(resumed, batches[3]), expected_figures)
        learner.load_state_dict(copy.deepcopy(resumed.state_dict()))
        for got, expected in zip(ours, others, strict=True):
            assert_same_weights(got, expected, atol=0)
        assert_same_figures(train_on(learner, plain), train_on(resumed, plain))
        assert learner.publish()["actor"].version == 1


OF_EPISODES: list[dict[str, Any]] = [
    {},
    {"importance_sampling_level": "sequence", "clip": 0.05},
    {"old_policy": "proximal", "correction": "truncate", "correction_level": "sequence"},
]


@pytest.mark.parametrize("algorithm", OF_EPISODES, ids=["tokens", "responses", "corrected"])
def test_steps_on_episodes_are_those_of_one_process(
    algorithm: dict[str, Any], lent_ranks: None
) -> None:
    """Turns with context between them and forks; a sample each, or an episode, in a micro-batch."""
    given = settings(algorithm=algorithm, training={"microbatch_tokens": 40})
    ours, theirs = models(), models()
    batch = as_episodes(make_batch(ours[0], {"name": "ppo", **algorithm}))
    local = local_learner(*theirs, given)
    with pipelined_learner(*ours, given) as learner:
        for _ in range(2):
            assert_same_figures(train_on(learner, batch), train_on(local, batch))
            for got, expected in zip(ours, theirs, strict=True):
                assert_same_weights(got, expected)


def assert_same_structure(got: Any, expected: Any, path: str = "") -> None:
    """The same keys and tensors within rounding: a checkpoint does not say who wrote it."""
    assert type(got) is type(expected), path
    if isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key in expected:
            assert_same_structure(got[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, path
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-6, msg=path)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-6), path
    else:
        assert got == expected, path


def test_bfloat16_models_have_their_masters_on_the_ranks(lent_ranks: None) -> None:
    """Updates far below what bfloat16 can tell apart add up there, and come back rounded."""
    given = settings(training={"lr": 1e-5, "critic_lr": 1e-5})
    ours, theirs = models(torch.bfloat16), models(torch.bfloat16)
    batch = make_rollouts(*models(), SHAPES)
    local = local_learner(*theirs, given)
    with pipelined_learner(*ours, given) as learner:
        for _ in range(2):
            assert_same_figures(train_on(learner, batch), train_on(local, batch), rel=0.02)
        masters = [x.state_dict()["models"] for x in (learner, local)]
    for name, model in zip(("actor", "critic"), ours, strict=True):
        got, expected = (m[name]["masters"] for m in masters)
        assert list(got) == list(expected)
        moved = 0
        for key, weight in model.named_parameters():
            assert got[key].dtype == torch.float32
            assert torch.equal(weight, got[key].bfloat16())
            torch.testing.assert_close(got[key], expected[key], rtol=0, atol=4.1e-5)
            moved += int((got[key] != weight.float()).sum())
        assert moved > 1000


def test_a_snapshot_stays_while_training_goes_on(lent_ranks: None) -> None:
    actor, critic = models()
    batch = make_rollouts(actor, critic, SHAPES)
    with pipelined_learner(actor, critic, settings(), ["actor"]) as learner:
        train_on(learner, batch)
        published = learner.publish()
        then = copy.deepcopy(dict(actor.named_parameters()))
        assert not published["critic"].channel
        tensors = learner.channel.get(published["actor"])
        assert set(tensors) == set(then)
        assert published["actor"].fingerprint == fingerprint(then.items())
        train_on(learner, batch)
        for name, p in actor.named_parameters():
            assert torch.equal(tensors[name], then[name])
            assert not torch.equal(tensors[name], p)


# -- numbers that stop a run ---------------------------------------------------------------------


def test_a_disagreeing_engine_stops_the_run_before_a_weight_moves(lent_ranks: None) -> None:
    actor, critic = models()
    batch = make_rollouts(actor, critic, SHAPES)
    with pipelined_learner(actor, critic, settings(training={"ratio_tolerance": 1e-3})) as learner:
        with raises(LearnerError, "policies-disagree"):
            train_on(learner, batch)
        masters = learner.state_dict()["models"]["actor"]["masters"]
        for name, p in actor.named_parameters():
            assert torch.equal(masters[name], p)


def test_an_infinite_gradient_stops_the_run_and_leaves_the_weights(lent_ranks: None) -> None:
    actor, critic = models()
    batch = make_rollouts(actor, critic, SHAPES)
    with pipelined_learner(actor, critic, settings()) as learner:
        state = learner.state_dict()
        before = state["models"]["critic"]["masters"]
        last = critic.base_model.layers[-1].mlp.down_proj.weight
        before[next(n for n, p in critic.named_parameters() if p is last)].fill_(1e38)
        learner.load_state_dict(copy.deepcopy(state))
        with raises(LearnerError, "gradient-not-finite"):
            train_on(learner, batch)
        after = learner.state_dict()["models"]["critic"]["masters"]
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_pipelines_without_a_response_change_nothing(lent_ranks: None) -> None:
    """With one response left for two pipelines the other gets a blank micro-batch."""
    given = settings(
        pipeline={"critic_stages": 1},
        rollout={"batch": 2},
        algorithm={"kl_in": "loss", "entropy_coef": 0.03},
    )
    ours, theirs = models(), models()
    one = make_rollouts(*models(), SHAPES)[4:5]
    local = local_learner(*theirs, given)
    with pipelined_learner(*ours, given) as learner:
        for _ in range(3):  # also where latencies would be measured
            figures = train_on(learner, one)
            assert_same_figures(figures, train_on(local, one))
            assert "pipeline/predicted_s" not in figures
            for got, expected in zip(ours, theirs, strict=True):
                assert_same_weights(got, expected)
        assert_same_structure(learner.state_dict(), local.state_dict())


def test_a_rank_that_dies_in_the_middle_of_a_step_ends_it_with_the_cause() -> None:
    actor, critic = models()
    batch = make_rollouts(actor, critic, SHAPES)
    caught: list[BaseException] = []

    def train(learner: PolicyLearner) -> None:
        try:
            train_on(learner, batch)
        except BaseException as error:
            caught.append(error)

    with pipelined_learner(actor, critic, settings()) as learner:
        train_on(learner, batch)
        held = fingerprint(actor.named_parameters())
        ranks = ranks_of_this_process()[-2:]
        victim = ranks[1]
        victim.suspend()  # so that the step cannot end before it dies
        thread = threading.Thread(target=train, args=(learner,))
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        os.kill(victim.pid, signal.SIGKILL)
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(caught[0], RankError)
        assert "rank 1 of 2 was killed by SIGKILL" in str(caught[0])
        assert not any(rank.is_running() for rank in ranks)
        assert fingerprint(actor.named_parameters()) == held  # the last whole step's


def ranks_of_this_process() -> list[psutil.Process]:
    started = psutil.Process().children(recursive=True)
    return [p for p in started if p.name() == NAME and p.status() != psutil.STATUS_ZOMBIE]


# -- a whole run ---------------------------------------------------------------------------------


def tiny_run(folder: Path, out: Path, ranks: int, **sections: Any) -> Config:
    """The tiny recipe, made smaller, with so many ranks."""
    data = recipes.load("tiny").model_dump()
    small: dict[str, Any] = {
        "steps": 3,
        "threads": 1,
        "warmup_examples": 0,
        "out": str(out),
        "model": {"name": str(folder)},
        "rollout": {"batch": 16},
        "training": {"lr": 1e-3, "warmup_steps": 0, "microbatch_tokens": 64},
        "observe": {"progress": "off", "checkpoint_every": 2},
        "pipeline": {"ranks": ranks, "seconds": 0.2},
    }
    for changes in (small, sections):
        for name, value in changes.items():
            data[name] = data[name] | value if isinstance(value, dict) else value
    return Config.model_validate(data)


ASYNC = {"preset": "async"}


def run(config: Config, *, resume: Any = None, progress: Any = None) -> Any:
    from stretto import runs
    from stretto.observe import RunDirectory
    from stretto.observe.progress import NoProgress

    run_dir = resume or RunDirectory.create(config.out, "r", config)
    runs.train(
        config, run_dir=run_dir, progress=progress or NoProgress(), resume=resume is not None
    )
    return run_dir


def metrics(run_dir: Any) -> list[dict[str, float]]:
    left_out = ("timing_s/", "perf/", "time_s", "utilisation/", "idle_s/")
    lines = [json.loads(line) for line in run_dir.metrics_file.read_text().splitlines()]
    return [{k: v for k, v in m.items() if not k.startswith(left_out)} for m in lines]


def test_a_run_with_lag_is_that_of_one_process(tiny_folder: Path, tmp_path: Path) -> None:
    """The same responses and losses, with weights that are handed over as copies."""
    plain, cut = (
        metrics(run(tiny_run(tiny_folder, tmp_path / str(ranks), ranks, schedule=ASYNC)))
        for ranks in (0, 2)
    )
    assert len(cut) == len(plain) == 3
    for got, expected in zip(cut, plain, strict=True):
        assert_same_figures(got, expected, rel=1e-4)
        assert 0 < got["pipeline/bubble_fraction"] < 1
    assert cut[2]["staleness/max"] == 1
    assert "pipeline/predicted_s" not in cut[0]
    assert cut[2]["pipeline/predicted_s"] > 0


def test_a_run_can_be_resumed_with_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    whole = metrics(run(tiny_run(tiny_folder, tmp_path, 0, steps=4)))
    half = run(tiny_run(tiny_folder, tmp_path, 0, steps=2))
    resumed = metrics(run(tiny_run(tiny_folder, tmp_path, 2, steps=4), resume=half))
    assert len(resumed) == 4
    for got, expected in zip(resumed, whole, strict=True):
        assert_same_figures(got, expected, rel=1e-4)
    assert "pipeline/step_s" not in resumed[1]
    assert resumed[2]["pipeline/step_s"] > 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parts of runs that the test makes."""
    module = importlib.import_module("stretto.runs.training_loop")
    parts: list[Any] = []
    start = module.start
    monkeypatch.setattr(module, "start", lambda *args: parts.append(start(*args)) or parts[-1])
    return parts


@pytest.mark.parametrize("schedule", [{}, ASYNC])
def test_a_rank_that_dies_while_responses_are_generated_ends_the_run(
    tiny_folder: Path, tmp_path: Path, made: list[Any], schedule: dict[str, Any]
) -> None:
    from stretto.observe.progress import NoProgress

    killed_s: list[float] = []

    class Kill(NoProgress):
        """Once a step is made: generation takes long from now on, and a rank dies during it."""

        training, trained_s = False, 0.0

        def step(self, step: int, *_: Any) -> None:
            worker_of(made[0], "generator").decode = lambda *_: [
                time.sleep(0.01) for _ in range(9000)
            ]
            if step == 1:
                learner = worker_of(made[0], "learner")
                self.train, learner.train = learner.train, self.watched
                threading.Thread(target=self.kill, args=[ranks_of_this_process()[-1]]).start()

        def watched(self, batch: Any) -> Any:
            self.training = True
            try:
                return self.train(batch)
            finally:
                self.training, self.trained_s = False, time.monotonic()

        def kill(self, rank: psutil.Process) -> None:
            """Wait for a second without training: with lag, what is there is trained on first."""
            self.trained_s = time.monotonic()
            while self.training or time.monotonic() - self.trained_s < 1.0:
                time.sleep(0.02)
            killed_s.append(time.monotonic())
            rank.kill()

    before = ranks_of_this_process()
    with pytest.raises(RankError, match=r"SIGKILL \(.*\) between two calls\. .* from the last ch"):
        run(tiny_run(tiny_folder, tmp_path, 2, schedule=schedule, steps=6), progress=Kill())
    assert time.monotonic() - killed_s[0] < 10
    assert ranks_of_this_process() == before
    assert (next(tmp_path.iterdir()) / "model" / "model.safetensors").exists()


def test_an_interrupted_run_ends_its_ranks_and_saves_the_last_step(
    tiny_folder: Path, tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.runs.training_loop.UPDATE_S", 1.0)
    from safetensors.torch import load_file

    from stretto.observe.progress import NoProgress

    weights: dict[str, torch.Tensor] = {}

    class Interrupt(NoProgress):
        """Ctrl-C while the second step's pipelines are at work: a rank has stopped."""

        def step(self, step: int, *_: Any) -> None:
            weights.update(
                copy.deepcopy(
                    dict(worker_of(made[0], "learner").trained["actor"].model.named_parameters())
                )
            )
            ranks_of_this_process()[-1].suspend()
            main = threading.main_thread().ident
            assert main
            threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT)).start()

    before = ranks_of_this_process()
    with pytest.raises(KeyboardInterrupt):
        run(tiny_run(tiny_folder, tmp_path, 2), progress=Interrupt())
    assert ranks_of_this_process() == before
    saved = load_file(next(tmp_path.iterdir()) / "model" / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensor, weights[name])


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pipeline": {"ranks": 1}}, "one stage of a model, which is no pipeline"),
        ({"pipeline": {"ranks": 4, "actor_stages": 3}}, "actor_stages = 3 does not divide"),
        ({"pipeline": {"ranks": 2, "critic_stages": 4}}, "critic_stages = 4 does not divide"),
        (
            {"pipeline": {"ranks": 6, "actor_stages": 3, "critic_stages": 2, "micro_batches": 4}},
            "shared evenly by 2 pipelines of the actor and 3 of the critic; choose a multiple of 6",
        ),
        (
            {
                "pipeline": {"ranks": 2},
                "algorithm": {"name": "rloo"},
                "rollout": {"samples_per_prompt": 2},
            },
            "'rloo' has no critic; set pipeline.ranks = 0",
        ),
        ({"pipeline": {"ranks": 2}, "model": {"trust_remote_code": True}}, "trust_remote_code"),
        (
            {"pipeline": {"ranks": 2, "micro_batches": 9}, "training": {"minibatches": 4}},
            "a mini-batch has 8 responses .* ask for 9 micro-batches",
        ),
        ({"pipeline": {"schedule": "gpipe"}}, "must be 'fused' or 'serial'"),
        ({"pipeline": {"seconds": 0}}, "must be greater than 0"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipes.build(sections, "here")


def test_settings_without_effect_are_remarked_upon() -> None:
    config = Config(pipeline=PipelineConfig(schedule="serial", micro_batches=3))
    (remark,) = config.remarks
    assert remark.endswith("while pipeline.ranks is 0: pipeline.schedule, pipeline.micro_batches")
    assert not Config(pipeline=PipelineConfig(ranks=2, schedule="serial")).remarks


def test_more_stages_than_layers_are_refused_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(pipelined, "RankGroup", lambda *args, **_: started.append(args))
    actor, critic = models()
    with (
        raises(ModelError, "too-few-layers", "pipeline.actor_stages = 4", "LlamaModel has 2"),
        pipelined_learner(actor, critic, settings(pipeline={"ranks": 4})),
    ):
        pass
    assert not started


# -- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([10] * 8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ([10] * 8, 5, [[0], [1], [2, 3], [4, 5], [6, 7]]),
        ([10] * 4, 4, [[0], [1], [2], [3]]),
        ([3, 9, 4, 8], 2, [[1, 3], [2, 0]]),
        ([100, 5, 5, 5, 5], 2, [[0], [1, 2, 3, 4]]),
        ([7], 1, [[0]]),
    ],
)
def test_just_so_many_micro_batches_of_like_sizes(
    tokens: list[int], count: int, expected: list[list[int]]
) -> None:
    got = into_micro_batches(tokens, count)
    assert len(got) == count
    assert sorted(i for group in got for i in group) == list(range(len(tokens)))
    cost = max(len(g) * max(tokens[i] for i in g) for g in got)
    assert cost == max(len(g) * max(tokens[i] for i in g) for g in expected)
    if count != 5:
        assert got == expected


def test_serial_is_1f1b_of_the_actor_and_then_of_the_critic() -> None:
    problem = Problem(
        ModelPipelines.of(2, 1, 3, forward=1, backward=2, activation=1.0),
        ModelPipelines.of(1, 2, 2, forward=1, backward=2, activation=1.0),
    )
    words = one_f_one_b(problem).words
    assert [" ".join(word) for word in words] == [
        "0F 0F 0B 0F 0B 0B 1F 1B 1F 1B",
        "0F 0B 0F 0B 0F 0B 2F 2B 2F 2B",
    ]
    critic = ModelPipelines.of(4, 1, 2, forward=1, backward=2, activation=1.0)
    words = one_f_one_b(Problem(critic, critic)).words
    assert [" ".join(word) for word in words] == [
        "0F 0F 0B 0B 1F 1B 1F 1B",
        "0F 0F 0B 0B 1F 1F 1B 1B",
        "0F 0F 0B 0B 1F 1F 1B 1B",
        "0F 0B 0F 0B 1F 1F 1B 1B",
    ]


def test_a_plan_is_made_once_and_again_when_latencies_are_measured() -> None:
    config = PipelineConfig(ranks=2, seconds=0.2)
    planner = Planner(config, {"actor": 3000, "critic": 1500}, seed=0)
    first = planner.plan(4)
    assert planner.plan(4) is first
    assert math.isnan(first.predicted_us)
    actor, critic = first.problem.models
    assert (actor.forward, actor.backward) == ((1000, 1000), (2000, 2000))
    assert (critic.forward, critic.backward) == ((500, 500), (1000, 1000))
    assert (actor.micro_batches, critic.micro_batches) == (4, 4)
    measured = Problem(
        ModelPipelines.of(2, 1, 2, forward=[70, 90], backward=[150, 170], activation=1.0),
        ModelPipelines.of(2, 1, 2, forward=[60, 50], backward=[110, 90], activation=1.0),
    )
    planner.measure(measured)
    again = planner.plan(4)
    assert again.problem.actor.forward == (70, 90)
    assert again.problem.actor.micro_batches == 4
    assert again.predicted_us == evaluate(again.problem, again.schedule).latency
    assert again.predicted_us >= 4 * (90 + 170 + 60 + 110)  # the second device's own work, at least


def test_pipelines_get_the_long_micro_batches_in_turn() -> None:
    """Of two pipelines of the critic each takes a half of the list, of like sums."""
    given = settings(pipeline={"critic_stages": 1, "micro_batches": 4})
    config = Config.model_validate(given)
    nothing: Any = None
    passes = pipelined.PipelinedBackprop(nothing, {}, nothing, nothing, config.pipeline, budget=1)
    assert passes.divide([10, 40, 20, 30]) == [[1], [0], [3], [2]]
    assert len(passes.divide([5, 5, 5])) == 2  # not four, and not three
    assert passes.divide([7]) == [[0]]
