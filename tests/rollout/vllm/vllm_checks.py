"""Run the engine over vLLM, and write down what came of it; see ``test_vllm_itself.py``.

Usage: vllm_checks.py FOLDER RESULT.json [adapters]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import llama
from stretto.config import ModelConfig, RolloutConfig
from stretto.errors import ConfigError
from stretto.evaluation.generation import completed
from stretto.models.lora import add_lora
from stretto.models.weights import fingerprint_of
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.vllm.llm import LlmRequests, check_options, open_requests
from stretto.rollout.vllm.vllm_engine import VllmEngine, source_of
from stretto.schedules.rollout import Rollout
from stretto.testing.contracts import WAITS, episodes, play
from stretto.types import IntArray, Prompt, Sampling, WeightsRef
from stretto.weights.channel import SharedChannel

VOCABULARY, END, LIMIT, TEMPERATURE = 61, 60, 24, 0.8
KV_BYTES = 2 * 2 * 64 * 4
PROMPTS = [(3, 4, 5), (10,), tuple(range(20, 60)), (7, 7, 9, 11)]


def model(seed: int = 0) -> Any:
    """A Llama with heads of 32, which is what vLLM's kernels take."""
    return llama(vocabulary=VOCABULARY, seed=seed, hidden=64)


def rollout_config(**given: Any) -> RolloutConfig:
    options = {"block_size": 32}
    given = {"temperature": TEMPERATURE, "batch": 4} | given
    return RolloutConfig(max_new_tokens=LIMIT, engine="vllm", engine_args=options, **given)


def settings_of(folder: Path, config: RolloutConfig) -> EngineSettings:
    return EngineSettings(
        rollout=config,
        seed=5,
        end_tokens=frozenset({END}),
        stop=None,
        rows=8,
        carry="recompute",
        channel=None,
        longest=120,
        folder=str(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        threads=1,
    )


def opened(folder: Path, config: RolloutConfig, lora_rank: int = 0) -> LlmRequests:
    return open_requests(settings_of(folder, config), KV_BYTES, lora_rank)


class Learner:
    """A stand-in for the learner: it syncs a model's weights."""

    def __init__(self) -> None:
        self.channel, self.version = SharedChannel(), 0

    def sync(self, engine: Any, module: Any) -> None:
        self.version += 1
        named = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
        ref = WeightsRef("actor", self.version, fingerprint_of(module), self.channel.name)
        self.channel.put(ref, named)
        engine.load(ref)


def engine_of(
    requests: LlmRequests, config: RolloutConfig, learner: Learner, source: Any = None
) -> VllmEngine:
    settings = EngineSettings(
        rollout=config, end_tokens=frozenset({END}), seed=5, channel=learner.channel
    )
    return VllmEngine(requests, source or source_of(model()), settings)


def rollouts(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Rollout]:
    return [Rollout(i, Prompt(i, tuple(p), ""), i) for i, p in enumerate(prompts)]


def answers(engine: Any, size: int = 1000, cut: Any = None) -> list[list[int]]:
    """All responses, decoded in chunks; between chunks ``cut`` may do something to the engine."""
    mine = rollouts()
    engine.admit([r.response() for r in mine])
    done = 0
    while done < len(mine):
        for chunk in engine.decode(size).chunks:
            mine[chunk.rollout_id].append(chunk)
            done += chunk.finish is not None
        if cut:
            cut(engine, [r for r in mine if not r.finish])
    return [list(r.tokens) for r in mine]


def logprobs_of(module: Any, tokens: Sequence[int], temperature: float) -> Tensor:
    """Of all tokens but the first, by a plain pass."""
    with torch.no_grad():
        logits = module(torch.tensor([tokens])).logits[0, :-1] / temperature
        return logits.log_softmax(-1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


def gap(engine: VllmEngine, module: Any) -> float:
    """The largest difference on a probe between engine and module."""
    probe: IntArray = np.arange(5 * 9, dtype=np.int32).reshape(5, 9)
    found = engine.logprobs(probe)
    theirs = torch.stack([logprobs_of(module, row.tolist(), TEMPERATURE) for row in probe])
    return float((torch.from_numpy(found) - theirs).abs().max())


def greedy_by_transformers(module: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=LIMIT, eos_token_id=END, pad_token_id=END,
        )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


def greedy(requests: LlmRequests, found: dict[str, Any]) -> None:
    config, learner = rollout_config(temperature=0.0), Learner()
    same = LlmRequests(requests._engine, replace(requests._settings, rollout=config), KV_BYTES)
    engine = engine_of(same, config, learner)
    learner.sync(engine, model())
    own = TorchEngine(model(), EngineSettings(rollout=config, end_tokens=frozenset({END}), seed=5))
    found["greedy"] = {
        "vllm": answers(engine),
        "torch": answers(own),
        "transformers": greedy_by_transformers(model()),
    }
    found["chunked"] = answers(engine, 3)

    def cut(engine: VllmEngine, left: Sequence[Rollout]) -> None:
        engine.release([r.id for r in left])
        engine.admit([r.response() for r in left])
        learner.sync(engine, model())

    found["carried"] = answers(engine, 5, cut)
    turns(engine, own, found)


def turns(engine: VllmEngine, own: TorchEngine, found: dict[str, Any]) -> None:
    """Episodes, whose turns end often: greedy in both engines, and what of them is read."""
    prompts = [(3, 4, 5), (10,), tuple(range(20, 60)), (7, 7, 9, 11), *((9, i) for i in range(12))]
    sampling = Sampling(60, 0.0, max_turn_tokens=20)
    found["turns"] = {}
    ends = frozenset(range(0, VOCABULARY, 6))
    for each, name in ((own, "torch"), (engine, "vllm")):
        each.settings = replace(each.settings, end_tokens=ends)
        found["turns"][name] = {}
        for way in ("kept", "released", "moved"):
            made, before = episodes(prompts, sampling), each.prefilled_tokens
            play(each, made, way=WAITS[way])
            read = each.prefilled_tokens - before
            ended = [(list(r.tokens), list(r.turns), r.ended_by) for r in made]
            found["turns"][name][way] = {"read": read, "ended": ended}


def sampled(engine: VllmEngine, module: Any, found: dict[str, Any]) -> None:
    mine = rollouts(PROMPTS * 2)
    list(completed(engine, mine))
    gaps = []
    for r in mine:
        tokens = [*r.prompt.tokens, *r.tokens]
        theirs = logprobs_of(module, tokens, TEMPERATURE)[len(r.prompt.tokens) - 1 :]
        gaps += (theirs - torch.tensor(r.logprobs)).abs().tolist()
    found["tokens"], found["sampled_gap"] = len(gaps), max(gaps)


def own_sampling(engine: VllmEngine, module: Any, found: dict[str, Any]) -> None:
    """Greedy and sampled responses side by side, with the likeliest tokens in each place."""
    mine, asked = rollouts(), [Sampling(6, 0.0, top_logprobs=3), Sampling(9, 1.5, top_k=7)] * 2
    engine.admit([replace(r.response(), sampling=s) for r, s in zip(mine, asked, strict=True)])
    likeliest: dict[int, list[Any]] = {r.id: [] for r in mine}
    while not all(r.finish for r in mine):
        for chunk in engine.decode(4).chunks:
            mine[chunk.rollout_id].append(chunk)
            likeliest[chunk.rollout_id] += chunk.top_logprobs
    gaps = []
    for r, sampling in zip(mine, asked, strict=True):
        assert len(r) <= sampling.max_new_tokens
        if sampling.temperature:
            assert likeliest[r.id] == []
            continue
        for place, row in enumerate(likeliest[r.id]):
            read = [*r.prompt.tokens, *r.tokens[:place]]
            with torch.no_grad():
                top = module(torch.tensor([read])).logits[0, -1].log_softmax(-1).topk(3)
            assert row[0][0] == r.tokens[place]
            assert [token for token, _ in row] == top.indices.tolist()
            gaps += [abs(a - b) for (_, a), b in zip(row, top.values.tolist(), strict=True)]
    found["likeliest"], found["likeliest_gap"] = len(gaps), max(gaps)


def prefixes(engine: VllmEngine, learner: Learner, module: Any, found: dict[str, Any]) -> None:
    prompt = [(7 * i) % 50 + 1 for i in range(80)]

    def read() -> int:
        before = engine.prefilled_tokens
        engine.admit([r.response() for r in rollouts([prompt])])
        engine.decode(1)
        engine.release([0])
        return engine.prefilled_tokens - before

    found["read_first"], found["read_again"] = read(), read()
    learner.sync(engine, module)
    found["read_after_handover"] = read()


def seeds(engine: VllmEngine, learner: Learner, found: dict[str, Any]) -> None:
    """Draw from an even distribution: the weights of the head are zero."""
    even = model()
    with torch.no_grad():
        for p in even.parameters():
            p.zero_()
    learner.sync(engine, even)

    def drawn(cut: bool) -> list[list[int]]:
        (mine,) = rollouts([(5, 6)])
        parts = []
        engine.admit([mine.response()])
        for _ in range(2):
            chunks = engine.decode(8).chunks
            for chunk in chunks:
                mine.append(chunk)
            parts.append([int(t) for chunk in chunks for t in chunk.tokens])
            if cut and not mine.finish:
                engine.release([0])
                engine.admit([mine.response()])
        engine.release([0])
        return parts

    found["drawn"] = drawn(cut=True)
    found["same_seed"] = [drawn(cut=False)[0], drawn(cut=True)[0]]


def broken(engine: VllmEngine, learner: Learner, found: dict[str, Any]) -> None:
    source = engine._source

    class Breaking:
        adapters, lora_rank = "", 0

        def tensors(self, arriving: Any) -> Any:
            for i, pair in enumerate(source.tensors(arriving)):
                if i == 6:
                    raise OSError("the transfer breaks off")
                yield pair

        def fingerprint(self) -> str:
            return source.fingerprint()

    engine._source = Breaking()  # type: ignore[assignment]
    try:
        learner.sync(engine, model(7))
    except OSError as error:
        found["broken"] = str(error)
    engine._source = source
    learner.sync(engine, model(7))
    found["after_broken_gap"] = gap(engine, model(7))


def adapters(folder: Path, config: RolloutConfig, found: dict[str, Any]) -> None:
    """Two syncs of a model in adapters, over an engine that has the weights below by the first."""

    def adapted() -> Any:
        return add_lora(model(), ModelConfig(lora_rank=3), "CAUSAL_LM")

    learner, ours, source = Learner(), adapted(), source_of(adapted())
    engine = engine_of(opened(folder, config, source.lora_rank), config, learner, source)
    drawn = torch.Generator().manual_seed(2)
    found["gaps"], found["changes"] = [], []
    for _ in range(2):
        with torch.no_grad():
            for name, p in ours.named_parameters():
                if "lora_B" in name:
                    p.copy_(torch.randn(p.shape, generator=drawn))
        if engine.version:
            found["changes"].append(gap(engine, ours))
        learner.sync(engine, ours)
        found["gaps"].append(gap(engine, ours))
    found["changes"].append(gap(engine, model()))
    sampled(engine, ours, found)


def main(folder: Path, result: Path, part: str = "") -> None:
    """Check, and write what was found."""
    found: dict[str, Any] = {}
    model().config.save_pretrained(folder)
    config, learner = rollout_config(), Learner()
    if part == "adapters":
        adapters(folder, config, found)
        result.write_text(json.dumps(found))
        return
    try:
        check_options({"block_size": 16, "seed": 3})
    except ConfigError as error:
        found["refused"] = str(error)
    requests = opened(folder, config)
    engine = engine_of(requests, config, learner)
    learner.sync(engine, model())
    found["probe_gap"] = gap(engine, model())
    sampled(engine, model(), found)
    own_sampling(engine, model(), found)
    gaps = []
    for seed in (1, 2, 1):
        learner.sync(engine, model(seed))
        gaps.append(gap(engine, model(seed)))
    found["handover_gaps"] = gaps
    found["skipped_gap"] = gap(engine, model(2))
    prefixes(engine, learner, model(1), found)
    seeds(engine, learner, found)
    broken(engine, learner, found)
    greedy(requests, found)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
