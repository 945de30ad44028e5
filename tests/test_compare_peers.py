"""benchmarks/compare.py: pairs of runs, and what it says about them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import compare

FOLDER = Path(__file__).parents[1] / "benchmarks"

STEADY = [1.5, 1.5, 1.48, 1.52, 1.5, 1.5]
WILD = [1.0, 2.0, 1.5, 1.2, 1.8, 1.4, 1.6, 1.1, 1.9, 1.3, 1.7]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("compare")


def part_of(bench: Any) -> compare.Part:
    programs = [bench.Program(name, []) for name in ("Stretto", "peer", "other peer")]
    part: compare.Part = bench.Part("Title:", "tokens_per_s", "tokens/s", programs)
    return part


class Runs:
    """Fakes runs: Stretto's rate is the round's ratio times the peers' rates, 100 and 50."""

    def __init__(self, bench: Any, ratios: Sequence[float], busy: Sequence[int] = ()) -> None:
        self.bench, self.order = bench, list[str]()
        self.rates: Iterator[float] = iter(ratios)
        self.busy = busy
        self.missing = set[str]()

    def __call__(self, program: compare.Program) -> compare.Run | None:
        if len(self.order) % 3 == 0:
            self.ratio = next(self.rates)
        self.order.append(program.name)
        if program.name in self.missing:
            return None
        rate = {"Stretto": 100 * self.ratio, "peer": 100.0, "other peer": 50.0}[program.name]
        others = 0.4 if (len(self.order) - 1) // 3 in self.busy else 0.01
        result = {"tokens_per_s": rate, "peak_rss_bytes": 2e9, "versions": {}}
        run: compare.Run = self.bench.Run(result, self.bench.Noise(others, 0.0, 0))
        return run


def last_rounds(bench: Any, runs: Runs, limit: int = 11) -> list[compare.Round]:
    *_, rounds = bench.measure(part_of(bench), limit, runs)
    return list(rounds)


def test_a_run_is_paired_with_the_peer_of_its_round(bench: Any) -> None:
    runs = Runs(bench, STEADY)
    rounds, part = last_rounds(bench, runs), part_of(bench)
    assert [pair.ratio for pair in part.pairs(rounds, "peer")] == STEADY[:5]
    assert [pair.ratio for pair in part.pairs(rounds, "other peer")] == [2 * r for r in STEADY[:5]]
    # In turn, and every second round in reverse, so that a drift of the machine cancels.
    assert runs.order[:6] == ["Stretto", "peer", "other peer", "other peer", "peer", "Stretto"]


def test_rounds_end_when_the_ratio_is_known_or_at_the_limit(bench: Any) -> None:
    part = part_of(bench)
    assert len(last_rounds(bench, Runs(bench, STEADY))) == 5
    wild = part.pairs(last_rounds(bench, Runs(bench, WILD)), "peer")
    assert len(wild) == 11
    assert bench.verdict(wild) == (
        "Median 1.50x, 90% interval 1.20 to 1.80: NOT known to 10%."  # third of each end
    )
    steady = part.pairs(last_rounds(bench, Runs(bench, STEADY)), "peer")
    assert bench.verdict(steady) == "Median 1.50x, 90% interval 1.48 to 1.52: known to 10%."


def test_the_interval_holds_the_median_with_binomial_probability(bench: Any) -> None:
    """Of 5 values all lie on one side of the median with 2 / 32, of 4 with 2 / 16. Of 8, at most
    one lies on a side with 2 * (1 + 8) / 256, at most two with 2 * (1 + 8 + 28) / 256."""
    values = [float(i) for i in (3, 1, 2, 5, 4, 8, 7, 6)]
    assert bench.median_interval(values[:4]) is None
    assert bench.median_interval(values[:5]) == (1, 5)
    assert bench.median_interval(values) == (2, 7)
    assert bench.median_interval([]) is None


def test_pairs_of_a_machine_that_is_not_quiet_do_not_count(bench: Any) -> None:
    runs, part = Runs(bench, [9.0, *STEADY], busy=[0]), part_of(bench)
    rounds = last_rounds(bench, runs)
    pairs = part.pairs(rounds, "peer")
    assert [pair.is_quiet for pair in pairs] == [False, *[True] * 5]
    assert bench.verdict(pairs) == (
        "The machine was NOT quiet in 1 of 6 pairs (*). "
        "Median 1.50x, 90% interval 1.48 to 1.52: known to 10%."
    )
    table = bench.tables(part, rounds)
    assert "| 1 | 900 | 40.0%, 0.0%, 0 | 100 | 40.0%, 0.0%, 0 | 9.00x* |" in table
    assert "| 2 | 150 | 1.0%, 0.0%, 0 | 100 | 1.0%, 0.0%, 0 | 1.50x |" in table
    assert "| peer | 100 | 100, 100, 100, 100, 100, 100 | 1.50x | 2.0 GB |" in table


def test_a_machine_that_is_never_quiet_gives_no_ratio(bench: Any) -> None:
    pairs = part_of(bench).pairs(last_rounds(bench, Runs(bench, WILD, range(11))), "peer")
    assert bench.verdict(pairs) == (
        "The machine was NOT quiet in 11 of 11 pairs (*). "
        "No ratio. Median of the disturbed pairs: 1.50x."
    )


def test_few_quiet_pairs_leave_the_ratio_unknown(bench: Any) -> None:
    pairs = part_of(bench).pairs(last_rounds(bench, Runs(bench, STEADY), limit=2), "peer")
    assert bench.verdict(pairs) == (
        "Median 1.50x, unknown interval (5 quiet pairs are needed, there are 2): NOT known to 10%."
    )


def test_without_the_deciding_peer_there_is_one_round(bench: Any) -> None:
    runs = Runs(bench, STEADY)
    runs.missing = {"peer"}
    (only,) = rounds = last_rounds(bench, runs)
    assert set(only) == {"Stretto", "other peer"}
    assert not any("| peer |" in line for line in bench.tables(part_of(bench), rounds))


def test_noise_is_what_other_processes_and_the_hypervisor_took(bench: Any) -> None:
    before = bench.Reading(busy=100.0, steal=1.0, total=1000.0, children=50.0, runnable=0)
    after = bench.Reading(busy=190.0, steal=3.0, total=1100.0, children=120.0, runnable=1)
    noise = bench.Noise.between(before, after)
    assert noise == bench.Noise(others=0.2, steal=0.02, runnable=1)
    quiet = bench.Noise(0.03, 0.02, 0)
    assert quiet.is_quiet
    for change in ({"others": 0.031}, {"steal": 0.021}, {"runnable": 1}):
        assert not quiet._replace(**change).is_quiet


ORPHAN = """
import json, os, time
if not os.fork():
    while time.process_time() < 0.4:
        pass
    os._exit(0)
print(json.dumps({}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's prctl")
def test_a_programs_process_that_outlives_it_is_none_of_others() -> None:
    """In a process of its own, as adopting is for good."""
    code = f"""
import sys; sys.path.insert(0, {str(FOLDER)!r})
import compare
compare.adopt_orphans()
before = compare.Reading.now()
compare.execute(compare.Program("orphan", [sys.executable, "-c", {ORPHAN!r}]))
print(compare.Reading.now().children - before.children)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.4


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc")
def test_readings_grow(bench: Any) -> None:
    before, after = bench.Reading.now(), bench.Reading.now()
    assert 0 <= before.busy <= after.busy
    assert after.total >= before.total > before.busy
    assert before.runnable >= 0
