"""How far engine and learner are apart: with the same weights, and one version behind.

    python benchmarks/engine_and_learner.py --dtype bfloat16 --steps 3

Each step is generated, scored and trained on as by the plain schedule. The engine's log-probs of
the sampled tokens are compared with the learner's before its update, and after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
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


def scored(run: Run, batch: int, first: int) -> list[Rollout]:
    rollouts = [Rollout(first + i, run.prompts.next(), first + i) for i in range(batch)]
    by_id = {r.id: r for r in rollouts}
    list(completed(worker(run, "generator"), rollouts, 100))
    for scorer in scorers(run):
        scorer.admit([r.response(text=True) for r in rollouts])
        for score in scorer.finish(list(by_id)):
            by_id[score.rollout_id].scores[scorer.info.name] = score
    return rollouts


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


def measure(config: Config) -> None:
    with ExitStack() as stack:
        run = start(config, stack, print)
        engine, learner = worker(run, "generator"), worker(run, "learner")
        size, clip = config.rollout.batch, config.algorithm.clip
        print(
            "| step | tokens | apart, same weights | ratios | clipped | apart, a version behind |"
        )
        print("|---|---|---|---|---|---|")
        for step in range(config.steps):
            rollouts = scored(run, size, step * size)
            engines = torch.tensor([x for r in rollouts for x in r.logprobs])
            before = logprobs(run, rollouts, config.rollout.temperature)
            learner.train(train_batch(rollouts))
            after = logprobs(run, rollouts, config.rollout.temperature)
            new = learner.publish()
            engine.load(new["actor"])
            for scorer in scorers(run):
                if scorer.info.follows:
                    scorer.load(new[scorer.info.follows])
            ratios = (before - engines).exp()
            beyond = ((ratios - 1).abs() > clip).double().mean().item()
            print(
                f"| {step + 1} | {len(engines)} | {rms(before - engines):.2g} | "
                f"{ratios.min():.5f} to {ratios.max():.5f} | {beyond:.1%} | "
                f"{rms(after - engines):.2g} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="arithmetic")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup-examples", type=int, help="in place of the recipe's")
    given = parse(parser, {"recipe": "tiny", "warmup_examples": 32, "steps": 1})
    data = recipes.load(given.recipe).model_dump()
    data["steps"] = given.steps
    data["model"]["dtype"] = given.dtype
    if given.warmup_examples is not None:
        data["warmup_examples"] = given.warmup_examples
    measure(Config.model_validate(data))


if __name__ == "__main__":
    main()
