"""How far engine and learner are apart: with the same weights, and one version behind.

    python benchmarks/engine_and_learner.py --dtype bfloat16 --steps 3
    python benchmarks/engine_and_learner.py --dtype bfloat16 --steps 6 --match --threads 1

Each step is generated, scored and trained on as by the plain schedule. The engine's log-probs of
the sampled tokens are compared with the learner's before its update, and after it. With --match a
second run alternates with the first, with training.match_engine, and both are timed, in seconds of
the CPU (best with --threads 1). The first step of each warms up.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor

from _shared import parse
from stretto.config import Config, recipes
from stretto.evaluation.generation import completed
from stretto.models.forward import output_head, response_hidden, response_tokens
from stretto.models.logits import token_logprobs
from stretto.runtime.run import Run, start
from stretto.schedules.rollout import Rollout, train_batch
from stretto.workers.threads import ThreadExecutor


def worker(run: Run, role: str) -> Any:
    executor = run.workers.executors[role]
    assert isinstance(executor, ThreadExecutor)
    return executor.service.worker


def scorers(run: Run) -> list[Any]:
    return [*run.functions, *(worker(run, place.role) for place in run.workers.scorers)]


def scored(run: Run, batch: int, first: int) -> tuple[list[Rollout], float]:
    """A batch of scored rollouts, and the seconds of decoding it."""
    rollouts = [Rollout(first + i, run.prompts.next(), first + i) for i in range(batch)]
    by_id = {r.id: r for r in rollouts}
    start_s = time.process_time()
    list(completed(worker(run, "generator"), rollouts, 100))
    decode_s = time.process_time() - start_s
    for scorer in scorers(run):
        scorer.admit([r.response(text=True) for r in rollouts])
        for score in scorer.finish(list(by_id)):
            by_id[score.rollout_id].scores[scorer.info.name] = score
    return rollouts, decode_s


@torch.no_grad()
def logprobs(run: Run, rollouts: Sequence[Rollout], temperature: float) -> Tensor:
    """The learner's, of all response tokens, one after the other."""
    responses = [r.response() for r in rollouts]
    actor = worker(run, "learner").trained["actor"].model
    hidden = response_hidden(actor, responses)
    targets = response_tokens(responses, hidden.device)
    return token_logprobs(output_head(actor), hidden, targets, temperature)[0].cpu()


def rms(differences: Tensor) -> float:
    return differences.square().mean().sqrt().item()


class Steps:
    """The steps of one run, with seconds of decoding and of updates per response token."""

    def __init__(self, run: Run, config: Config) -> None:
        self.run = run
        self.config = config
        self.count = 0
        self.decode_s: list[float] = []
        self.update_s: list[float] = []

    def step(self) -> None:
        run, temperature = self.run, self.config.rollout.temperature
        engine, learner = worker(run, "generator"), worker(run, "learner")
        size, clip = self.config.rollout.batch, self.config.algorithm.clip
        rollouts, decode_s = scored(run, size, self.count * size)
        engines = torch.tensor([x for r in rollouts for x in r.logprobs])
        before = logprobs(run, rollouts, temperature)
        start_s = time.process_time()
        learner.train(train_batch(rollouts))
        update_s = time.process_time() - start_s
        after = logprobs(run, rollouts, temperature)
        new = learner.publish()
        engine.load(new["actor"])
        for scorer in scorers(run):
            if scorer.info.follows:
                scorer.load(new[scorer.info.follows])
        ratios = (before - engines).exp()
        beyond = ((ratios - 1).abs() > clip).double().mean().item()
        self.count += 1
        self.decode_s.append(decode_s / len(engines))
        self.update_s.append(update_s / len(engines))
        matches = "yes" if self.config.training.match_engine else "no"
        print(
            f"| {self.count} | {matches} | {len(engines)} | {rms(before - engines):.2g} | "
            f"{ratios.min():.5f} to {ratios.max():.5f} | {beyond:.1%} | "
            f"{rms(after - engines):.2g} | {decode_s:.2f} | {update_s:.2f} |",
            flush=True,
        )


def measure(configs: Sequence[Config]) -> None:
    with ExitStack() as stack:
        runs = [Steps(start(config, stack, print), config) for config in configs]
        print(f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
        print(
            "| step | match_engine | tokens | apart, same weights | ratios | clipped "
            "| apart, a version behind | decode CPU s | update CPU s |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for _ in range(configs[0].steps):
            for run in runs:
                run.step()
        if len(runs) > 1:
            plain, matched = runs
            decode = median(matched.decode_s[1:]) / median(plain.decode_s[1:])
            update = median(matched.update_s[1:]) / median(plain.update_s[1:])
            print(f"match_engine costs {decode:.2f}x in decoding, {update:.2f}x in updates")
            print(f"load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="arithmetic")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--match", action="store_true", help="compare with training.match_engine")
    parser.add_argument("--warmup-examples", type=int, help="in place of the recipe's")
    given = parse(parser, {"recipe": "tiny", "warmup_examples": 32, "steps": 2, "match": True})
    data = recipes.load(given.recipe).model_dump()
    data["steps"] = given.steps
    data["threads"] = given.threads
    data["model"]["dtype"] = given.dtype
    if given.warmup_examples is not None:
        data["warmup_examples"] = given.warmup_examples
    configs = [Config.model_validate(data)]
    if given.match:
        configs.append(configs[0].changed_in("training", match_engine=True))
    measure(configs)


if __name__ == "__main__":
    main()
