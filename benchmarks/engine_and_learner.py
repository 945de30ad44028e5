"""How far engine and learner are apart: with the same weights, and one version behind.

    python benchmarks/engine_and_learner.py --dtype bfloat16 --steps 3

Each step is generated, scored and trained on as by the plain schedule. The engine's log-probs of
the sampled tokens are compared with the learner's before its update, and after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from _shared import parse
from stretto.config import Config, recipes
from stretto.evaluation.answers import completed
from stretto.models.forward import output_head, response_hidden, response_tokens
from stretto.models.logits import token_logprobs
from stretto.runtime.inline import InlineRun, start
from stretto.schedules.rollout import Rollout, train_batch


def scored(run: InlineRun, batch: int, first: int) -> list[Rollout]:
    rollouts = [Rollout(first + i, run.prompts.next(), first + i) for i in range(batch)]
    by_id = {r.id: r for r in rollouts}
    (engine,) = run.placement.engines
    list(completed(engine, rollouts, 100))
    for scorer in run.scorers:
        scorer.admit([r.response(text=True) for r in rollouts])
        for score in scorer.finish(list(by_id)):
            by_id[score.rollout_id].scores[scorer.name] = score
    return rollouts


@torch.no_grad()
def logprobs(run: InlineRun, rollouts: Sequence[Rollout], temperature: float) -> Tensor:
    """The learner's, of all response tokens, one after the other."""
    responses = [r.response() for r in rollouts]
    hidden = response_hidden(run.actor, responses)
    targets = response_tokens(responses, hidden.device)
    return token_logprobs(output_head(run.actor), hidden, targets, temperature)[0].cpu()


def rms(differences: Tensor) -> float:
    return differences.square().mean().sqrt().item()


def measure(config: Config) -> None:
    with ExitStack() as stack:
        run = start(config, stack, print)
        size, clip = config.rollout.batch, config.algorithm.clip
        print(
            "| step | tokens | apart, same weights | ratios | clipped | apart, a version behind |"
        )
        print("|---|---|---|---|---|---|")
        for step in range(config.steps):
            rollouts = scored(run, size, step * size)
            engines = torch.tensor([x for r in rollouts for x in r.logprobs])
            before = logprobs(run, rollouts, config.rollout.temperature)
            run.learner.train(train_batch(rollouts))
            after = logprobs(run, rollouts, config.rollout.temperature)
            new = run.learner.publish()
            run.placement.engines[0].load(new["actor"])
            for scorer in run.scorers:
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
