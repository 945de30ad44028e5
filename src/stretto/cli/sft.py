"""``stretto sft``: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.api import begin, execute
from stretto.cli import dry_run, supervised_options
from stretto.config import SftConfig

_DESCRIPTION = (
    "Fine-tune a language model on demonstrations: rows with conversations (messages), or with a "
    "prompt and its completion. Only what the assistant says is learned, the end of its turn "
    "included. For example: stretto sft --data.name chats.jsonl --model.name smollm2-135m"
)


def run(arguments: Sequence[str]) -> int:
    """Fine-tune, and say where the results are."""
    config, name, is_dry = supervised_options.parse("sft", _DESCRIPTION, arguments, SftConfig)
    if is_dry:
        print(dry_run.describe_supervised(config))
        return 0
    execute(begin(config, name))
    return 0
