"""The warm-up: a policy that starts from nothing first learns what answers look like."""

from __future__ import annotations

import hashlib
import json
from itertools import chain, count, islice

import numpy as np
from torch import nn

from stretto.assembly.models import Overrides
from stretto.config import Config
from stretto.errors import TaskError
from stretto.models.weights import fingerprint
from stretto.saying import Say, working
from stretto.tasks.base import INDEX_KEY, Task
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import PromptSource
from stretto.training.warmup import keep, take, warm_up
from stretto.types import FinishReason, Response


def warmed_up(
    model: nn.Module,
    config: Config,
    task: Task,
    prompts: PromptSource,
    overrides: Overrides,
    say: Say,
) -> None:
    """Train the model on the task's own answers, where the settings ask for it.

    Where the caller names a file, what comes out is kept there, or taken from there.

    Raises:
        TaskError: the task has no answers of its own.
        ConfigError: the file holds another warm-up.
        StateError: the file is damaged.
        StorageError: the file cannot be written.
    """
    number, file = config.warmup_examples, overrides.warmup
    if not number:
        return
    key = _key(model, config, task) if file else ""
    if file and file.exists():
        loss = take(model, key, file)
        say(f"warmed up already on {number} examples ({loss:.3f} nats a token): {file}")
        return
    with working(say, "warming up on examples", number) as advance:
        loss = warm_up(
            model,
            _examples(number, config.task.name, task, prompts),
            config.warmup_lr,
            config.training,
            advance,
        )
    if file:
        keep(model, loss, key, file)
    say(f"warmed up on {number} examples: {loss:.3f} nats a token")


def _key(model: nn.Module, config: Config, task: Task) -> str:
    """A hash of all that a warm-up depends on.

    Neither threads nor devices, nor versions of libraries, which change but the rounding: all
    processes of a run take the same file, and so does a run that is resumed.
    """
    known = {
        "model": fingerprint(model.named_parameters()),
        "rows": dict(task.identity),
        "task": config.task.model_dump(mode="json"),
        "seed": config.seed,
        "examples": config.warmup_examples,
        "lr": config.warmup_lr,
        "training": config.training.model_dump(mode="json", exclude={"ratio_tolerance"}),
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _examples(number: int, name: str, task: Task, prompts: PromptSource) -> list[Response]:
    """Return the task's own answers as finished responses.

    They start at the end of the first epoch's order, with the rows that RL reaches last, and repeat
    where there are too few.
    """
    tokenizer = prompts.tokenizer
    encoder, examples = Encoder(tokenizer), []
    places = chain.from_iterable(prompts.ids(backwards=True) for _ in count())
    for i, place in enumerate(islice(places, number)):
        prompt = prompts.prompt_by_id(place)
        reference = task.row(prompt.data[INDEX_KEY]).reference
        if reference is None:
            raise TaskError(
                f"warmup_examples = {number} trains on the task's own answers, and "
                f"task '{name}' has none; set warmup_examples = 0"
            )
        answer = encoder.ids(encoder.escape(reference))
        if tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        tokens = np.array(answer, np.int32)
        examples.append(Response(i, i, prompt, tokens, finish=FinishReason.STOP))
    return examples
