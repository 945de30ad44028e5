"""What drafts would save of generation: tokens proposed by n-grams, verified by equality.

A token's random number is fixed by its rollout and index (stretto/rollout/sampling.py), so a pass
over k proposed tokens of a row samples, at each place, the very token that single steps would have
sampled there: proposals are kept as far as they are equal, and no token changes. Whether that pays
is a matter of counts and costs, and both are measured here before anything is built:

1. Answers to GSM8K questions are sampled, several to a prompt, in several epochs.
2. Decode steps of n rows, and passes that verify k proposals in each of n rows, are timed.
3. The answers are gone through again as a batch that is decoded together. When at most m rows are
   left, each proposes what followed the longest suffix of its text (up to 4 tokens) where that last
   occurred: in its own text, in those of its group so far, or in earlier epochs' answers to the
   same prompt. The best m and k of a grid are shown; a run would have to find them.

    python benchmarks/drafts.py --model DIR --data gsm8k_train.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from torch import nn

from _shared import parse
from stretto import tasks
from stretto.config import Config, RolloutConfig
from stretto.machine import Machine
from stretto.models.cached import SlotCache
from stretto.models.devices import PackedLinears, product_speeds
from stretto.models.forward import backbone, unwrapped
from stretto.models.load import load_causal_lm, load_tokenizer
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.sampling import sample
from stretto.rollout.steps import ModelPass, StepInputs
from stretto.schedules.rollout import Rollout
from stretto.tasks.prompts import PromptSource
from stretto.types import Prompt

SMOKE = {
    "prompts": 2, "samples": 2, "epochs": 2, "new_tokens": 12, "repeats": 1, "temperatures": [1.0],
}  # fmt: skip
LONGEST = 4
"""Tokens of the longest suffix that is looked for."""
ROWS = (1, 2, 4, 8, 16, 32)
PROPOSED = (1, 2, 4, 8)


class Text:
    """A text that grows, and where each of its n-grams last ended: the index of the next token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # An n-gram is entered when a token follows it, as the text's own suffix proposes none.
            for n in range(1, min(LONGEST, len(self.tokens)) + 1):
                self.ends[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def after(self, suffix: tuple[int, ...], most: int) -> list[int]:
        at = self.ends.get(suffix)
        return [] if at is None else self.tokens[at : at + most]


def propose(own: Text, others: Sequence[Text], most: int) -> list[int]:
    """Return up to ``most`` tokens that followed the longest suffix of a text that is found."""
    for n in range(min(LONGEST, len(own.tokens)), 0, -1):
        suffix = tuple(own.tokens[-n:])
        for text in (own, *others):
            if found := text.after(suffix, most):
                return found
    return []


class Answer(NamedTuple):
    """A sampled response, and the prompt and group that it belongs to."""

    group: int
    prompt: Sequence[int]
    tokens: Sequence[int]


class Costs(NamedTuple):
    """Seconds of a step by rows, with so many proposals a row: 0 is a decode step."""

    measured: Mapping[int, Sequence[float]]

    def of(self, rows: int, proposed: int) -> float:
        """Return the seconds of a step, interpolated between the rows that were measured."""
        own = self.measured[proposed]
        i = min(max(bisect_left(ROWS, rows), 1), len(ROWS) - 1)
        a, b = ROWS[i - 1], ROWS[i]
        return own[i - 1] + (own[i] - own[i - 1]) * (rows - a) / (b - a)


class Replay(NamedTuple):
    """What decoding a batch of known answers took."""

    seconds: float
    proposing: int  # rows of steps that proposed something
    kept: int  # of their proposals


def replay(
    answers: Sequence[Answer], earlier: Sequence[Answer], costs: Costs, rows: int, most: int
) -> Replay:
    """Decode a batch of known answers, with proposals once at most ``rows`` are left."""
    texts = [Text(a.prompt) for a in answers]
    past = [[Text([*e.prompt, *e.tokens]) for e in earlier if e.group == a.group] for a in answers]
    at = [0] * len(answers)
    seconds, proposing, kept = 0.0, 0, 0
    while left := [i for i, a in enumerate(answers) if at[i] < len(a.tokens)]:
        advance, widest = dict.fromkeys(left, 1), 0
        for i in left if len(left) <= rows else []:
            group = [j for j, b in enumerate(answers) if b.group == answers[i].group and j != i]
            proposal = propose(texts[i], [*(texts[j] for j in group), *past[i]], most)
            coming = answers[i].tokens[at[i] : at[i] + len(proposal)]
            equal = [a == b for a, b in zip(proposal, coming, strict=False)]
            same = (*equal, False).index(False)
            proposing += bool(proposal)
            kept += same
            widest = max(widest, len(proposal))
            advance[i] = min(1 + same, len(answers[i].tokens) - at[i])
        seconds += costs.of(len(left), min(k for k in (0, *PROPOSED) if k >= widest))
        for i, tokens in advance.items():
            texts[i].extend(answers[i].tokens[at[i] : at[i] + tokens])
            at[i] += tokens
    return Replay(seconds, proposing, kept)


def sampled(
    model: nn.Module, prompts: Sequence[Prompt], args: argparse.Namespace, temperature: float
) -> tuple[list[list[Answer]], float]:
    """Answers of each epoch, and the median seconds of an epoch's prefill."""
    rows = args.samples * len(prompts)
    config = RolloutConfig(batch=rows, max_new_tokens=args.new_tokens, temperature=temperature)
    generation: Any = model.generation_config
    ends = frozenset(torch.tensor(generation.eos_token_id).flatten().tolist())
    settings = EngineSettings(rollout=config, seed=args.seed, end_tokens=ends)
    engine = TorchEngine(model, settings)
    epochs, prefill_s = [], []
    for epoch in range(args.epochs):
        first = epoch * rows
        asked = [
            Rollout(first + i, prompts[i // args.samples], i // args.samples).response()
            for i in range(rows)
        ]
        engine.admit(asked)
        begun = time.perf_counter()
        chunks = list(engine.decode(1).chunks)  # prefill, and a step
        prefill_s.append(time.perf_counter() - begun)
        chunks += engine.decode(args.new_tokens).chunks
        tokens: dict[int, list[int]] = {r.id: [] for r in asked}
        for chunk in chunks:
            tokens[chunk.rollout_id] += chunk.tokens.tolist()
        epochs.append([Answer(r.prompt.id, r.prompt.tokens, tokens[r.id]) for r in asked])
    return epochs, statistics.median(prefill_s)


def measured(model: nn.Module, context: int, repeats: int) -> Costs:
    """Time steps of rows with so much context, of which each has the same."""
    config = RolloutConfig()

    def typical(call: Callable[[], object]) -> float:
        def seconds() -> float:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun

        call()
        return statistics.median(seconds() for _ in range(repeats))

    def verify(own: ModelPass, rows: int, k: int) -> None:
        hidden = own.prefill([*range(rows)], [context] * rows, [[5] * (k + 1)] * rows)
        u = torch.rand(rows * (k + 1), dtype=torch.float64)
        sample(own.head.logits(hidden.flatten(0, 1)), u, 1.0)

    costs: dict[int, list[float]] = {k: [] for k in (0, *PROPOSED)}
    packed = PackedLinears(backbone(model), unwrapped(model).get_output_embeddings())
    with torch.inference_mode(), packed:
        for rows in ROWS:
            own = ModelPass(model, SlotCache(rows), config)
            own.cache.reserve(context + max(PROPOSED) + 1)
            own.prefill([*range(rows)], [0] * rows, [[5] * context] * rows)
            inputs = StepInputs(*(torch.full((rows,), x) for x in (5, context, 0, 0)))
            costs[0].append(typical(partial(own.decode, inputs, context + 1)))
            for k in PROPOSED:
                costs[k].append(typical(partial(verify, own, rows, k)))
    return Costs(costs)


def lines(args: argparse.Namespace) -> Iterator[str]:
    config = Config.model_validate({"task": {"kind": "gsm8k", "name": str(args.data)}})
    tokenizer = load_tokenizer(args.model)
    source = PromptSource(tasks.load(config.task, args.seed), config.task, tokenizer, args.seed)
    prompts = source.first(args.prompts)
    model = load_causal_lm(args.model, getattr(torch, args.dtype), torch.device("cpu"))
    yield (
        f"Machine: {Machine.here()}, {args.dtype}, {product_speeds(torch.get_num_threads())}. "
        f"{args.prompts} prompts, {args.samples} answers each, up to {args.new_tokens} tokens, "
        f"{args.epochs} epochs."
    )
    prompt_tokens = round(statistics.fmean(len(p.tokens) for p in prompts))
    costs = measured(model, prompt_tokens + args.new_tokens // 2, args.repeats)
    yield ""
    yield f"Milliseconds of a step, {prompt_tokens + args.new_tokens // 2} tokens before it:"
    yield ""
    yield "| proposals a row | " + " | ".join(f"{n} rows" for n in ROWS) + " |"
    yield "|" + "---|" * (len(ROWS) + 1)
    for k, own in costs.measured.items():
        yield f"| {k or 'none'} | " + " | ".join(f"{1e3 * s:.0f}" for s in own) + " |"
    yield ""
    yield (
        "| temperature | generation, s | of it with 8 rows or fewer | best: rows, proposals | kept "
        "of a row's proposals | generation would take | if passes cost a step |"
    )
    yield "|---|---|---|---|---|---|---|"
    free = Costs(dict.fromkeys(costs.measured, costs.measured[0]))
    for temperature in args.temperatures:
        epochs, prefill_s = sampled(model, prompts, args, temperature)
        *earlier, last = epochs
        past = [answer for epoch in earlier for answer in epoch]
        plain = replay(last, past, costs, 0, 0).seconds
        steps = [
            sum(len(a.tokens) > t for a in last) for t in range(max(len(a.tokens) for a in last))
        ]
        tail = sum(costs.of(n, 0) for n in steps if n <= 8)
        grid = {(m, k): replay(last, past, costs, m, k) for m, k in product(ROWS, PROPOSED)}
        (m, k), found = min(grid.items(), key=lambda item: item[1].seconds)
        unpaid = min(replay(last, past, free, rows, 8).seconds for rows in (8, 32))
        whole = prefill_s + plain
        kept = found.kept / max(found.proposing, 1)
        with_them, unpaid = ((prefill_s + s) / whole for s in (found.seconds, unpaid))
        yield (
            f"| {temperature} | {whole:.1f} | {tail / whole:.0%} | {m}, {k} | {kept:.2f} "
            f"| {with_them:.1%} | {unpaid:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder in HF format")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train file")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="answers to a prompt")
    parser.add_argument("--epochs", type=int, default=3, help="of which the last is gone through")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7, 0.3])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9, help="of each measured step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the tables as well")
    args = parse(parser, SMOKE, model="model", data="data")
    shown = []
    for line in lines(args):
        print(line, flush=True)
        shown.append(line)
    if args.out:
        args.out.write_text("\n".join(shown) + "\n")


if __name__ == "__main__":
    main()
