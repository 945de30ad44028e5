"""Datasets of tokenised prompts, as scripts for TRL's PPO trainer make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from stretto.errors import TaskError
from stretto.tasks import Task, TaskRow

COLUMN, MASK = "input_ids", "attention_mask"


class TokenTask(Task):
    """Prompts from a column ``input_ids``, which the actor reads as they are.

    Padding is left out: what ``attention_mask`` marks where the dataset has that column, else pad
    tokens at either end. Every row is checked at construction.

    Args:
        rows: a ``datasets.Dataset``, or any sequence of mappings; read again whenever it is asked.
        tokenizer: that made the tokens.
        name: of the dataset, for messages.
        vocabulary: token ids that the models know are below this.

    Attributes:
        longest: tokens of the longest prompt.
    """

    def __init__(
        self, rows: Any, tokenizer: PreTrainedTokenizerBase, name: str, vocabulary: int
    ) -> None:
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise TaskError(
                f"{name} must have a length and rows by number; got {type(rows).__name__}. Give a "
                "datasets.Dataset (one split of a DatasetDict), or a list of rows"
            )
        if isinstance(rows, Mapping):
            raise TaskError(
                f"{name} is several datasets ({', '.join(map(str, rows))}); give one of them"
            )
        if not len(rows):
            raise TaskError(f"{name} holds no rows; it needs at least one")
        self._rows, self._tokenizer, self._name = rows, tokenizer, name
        self.longest = 0
        for index in range(len(rows)):
            tokens = self._tokens(index)
            if max(tokens) >= vocabulary or min(tokens) < 0:
                raise TaskError(
                    f"{name}, row {index}: a token id is {max(tokens)}, and the models know ids "
                    f"below {vocabulary}; tokenise the prompts with the processing_class that "
                    "belongs to the models"
                )
            self.longest = max(self.longest, len(tokens))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int) -> TaskRow:
        """The row at ``index``, with its prompt as tokens and as text."""
        tokens = self._tokens(index)
        return TaskRow(prompt=str(self._tokenizer.decode(list(tokens))), tokens=tokens, index=index)

    @property
    def has_verifier(self) -> bool:
        """Return false: there is no verifier."""
        return False

    def verify(self, index: int, response: str) -> float:
        """Raise TaskError, as there is no verifier."""
        self.require_verifier()
        raise AssertionError

    def _tokens(self, index: int) -> tuple[int, ...]:
        row = self._rows[index]
        if not isinstance(row, Mapping) or COLUMN not in row:
            columns = f"its columns: {', '.join(row)}" if isinstance(row, Mapping) else repr(row)
            raise TaskError(
                f"{self._name}, row {index} has no column '{COLUMN}' ({columns[:200]}). Tokenise "
                "the prompts first, as for TRL: dataset.map(lambda row: "
                "{'input_ids': tokenizer(row['prompt'])['input_ids']})"
            )
        tokens = [int(token) for token in row[COLUMN]]
        if MASK in row:
            tokens = [t for t, seen in zip(tokens, row[MASK], strict=True) if seen]
        else:
            tokens = _without_ends(tokens, self._tokenizer.pad_token_id)
        if not tokens:
            raise TaskError(
                f"{self._name}, row {index} has no tokens in '{COLUMN}'; drop the row, or see why "
                "its prompt is empty"
            )
        return tuple(tokens)


def _without_ends(tokens: Sequence[int], pad: Any) -> list[int]:
    kept = [i for i, token in enumerate(tokens) if token != pad]
    return list(tokens[kept[0] : kept[-1] + 1]) if kept else []
