"""Drawing tokens: against pure Python and float64, and by frequency."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rounding import rounding
from stretto.rollout.sampling import BLOCK, sample, stream_seed, truncate, uniform

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
SIZES = [1, 2, 255, 256, 257, 1000, 49_152]


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(seed: int, count: int) -> list[int]:
    """Outputs of the generator as it is published: add, then mix."""
    state, out = seed & MASK, []
    for _ in range(count):
        state = (state + GOLDEN) & MASK
        out.append(mix(state))
    return out


def draws(seed: int, rollouts: int, count: int) -> Tensor:
    """[rollouts, count] numbers of the streams of rollouts 0, 1, .."""
    seeds = torch.tensor([stream_seed(seed, i) for i in range(rollouts)])
    return uniform(seeds.repeat_interleave(count), torch.arange(count).repeat(rollouts)).view(
        rollouts, count
    )


# -- random streams ------------------------------------------------------------------------------


def test_the_reference_is_splitmix64() -> None:
    published = [  # of seed 1234567
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(1234567, 5) == published


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 40))
def test_uniform_is_splitmix64(seed: int, index: int) -> None:
    z = splitmix64(seed, index + 1)[-1]
    u = uniform(torch.tensor([seed]), torch.tensor([index]))
    assert u.dtype == torch.float64
    assert u.item() == (float(z >> 11) + 0.5) * 2.0**-53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_stream_seed_mixes_run_seed_and_rollout(seed: int, rollout: int) -> None:
    expected = mix((mix(seed & MASK) + rollout * GOLDEN) & MASK)
    got = stream_seed(seed, rollout)
    assert -(2**63) <= got < 2**63
    assert got & MASK == expected


def test_streams_are_uniform_and_unrelated() -> None:
    u = draws(seed=3, rollouts=400, count=250)
    assert bool(((u > 0) & (u < 1)).all())
    n, bins = u.numel(), 64
    counts = torch.histc(u.flatten(), bins, 0, 1)
    chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum().item()
    assert abs(chi2 - (bins - 1)) < 4 * math.sqrt(2 * (bins - 1))
    assert abs(u.mean().item() - 0.5) < 4 / math.sqrt(12 * n)
    v = (u - 0.5) * math.sqrt(12)
    other = (draws(seed=4, rollouts=400, count=250) - 0.5) * math.sqrt(12)
    pairs = [(v[:, 1:], v[:, :-1]), (v[1:], v[:-1]), (v, other), (v[1:, :-1], v[:-1, 1:])]
    for a, b in pairs:  # in time, between neighbours, between runs, along the diagonal
        assert abs((a * b).mean().item()) < 4 / math.sqrt(a.numel())
    assert len(u.flatten().unique()) == n


# -- the draw ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", SIZES)
def test_equal_weights_are_drawn_exactly(vocabulary: int) -> None:
    u = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1] + 1e-9
    tokens, logprobs = sample(torch.zeros(400, vocabulary), u, 1.0)
    assert tokens.tolist() == [math.floor(x * vocabulary) for x in u.tolist()]
    assert logprobs.tolist() == pytest.approx([-math.log(vocabulary)] * 400, abs=rounding(BLOCK))


@pytest.mark.parametrize("vocabulary", SIZES)
def test_minus_infinity_is_never_drawn(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.zeros(vocabulary)
    logits[torch.rand(vocabulary) < 0.7] = -torch.inf
    logits[vocabulary // 2] = 0
    kept = (logits == 0).nonzero()[:, 0].tolist()
    u = torch.rand(200, dtype=torch.float64)
    u[:3] = torch.tensor([2.0**-54, 1 - 2.0**-53, 1.0])
    tokens, logprobs = sample(logits.repeat(200, 1), u, 1.0)
    expected = [kept[min(int(x * len(kept)), len(kept) - 1)] for x in u.tolist()]
    assert tokens.tolist() == expected
    assert logprobs.tolist() == pytest.approx([-math.log(len(kept))] * 200, abs=rounding(BLOCK))


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("vocabulary", SIZES)
def test_draw_inverts_the_cumulative_distribution(vocabulary: int, scale: float) -> None:
    torch.manual_seed(7)
    n = 64 if vocabulary > 10_000 else 500
    logits = torch.randn(n, vocabulary) * scale
    u = torch.rand(n, dtype=torch.float64)
    u[:2] = torch.tensor([2.0**-54, 1 - 2.0**-53])
    p = logits.double().softmax(-1)
    ends = p.cumsum(-1)
    naive = torch.searchsorted(ends, u[:, None], right=True)[:, 0].clamp_max(vocabulary - 1)
    tokens, _ = sample(logits.clone(), u, 1.0)
    end, own = (x.gather(1, tokens[:, None])[:, 0] for x in (ends, p))
    assert bool((own > 0).all())
    assert bool((u < end + 2e-6).all())  # float32 weights move the ends by as much as this
    assert bool((u > end - own - 2e-6).all())
    assert (tokens == naive).double().mean().item() > 0.98


def test_one_hot_distributions() -> None:
    places = [0, 1, 255, 256, 511, 512, 599]
    logits = torch.full((len(places), 600), -torch.inf)
    logits[range(len(places)), places] = torch.linspace(-50, 50, len(places))
    for u in (2.0**-54, 0.5, 1 - 2.0**-53):
        tokens, logprobs = sample(
            logits.clone(), torch.full((len(places),), u, dtype=torch.float64), 0.7
        )
        assert tokens.tolist() == places
        assert logprobs.tolist() == [0.0] * len(places)


def test_a_light_tail_is_drawn_at_the_very_end_only() -> None:
    logits = torch.tensor([[0.0] + [-200.0] * 299] * 2)  # exp(-200) is 0 in float32
    tokens, _ = sample(logits, torch.tensor([0.5, 1.0], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [0, 0]
    tail = math.log(2.0**-20)
    logits = torch.tensor([[0.0, *[-torch.inf] * 299, tail]] * 2)
    u = torch.tensor([1 - 2.0**-19, 1 - 2.0**-22], dtype=torch.float64)
    tokens, logprobs = sample(logits, u, 1.0)
    assert tokens.tolist() == [0, 300]
    assert logprobs[1].item() == pytest.approx(tail, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    torch.manual_seed(2)
    logits, n = torch.randn(300), 40_000
    u = draws(seed=11, rollouts=200, count=200).flatten()
    tokens, _ = sample(logits.repeat(n, 1), u, temperature)
    p = (logits.double() / temperature).softmax(-1)
    sigma = (n * p * (1 - p)).sqrt()
    assert bool(((torch.bincount(tokens, minlength=300) - n * p).abs() < 4 * sigma + 1).all())


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(5)
    logits, u = torch.randn(9, 700), torch.rand(9, dtype=torch.float64)
    together = sample(logits.clone(), u, 0.8, 50, 0.9)
    for i in range(9):
        alone = sample(logits[i : i + 1].clone(), u[i : i + 1], 0.8, 50, 0.9)
        assert alone[0].item() == together[0][i].item()
        assert alone[1].item() == pytest.approx(together[1][i].item(), abs=rounding(BLOCK))


def test_temperature_zero_takes_the_likeliest() -> None:
    torch.manual_seed(6)
    logits = torch.randn(20, 500) * 4
    tokens, logprobs = sample(logits.clone(), torch.rand(20, dtype=torch.float64), 0.0, 3, 0.5)
    table = logits.double().log_softmax(-1)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert torch.allclose(logprobs.double(), table.amax(-1), atol=rounding(BLOCK))


# -- truncation ----------------------------------------------------------------------------------


def naive_kept(logits: list[float], top_k: int, top_p: float) -> tuple[set[int], float]:
    """What stays, entry by entry, and how near top_p any running sum came."""
    kept = set(range(len(logits)))
    if top_k:
        border = sorted(logits, reverse=True)[:top_k][-1]
        kept = {i for i in kept if logits[i] >= border}
    total = sum(math.exp(logits[i]) for i in kept)
    nucleus: set[int] = set()
    mass, margin = 0.0, 1.0
    for i in sorted(kept, key=lambda i: -logits[i]):
        margin = min(margin, abs(mass - top_p))
        if mass < top_p or any(logits[j] == logits[i] for j in nucleus):
            nucleus.add(i)
        mass += math.exp(logits[i]) / total
    return nucleus, margin


@given(
    st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=1, max_size=40),  # many ties
    st.integers(0, 45),
    st.floats(0.01, 1.0),
)
def test_truncation_keeps_what_the_naive_one_keeps(
    logits: list[float], top_k: int, top_p: float
) -> None:
    expected, margin = naive_kept(logits, top_k, top_p)
    if margin < 1e-5:  # either answer is right in float32
        return
    got = truncate(torch.tensor([logits]), top_k, top_p)[0]
    assert {i for i, x in enumerate(got.tolist()) if x > -math.inf} == expected
    assert all(got[i].item() == logits[i] for i in expected)


def test_ties_at_the_border_stay_in() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert (truncate(logits, 2, 1.0)[0] > -torch.inf).tolist() == [True] * 4 + [False]
    halves = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in [(1e-320, 1), (0.4, 1), (0.6, 2), (0.74, 2), (0.8, 4)]:
        assert (truncate(halves, 0, top_p)[0] > -torch.inf).sum().item() == kept


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.9), (1, 1.0)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_of_the_distribution_sampled(
    top_k: int, top_p: float, temperature: float
) -> None:
    torch.manual_seed(9)
    logits = torch.randn(200, 97) * 2
    u = torch.rand(200, dtype=torch.float64)
    tokens, logprobs = sample(logits.clone(), u, temperature, top_k, top_p)
    for row, token, logprob in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        tempered = (row / temperature).tolist()
        kept, _ = naive_kept(tempered, top_k, top_p)
        assert token in kept
        total = math.log(sum(math.exp(tempered[i]) for i in kept))
        assert logprob == pytest.approx(tempered[token] - total, abs=1e-5)
