"""The preset ``auto`` in virtual time: its choices, its bounds, and the way back. No torch."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stretto.config import ScheduleConfig
from stretto.config.knobs import RoundKnobs, Settings
from stretto.plain import dumps, parse
from stretto.runtime.sim import tuning
from stretto.runtime.sim.cluster import (
    Cluster,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
)
from stretto.runtime.sim.costs import DecodeCost, GeneratorCost, PrefillCost, TrainCost
from stretto.runtime.sim.lengths import Distribution, Drifting, Lognormal, Uniform
from stretto.runtime.sim.simulate import SimResult, simulate
from stretto.runtime.sim.tuning import AutoTuner, DescribedCosts, fixed, settling
from stretto.runtime.sim.turns import AnswerLatency, SimEpisodes

BATCH, STEPS, LATE = 8, 44, 20


def cluster(
    lengths: Distribution,
    *,
    score_s: float = 1e-4,
    train_s: float = 3e-4,
    schedule: ScheduleConfig | None = None,
    episodes: SimEpisodes | None = None,
    steps: int = STEPS,
    samples: int = 1,
) -> Cluster:
    """A generator, two scorers on a device, and a learner. ``score_s`` and ``train_s`` are seconds
    a token."""
    generator = GeneratorCost(
        decode=DecodeCost(step_s=0.01, row_s=0.0002), prefill=PrefillCost(token_s=1e-5), load_s=0.05
    )
    scoring = PrefillCost(call_s=0.01, token_s=score_s)
    return Cluster(
        generators=(GeneratorRole(devices=(0,), cost=generator),),
        scorers=(
            ScorerRole(name="reward", devices=(1,), cost=scoring),
            ScorerRole(name="reference", kind="logprobs", devices=(1,), cost=scoring),
        ),
        learner=LearnerRole(
            devices=(2,), cost=TrainCost(step_s=0.1, token_s=train_s, publish_s=0.05)
        ),
        workload=Workload(
            batch=BATCH,
            samples_per_prompt=samples,
            steps=steps,
            max_new_tokens=512,
            prompt_tokens=Uniform(low=50, high=150),
            response_tokens=lengths,
            episodes=episodes,
        ),
        schedule=schedule or ScheduleConfig(),
    )


def rate(result: SimResult, first: int = 0) -> float:
    """Tokens a second from a step on."""
    steps = result.steps[first:]
    seconds = sum(step["timing_s/step"] for step in steps)
    return sum(step["perf/throughput"] * step["timing_s/step"] for step in steps) / seconds


LENGTHS: dict[str, Distribution] = {
    "constant": Uniform(low=200, high=200),
    "tail": Lognormal(median=100, p95=400),
    "drifting": Drifting(first=40, last=200, over=300),
}
WAITS = SimEpisodes(turns=Uniform(low=2, high=3), wait_s=AnswerLatency(median=1, p95=4))
WORKLOADS: dict[str, dict[str, Any]] = {
    "slow scorer": {"lengths": LENGTHS["constant"], "score_s": 4e-4},
    "slow learner": {"lengths": LENGTHS["tail"], "train_s": 8e-4},
    "drift": {"lengths": LENGTHS["drifting"]},
    "waits": {"lengths": Lognormal(median=40, p95=120), "episodes": WAITS},
}


FIXED = (
    RoundKnobs("chunk", chunk_tokens=16),
    RoundKnobs("rollout", chunk_tokens=16),
    RoundKnobs("chunk", lag=1, chunk_tokens=16),
    RoundKnobs("batch", lag=1),
    RoundKnobs("chunk", delta=BATCH, chunk_tokens=16),
    RoundKnobs("rollout", delta=BATCH // 2, chunk_tokens=32),
)
"""The first two need no older data. benchmarks/simulated.py compares with all others."""


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("name", WORKLOADS)
def test_after_twenty_steps_it_is_about_as_fast_as_the_best_fixed_knobs(
    name: str, bound: int
) -> None:
    """Over the run it is faster than 0.97 of the plain schedule, and no token is older."""
    workload = WORKLOADS[name]
    schedule = ScheduleConfig(preset="auto", max_staleness=bound)
    result = simulate(cluster(**workload, schedule=schedule))
    plain = simulate(cluster(**workload))
    best = rate(plain, LATE)
    for knobs in FIXED[: 2 if bound == 0 else None]:
        best = max(best, rate(simulate(cluster(**workload, schedule=fixed(schedule, knobs))), LATE))
    assert rate(result, LATE) > 0.95 * best
    assert rate(result) > 0.97 * rate(plain)
    assert max(step["staleness/max"] for step in result.steps) <= bound


def test_it_lets_the_learner_start_on_groups_if_permitted_and_faster() -> None:
    schedule = ScheduleConfig(preset="auto", train_on="group")
    workload: dict[str, Any] = {**WORKLOADS["slow learner"], "samples": 2}
    result = simulate(cluster(**workload, schedule=schedule))
    _, kept = result.decisions[-1]
    assert re.search(r"keeps score on (rollout|chunk), .*, train on group", kept)
    assert max(step["staleness/max"] for step in result.steps) == 0
    groups = RoundKnobs("rollout", chunk_tokens=16, train_on="group")
    best = rate(simulate(cluster(**workload, schedule=fixed(schedule, groups))), LATE)
    assert rate(result, LATE) > 0.95 * best
    batches = simulate(cluster(**workload, schedule=ScheduleConfig(preset="auto")))
    assert rate(result, LATE) > 1.05 * rate(batches, LATE)


@pytest.mark.parametrize(("score_s", "score_on"), [(1e-5, "batch"), (3e-5, "chunk")])
def test_it_changes_no_knob_for_less_than_two_percent(score_s: float, score_on: str) -> None:
    """With ``score_on`` in addition to over-commitment the predictions are 1.66 in place of 1.64,
    and for slower scorers 1.69 in place of 1.64."""
    schedule = ScheduleConfig(preset="auto", max_staleness=1)
    result = simulate(cluster(LENGTHS["tail"], score_s=score_s, schedule=schedule, steps=18))
    _, trying = result.decisions[0]
    assert trying.startswith(f"auto: tries score on {score_on}, overcommit 4, lag 0")


def test_it_says_what_it_tries_and_measures() -> None:
    schedule = ScheduleConfig(preset="auto")
    result = simulate(cluster(**WORKLOADS["slow scorer"], schedule=schedule))
    (tried, trying), (kept, keeping) = result.decisions[:2]
    assert (tried, kept) == (5, 8)  # the first two steps warm up, and three are a measurement
    text, predicted = trying.split(": predicted ")
    assert text == "auto: tries score on chunk, overcommit 0, lag 0, chunk tokens 8"
    assert keeping.startswith(
        f"auto: keeps{text.removeprefix('auto: tries')}: predicted {predicted}"
    )
    measured = float(keeping.rpartition("measured ")[2].rstrip("x"))
    assert measured == pytest.approx(float(predicted.rstrip("x")), rel=0.02)
    assert [step["schedule/score_on"] for step in result.steps[4:7]] == [0, 2, 2]
    assert result.steps[-1]["schedule/measured"] == pytest.approx(measured, abs=0.005)
    assert [step["schedule/chunk_tokens"] for step in result.steps[-2:]] == [8, 8]


def test_it_goes_back_from_what_only_the_prediction_finds_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulated scorer is slow, so that streaming pays, and the real one has costly calls."""
    told = cluster(**WORKLOADS["slow scorer"])
    monkeypatch.setattr(DescribedCosts, "cluster", lambda self, number: told)
    costly = PrefillCost(call_s=0.5, token_s=1e-5)
    real = cluster(LENGTHS["constant"], schedule=ScheduleConfig(preset="auto"), steps=120)
    scorers = [scorer.model_copy(update={"cost": costly}) for scorer in real.scorers]
    real = real.model_copy(update={"scorers": tuple(scorers)})
    result = simulate(real)
    kinds = [line.split()[1] for _, line in result.decisions]
    assert kinds[:2] == ["tries", "goes"]
    assert "keeps" not in kinds
    assert result.steps[-1]["schedule/score_on"] == 0
    plain = simulate(real.model_copy(update={"schedule": ScheduleConfig()}))
    assert rate(result) > 0.97 * rate(plain)


def test_its_state_continues_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[dict[str, Any]] = []
    judge = AutoTuner.observe

    def observe(self: AutoTuner, feedback: Any) -> None:
        judge(self, feedback)
        states.append(parse(dumps(self.state_dict())))

    monkeypatch.setattr(AutoTuner, "observe", observe)
    described = cluster(LENGTHS["tail"], schedule=ScheduleConfig(preset="auto", max_staleness=1))
    simulate(described)
    settings = Settings(BATCH, 1, 512, STEPS)
    for state in states[::5]:
        again = AutoTuner(described.schedule, settings, DescribedCosts(described))
        again.load_state_dict(state)
        assert parse(dumps(again.state_dict())) == state
        assert again.knobs == RoundKnobs(*(state["trial"] or state["current"]))


def test_two_runs_decide_alike() -> None:
    described = cluster(
        LENGTHS["drifting"], schedule=ScheduleConfig(preset="auto", max_staleness=2)
    )
    first, second = simulate(described), simulate(described)
    assert first.decisions == second.decisions
    assert first.makespan_s == second.makespan_s


def test_simulations_take_a_hundredth_of_the_expected_time() -> None:
    described = cluster(LENGTHS["tail"], schedule=ScheduleConfig(preset="auto", max_staleness=2))
    spent: list[float] = []
    original = AutoTuner._decide

    def decide(self: AutoTuner) -> None:
        original(self)
        expected_s = self._elapsed_s / self._round * STEPS
        spent.append(self._simulated_s - max(tuning.FIRST_S, tuning.SHARE * expected_s))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoTuner, "_decide", decide)
        simulate(described)
    search_s = 2 * tuning.SEARCHED * (2 * tuning.WARM + 8) * (0.0015 + 0.00012 * BATCH)
    assert max(spent) < search_s


def test_a_run_that_is_too_short_for_two_searches_makes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if its speed or its lengths drift, for lengths with a tail do so by chance."""
    searches: list[int] = []
    search = AutoTuner._search

    def counted(self: AutoTuner, rounds: int) -> tuple[RoundKnobs, float]:
        searches.append(self._round)
        return search(self, rounds)

    monkeypatch.setattr(AutoTuner, "_search", counted)
    monkeypatch.setattr(AutoTuner, "_drifted", True)
    monkeypatch.setattr(tuning, "SHARE", 0.0)
    simulate(cluster(LENGTHS["tail"], schedule=ScheduleConfig(preset="auto")))
    assert searches == [5]


@pytest.mark.parametrize(("rounds", "searched"), [(5, 5), (4, 4), (3, 3), (2, 0)])
def test_a_search_simulates_as_many_rounds_as_fit(
    rounds: int, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 5 five rounds are known. A search takes two more, and at least three known ones."""
    searches: list[int] = []
    search = AutoTuner._search

    def counted(self: AutoTuner, rounds: int) -> tuple[RoundKnobs, float]:
        searches.append(rounds)
        return search(self, rounds)

    monkeypatch.setattr(AutoTuner, "_search", counted)
    monkeypatch.setattr(tuning, "SHARE", 0.0)
    first_s = tuning.SEARCHED * (2 + rounds) * (0.0015 + 0.00012 * BATCH)
    monkeypatch.setattr(tuning, "FIRST_S", 1.001 * first_s)
    simulate(cluster(LENGTHS["tail"], schedule=ScheduleConfig(preset="auto")))
    assert searches[:1] == ([searched] if searched else [])


def test_a_turn_takes_as_long_to_simulate_as_three_responses() -> None:
    assumed_s: list[float] = []
    original = AutoTuner._decide

    def decide(self: AutoTuner) -> None:
        original(self)
        turns = sum(len(turns) for *_, turns in self._responses) / len(self._responses)
        assumed_s.append(self._seconds_to_simulate(2) - 2 * (0.0015 + 0.00012 * BATCH))
        assert 2 <= turns <= 3
        assert assumed_s[-1] == pytest.approx(2 * 0.00012 * BATCH * 3 * turns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoTuner, "_decide", decide)
        schedule = ScheduleConfig(preset="auto")
        simulate(cluster(**WORKLOADS["waits"], schedule=schedule, steps=8))
    assert assumed_s


def test_trials_of_overcommitment_end_after_an_even_number_of_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the sixth one on, as rounds of short responses and of carried long ones alternate."""
    better = RoundKnobs("rollout", delta=BATCH, chunk_tokens=16)
    ratios = {7: 0.9, 8: 1.2}  # by round of the trial

    def speedup(self: AutoTuner, before: RoundKnobs) -> float:
        return ratios.get(len(self._measured), 1.0)

    monkeypatch.setattr(AutoTuner, "_search", lambda self, rounds: (better, 1.2))
    monkeypatch.setattr(AutoTuner, "_speedup", speedup)
    schedule = ScheduleConfig(preset="auto", max_staleness=1)
    tried, kept = simulate(cluster(LENGTHS["tail"], schedule=schedule)).decisions[:2]
    assert (tried[0], kept[0]) == (5, 5 + settling(RoundKnobs(), better) + 8)
    assert kept[1].endswith("predicted 1.20x, measured 1.20x")


@pytest.mark.parametrize(
    ("before", "after", "rounds"),
    [
        (RoundKnobs("batch"), RoundKnobs("chunk"), 0),
        (RoundKnobs(lag=1), RoundKnobs("chunk", lag=1), 1),
        (RoundKnobs(lag=0), RoundKnobs(lag=1), 1),
        (RoundKnobs(lag=1), RoundKnobs(lag=0), 2),
        (RoundKnobs(delta=0), RoundKnobs(delta=8), 2),
    ],
)
def test_rounds_that_mix_old_and_new_knobs(
    before: RoundKnobs, after: RoundKnobs, rounds: int
) -> None:
    assert settling(before, after) == rounds
