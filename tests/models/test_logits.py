"""Log-probabilities in vocabulary slices against the naive full softmax."""

from __future__ import annotations

import pytest
import torch

from stretto.models import logits as logits_module
from stretto.models.forward import by_token_budget
from stretto.models.logits import OutputHead, token_logprobs


def naive(head: OutputHead, hidden, targets, temperature):
    z = hidden @ head.weight.T
    if head.bias is not None:
        z = z + head.bias
    z = z * head.scale
    if head.softcap:
        z = head.softcap * torch.tanh(z / head.softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_naive_softmax(monkeypatch, softcap, temperature, with_bias):
    monkeypatch.setattr(logits_module, "MIN_SLICE", 7)  # 7 slices of at most 7 of 45 entries
    monkeypatch.setattr(logits_module, "SLICE_BYTES", {"cpu": 1})
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=g, dtype=torch.float64) for n in (11, 45))
    bias = torch.randn(45, generator=g, dtype=torch.float64) if with_bias else None
    targets = torch.randint(0, 45, (11,), generator=g)
    a, b = (torch.randn(11, generator=g, dtype=torch.float64) for _ in range(2))
    results = []
    for f in (token_logprobs, naive):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
        head = OutputHead(leaves[1], leaves[2] if with_bias else None, 1.5, softcap)
        logprob, entropy = f(head, leaves[0], targets, temperature)
        (logprob @ a + entropy @ b).backward()
        results.append([logprob, entropy, *(t.grad for t in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_huge_logits_do_not_overflow():
    head = OutputHead(torch.tensor([[1000.0], [999.0], [-1000.0]]))
    logprob, entropy = token_logprobs(head, torch.ones(1, 1), torch.tensor([1]))
    p = torch.softmax(torch.tensor([0.0, -1.0], dtype=torch.float64), 0)
    assert logprob.item() == pytest.approx(p[1].log().item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-3)


def test_micro_batches_keep_every_sequence_once_and_the_budget():
    lengths = [5, 9, 2, 9, 30, 4, 4]
    groups = by_token_budget(lengths, 20)
    assert sorted(i for g in groups for i in g) == list(range(7))
    assert groups[0] == [4]  # longer than the budget: alone
    assert all(max(lengths[i] for i in g) * len(g) <= 20 for g in groups[1:])
    assert groups[1:] == [[1, 3], [0, 5, 6, 2]]
