"""Calls made at the same time, each on its share of the CPU threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Event, Thread, get_ident, local
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM

from stretto.models.cpu_threads import interrupt, set_threads, side_by_side, thread_scaling
from stretto.runtime.thread_workers import scaling_of


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    set_threads(4)
    yield
    set_threads(before)


def wait_for(event: Event) -> None:
    """Wait as work in Python does, which an interruption reaches."""
    while not event.is_set():
        time.sleep(0.01)


def test_each_call_has_its_share_of_the_threads_and_the_modes_of_the_caller() -> None:
    here, met = Event(), Event()

    def call(mine: Event, other: Event) -> tuple[int, bool, int]:
        mine.set()
        wait_for(other)  # ends only if both calls are made at the same time
        return torch.get_num_threads(), torch.is_grad_enabled(), get_ident()

    with torch.no_grad():
        one, two = side_by_side([partial(call, here, met), partial(call, met, here)])
    assert one == (2, False, get_ident())
    assert two[:2] == (2, False)
    assert two[2] != get_ident()
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("calls", [1, 3])
def test_calls_among_which_threads_cannot_be_shared_are_made_in_turn(calls: int) -> None:
    made = side_by_side([lambda i=i: (i, torch.get_num_threads()) for i in range(calls)])  # type: ignore[misc]
    assert made == [(i, 4) for i in range(calls)]


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_reaches_the_caller(place: int) -> None:
    def fails() -> None:
        raise ValueError("of a pass")

    calls = [lambda: None, lambda: None]
    calls[place] = fails
    with pytest.raises(ValueError, match="of a pass"):
        side_by_side(calls)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("place", [0, 1])
def test_an_interruption_ends_the_other_call_too(place: int) -> None:
    begun, never = Event(), Event()
    ended: list[str] = []

    class Stop(KeyboardInterrupt):
        pass

    def endless() -> None:
        try:
            begun.set()
            wait_for(never)
        finally:
            ended.append("endless")

    calls = [lambda: None, lambda: None]
    calls[place] = endless

    def caller() -> None:
        try:
            side_by_side(calls)
        except Stop:
            ended.append("caller")

    thread = Thread(target=caller)
    thread.start()
    assert begun.wait(10)
    interrupt(thread, Stop)
    thread.join(10)
    assert ended == ["endless", "caller"]


@pytest.mark.parametrize(("together_s", "scaling"), [(0.010, 1.0), (0.005, 2.0), (0.008, 1.25)])
def test_the_scaling_of_threads_is_the_speed_of_all_calls_relative_to_one(
    together_s: float, scaling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of 5 ms alone, by a clock of each thread. Behind one lock they take 10 ms together."""
    clock = local()

    def call() -> Callable[[], None]:
        threads = 0  # that made this call so far: the first one alone

        def run() -> None:
            nonlocal threads
            if not hasattr(clock, "now_s"):
                clock.now_s = 0.0
                threads += 1
            clock.now_s += 0.005 if threads == 1 else together_s

        return run

    fake = SimpleNamespace(perf_counter=lambda: getattr(clock, "now_s", 0.0))
    monkeypatch.setattr("stretto.models.cpu_threads.time", fake)
    assert thread_scaling([call(), call()], 1, 0.1) == pytest.approx(scaling)


def test_the_probe_of_a_model_changes_nothing_and_fits_its_positions() -> None:
    """GPT-2 has positions for 8 tokens, and draws random numbers for its dropout."""
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    ).train()
    before = torch.get_rng_state()
    assert min(scaling_of(model, 4, 40, 1)) >= 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_adapters_of_parameters_are_not_probed() -> None:
    """Passes of two threads fail: peft changes modules in each, and torch's cache is global."""
    config = GptOssConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=40,
        eos_token_id=1,
        pad_token_id=0,
    )
    adapters = LoraConfig(target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"])
    model = get_peft_model(GptOssForCausalLM(config), adapters)
    assert scaling_of(model, 4, 40, 1) == (0, 0)
