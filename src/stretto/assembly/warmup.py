"""The warm-up: a policy that starts from nothing first learns what answers look like."""

from __future__ import annotations

from itertools import chain, count, islice

import numpy as np
from torch import nn

from stretto.assembly.models import Given, Say
from stretto.config import Config
from stretto.errors import TaskError
from stretto.tasks.base import INDEX_KEY, Task
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import PromptSource
from stretto.training.warmup import warm_up, warm_up_once
from stretto.types import FinishReason, Response


def warmed_up(
    model: nn.Module, config: Config, task: Task, prompts: PromptSource, given: Given, say: Say
) -> None:
    """Train the model on the task's own answers, where the settings ask for it.

    Raises:
        TaskError: the task has no answers of its own.
    """
    if not config.warmup_examples:
        return
    examples = _examples(config, task, prompts)
    loss = (
        warm_up_once(model, examples, config, given.warmup)
        if given.warmup
        else warm_up(model, examples, config)
    )
    say(f"warmed up on {config.warmup_examples} examples: {loss:.3f} nats a token")


def _examples(config: Config, task: Task, prompts: PromptSource) -> list[Response]:
    """Return the task's own answers as finished responses.

    They start at the end of the first epoch's order, with the rows that RL reaches last, and repeat
    where there are too few.
    """
    tokenizer = prompts.tokenizer
    encoder, examples = Encoder(tokenizer), []
    places = chain.from_iterable(prompts.ids(backwards=True) for _ in count())
    for i, place in enumerate(islice(places, config.warmup_examples)):
        prompt = prompts.prompt_by_id(place)
        reference = task.row(prompt.data[INDEX_KEY]).reference
        if reference is None:
            raise TaskError(
                f"warmup_examples = {config.warmup_examples} trains on the task's own answers, and "
                f"task '{config.task.name}' has none; set warmup_examples = 0"
            )
        answer = encoder.ids(encoder.escape(reference))
        if tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        tokens = np.array(answer, np.int32)
        examples.append(Response(i, i, prompt, tokens, finish=FinishReason.STOP))
    return examples
