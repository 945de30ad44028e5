"""Renders rows as prompts, and streams them in an endless order that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stretto.config import TaskConfig
from stretto.errors import StateError, TaskError
from stretto.saying import Say, working
from stretto.tasks.encode import Encoder, template_accepts
from stretto.tasks.messages import SYSTEM, TOOLS, arguments_in, is_ignored, system_in, tools_in
from stretto.tasks.tables import TableTask, of_row
from stretto.tasks.task import INDEX_KEY, SHA256, Task, TaskRow, is_held_out
from stretto.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_OF_SETTINGS = ("chat-is-off", "no-chat-template")
"""Codes of errors that are about the settings rather than a row."""

Render = Callable[
    [Sequence[Message], Sequence[Mapping[str, Any]], Mapping[str, Any]], tuple[list[int], str]
]
"""Renders a conversation with tool schemas and template arguments to tokens and their text."""


def render(
    row: TaskRow,
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt_id: int = 0,
    *,
    encoder: Encoder | None = None,
    section: Literal["task", "data"] = "task",
    render: Render | None = None,
) -> Prompt:
    """Return one row as the actor reads it.

    A conversation is rendered by the chat template with the generation prompt, which has its own
    special tokens. Plain text gets the tokenizer's special tokens. Spellings of such tokens in the
    row stay text. A row's own tokens are not changed. ``Prompt.data`` is its data and index.

    Raises TaskError if a chat template is needed, but missing or switched off, if it refuses the
    messages, if no tokens come out, or if the text is invalid Unicode.

    Args:
        encoder: of the tokenizer and ``config.template_arguments``, if the caller has one.
        section: of the settings, for messages.
        render: replaces the chat template. An environment's also lists the environment's tools.
    """
    encoder = encoder or Encoder(tokenizer, config.template_arguments)
    with _of(row):
        turns = None if row.tokens else _conversation(row, config, tokenizer, section)
        if row.tokens:
            text, tokens = str(row.prompt), list(row.tokens)
        elif turns is not None and render:
            tools = tools_in(row.data, config.columns.get(TOOLS, TOOLS))
            tokens, text = render(turns, tools, arguments_in(row.data))
        else:
            text, escaped = _written(row, turns, config, encoder)
            tokens = encoder.ids(escaped, special=turns is None)
        if not tokens:
            message = f"the prompt {text!r} has no tokens; give it some text"
            raise TaskError(message, "prompt-without-tokens")
    data = row.data if row.index is None else {**row.data, INDEX_KEY: row.index}
    from_text = isinstance(row.prompt, str)
    return Prompt(prompt_id, tuple(tokens), text, messages=turns, data=data, from_text=from_text)


def _of(row: TaskRow) -> AbstractContextManager[None]:
    return nullcontext() if row.index is None else of_row(f"row {row.index}")


def _written(
    row: TaskRow, turns: Sequence[Message] | None, config: TaskConfig, encoder: Encoder
) -> tuple[str, str]:
    if turns is None:
        text = _with_instruction(str(row.prompt), config)
        text = "\n\n".join(filter(None, (_own_system(row, config), text)))
        return text, encoder.escape(text)
    tools = tools_in(row.data, config.columns.get(TOOLS, TOOLS)) or None
    options = {"add_generation_prompt": True, "tools": tools, **arguments_in(row.data)}
    with template_accepts(turns):
        escaped = encoder.chat(turns, **options)
    return encoder.plain(escaped), escaped


def all_too_long(rows: int, shortest: int, limit: int, *, with_tools: bool = False) -> TaskError:
    """Return the error for a task whose prompts are all longer than ``limit`` tokens."""
    tools_note = ", with the tools' descriptions," if with_tools else ""
    return TaskError(
        f"all {rows} prompts{tools_note} are longer than task.max_prompt_tokens = {limit} "
        f"(the shortest has {shortest} tokens); raise that limit",
        "prompts-too-long",
    )


class PromptSource:
    """An endless stream of a task's prompts. Each epoch has all rows in its own seeded order.

    A prompt's id is its position in the stream, so that it can be made again from the id. Held-out
    and overlong prompts are skipped, and their ids stay unused.

    Attributes:
        skipped: prompts skipped so far because they exceed ``task.max_prompt_tokens``.
        refused: errors of rows that cannot be rendered, by index. These are skipped, too.
        config, seed, tokenizer: settings of the rows, seed of their order, actor's tokenizer.
        encoder: of that tokenizer.
        found: spellings of control tokens in prompts so far. They are read as text.
        render: replaces the chat template, for an environment.
        with_tools: whether ``render`` lists the environment's tools.
    """

    def __init__(
        self, task: Task, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.config = config
        self.seed = seed
        self.encoder = Encoder(tokenizer, config.template_arguments)
        self.found = self.encoder.found
        self.render: Render | None = None
        self.with_tools = False
        self._place = self.skipped = 0
        self.refused: dict[int, TaskError] = {}
        self._order = lru_cache(maxsize=2)(self._make_order)  # of this epoch and the last

    def next(self) -> Prompt:
        """Return the next prompt, neither held out nor too long. TaskError if there is none."""
        limit, shortest = self.config.max_prompt_tokens, 0
        for _ in range(len(self.task)):
            place, self._place = self._place, self._place + 1
            index = self._index(place)
            if index in self.refused or self.is_held_out(place):
                continue
            try:
                prompt = self.prompt_by_id(place)
            except TaskError as error:
                if error.code in _OF_SETTINGS:
                    raise
                self.refused[index] = error
                continue
            length = len(prompt.tokens)
            if length <= limit:
                return prompt
            self.skipped += 1
            shortest = min(length, shortest or length)
        if not shortest:
            raise next(iter(self.refused.values()), None) or self._all_held_out()
        raise all_too_long(len(self.task), shortest, limit, with_tools=self.with_tools)

    def check(self, say: Say) -> None:
        """Render every row of a dataset, and record failures as ``refused``.

        So no row can end a run later. Rows are not tokenised, because that would take several times
        as long. Raises TaskError if no row is left.
        """
        if not isinstance(self.task, TableTask):
            return
        with working(say, "rendering the prompts", len(self.task)) as advance:
            for index in self.task.indices:
                if error := self.refusal(self.task.row(index)):
                    self.refused[index] = error
                advance(1)
        if len(self.refused) == len(self.task):
            raise next(iter(self.refused.values()))

    def refusal(self, row: TaskRow) -> TaskError | None:
        """Return the error of rendering a row, or ``None``."""
        try:
            with _of(row):
                turns = _conversation(row, self.config, self.tokenizer, "task")
                if turns is None or not self.render:
                    _written(row, turns, self.config, self.encoder)
                else:
                    self._rendered(row, self.config, 0)
        except TaskError as error:
            return error
        return None

    def first(self, count: int) -> list[Prompt]:
        """Return the first ``count`` training prompts, each row once. TaskError if none."""
        stream = copy(self)
        stream._place = 0
        prompts = [stream.next()]
        while len(prompts) < count and (prompt := stream.next()).id < len(self.task):
            prompts.append(prompt)
        return prompts

    def prompt_by_id(self, prompt_id: int) -> Prompt:
        return self._rendered(self.row_by_id(prompt_id), self.config, prompt_id)

    def _rendered(self, row: TaskRow, config: TaskConfig, prompt_id: int) -> Prompt:
        render_options: Any = {"encoder": self.encoder, "render": self.render}
        return render(row, config, self.tokenizer, prompt_id, **render_options)

    def demonstration(self, prompt_id: int, what: str) -> Iterator[tuple[Prompt, str]]:
        """Yield the policy's turns in a row's demonstration: the prompt, and the policy's text.

        Raises TaskError if it cannot be rendered, or if there is none, which ``what`` needs.
        """
        row = self.row_by_id(prompt_id)
        demonstration, prompt = row.demonstration(what), self._rendered(row, self.config, prompt_id)
        if isinstance(demonstration, str):
            yield prompt, demonstration
            return
        opening = prompt.messages or (Message(role="user", content=prompt.text),)
        # The prompt already has the system message and the instruction.
        plain = self.config.model_copy(update={"system": "", "instruction": ""})
        for at, turn in enumerate(demonstration):
            if turn["role"] == "assistant" and not is_ignored(turn):
                turn_row = replace(row, prompt=(*opening, *demonstration[:at]), tokens=())
                yield self._rendered(turn_row, plain, prompt_id) if at else prompt, turn["content"]

    def row_by_id(self, prompt_id: int) -> TaskRow:
        return self.task.row(self._index(prompt_id))

    def _index(self, prompt_id: int) -> int:
        epoch, place = divmod(prompt_id, len(self.task))
        return self.task.indices[int(self._order(epoch)[place])]

    def is_held_out(self, prompt_id: int) -> bool:
        share = self.config.held_out_share
        return share > 0 and is_held_out(self.row_by_id(prompt_id), share)

    def ids(self, *, backwards: bool = False) -> Iterator[int]:
        """Yield the ids of the first epoch's prompts, including long ones. TaskError if none."""
        count = len(self.task)
        order = range(count - 1, -1, -1) if backwards else range(count)
        has_prompts = False
        for prompt_id in order:
            if not self.is_held_out(prompt_id):
                has_prompts = True
                yield prompt_id
        if not has_prompts:
            raise self._all_held_out()

    @property
    def identity(self) -> Mapping[str, str]:
        """The task's identity, and a fingerprint of the first prompt's tokens."""
        (prompt,) = self.first(1)
        return {**self.task.identity, "tokens of the first prompt": SHA256 + prompt.fingerprint}

    def state_dict(self) -> dict[str, Any]:
        order = {"rows": len(self.task), "seed": self.seed}
        return {"place": self._place, "skipped": self.skipped, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`. StateError for other rows or another seed."""
        for key, value in (("rows", len(self.task)), ("seed", self.seed)):
            if state[key] != value:
                raise StateError(
                    f"the prompts' saved order is of {key} = {state[key]}, and this run's of {key} "
                    f"= {value}; resume with the same task and seed",
                    "other-prompts",
                )
        self._place, self.skipped = state["place"], state["skipped"]

    def _all_held_out(self) -> TaskError:
        return TaskError(
            f"task.held_out = {self.config.held_out} holds all {len(self.task)} rows out, and "
            "leaves none to train on: too few prompts are different. Lower it, or set it to 0",
            "all-held-out",
        )

    def _make_order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.config.shuffle:
            return np.arange(len(self.task))
        generator = np.random.default_rng([self.seed % 2**64, epoch])
        return generator.permutation(len(self.task))


def _conversation(
    row: TaskRow, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, section: str
) -> tuple[Message, ...] | None:
    """Return the row's prompt as messages, with the settings' own, or ``None`` for plain text."""
    prompt, reason = row.prompt, ""
    if not isinstance(prompt, str):
        reason = "the prompt is a list of messages"
    elif config.system:
        reason = f"{section}.system is set"
    elif config.chat == "on":
        reason = f"{section}.chat = 'on'"
    if not reason and (config.chat == "off" or not tokenizer.chat_template):
        return None
    if config.chat == "off":
        raise TaskError(
            f"{section}.chat = 'off', but {reason}, which takes a chat template; set "
            f"{section}.chat to 'auto', or use text prompts without a system message",
            "chat-is-off",
        )
    if not tokenizer.chat_template:
        raise TaskError(
            f"{reason}, and the tokenizer has no chat template; use text prompts without "
            f"{section}.system and with {section}.chat = 'off', or a model that was made for chat",
            "no-chat-template",
        )
    *before, last = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
    has_system = [*before, last][0]["role"] == "system"
    if config.system and has_system:
        raise TaskError(
            f"{section}.system is set, and the prompt brings a system message of its own; leave "
            f"{section}.system empty",
            "two-system-messages",
        )
    text = config.system or _own_system(row, config)
    system = (Message(role="system", content=text),) if text and not has_system else ()
    last = Message(**{**last, "content": _with_instruction(last["content"], config)})
    return (*system, *before, last)


def _own_system(row: TaskRow, config: TaskConfig) -> str:
    return system_in(row.data, config.columns.get(SYSTEM, SYSTEM))


def refuse_templated(rows: Iterable[TaskRow], encoder: Encoder) -> None:
    """Raise TaskError if the prompts of all rows are texts to which a chat template was applied."""
    marks, seen_marks = encoder.turn_marks, set[str]()
    for row in rows:
        text = row.prompt if isinstance(row.prompt, str) and not row.tokens else ""
        matches = {mark for mark in marks if mark in text}
        if not matches:
            return
        seen_marks |= matches
    if seen_marks:
        raise TaskError(
            f"all prompts are texts that spell the chat template's own marks of a turn "
            f"({', '.join(sorted(seen_marks))}). Marks in texts are read letter by letter, so that "
            "the policy would see no turns. Give prompts as lists of messages, without applying "
            "the template to them",
            "prompts-templated",
        )


def _with_instruction(text: str, config: TaskConfig) -> str:
    return f"{text}\n{config.instruction}" if config.instruction else text
