"""Support for templates whose tool calls are not JSON, by the library 'renderers'.

Its renderers are written by hand for families of models. One is used only if it renders a prompt to
the same tokens as the model's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from stretto.environments.bridge import THINK, UNTHINK, Bridge, Turn, as_written
from stretto.environments.calls import ToolCall, checked, numbered
from stretto.environments.templates import QUESTION, Tools, names_of
from stretto.errors import ConfigError, first_line, is_installed, remedy
from stretto.scoring.response_buffer import before_stop
from stretto.tasks.encode import Encoder
from stretto.types import Message

_UNREAD = "unknown-call-format"


def open_bridge(
    encoder: Encoder,
    tools: Tools = (),
    end_tokens: frozenset[int] = frozenset(),
    stop: Sequence[str] = (),
) -> Bridge:
    """Return the template's bridge, or else a renderer's. ConfigError if neither parses calls."""
    try:
        return Bridge(encoder, tools, end_tokens, stop)
    except ConfigError as error:
        if error.code != _UNREAD:
            raise
        renderer = find_renderer(encoder)
        if renderer is None:
            hint = "" if is_installed("renderers") else f" ({remedy('renderers')})"
            raise ConfigError(
                f"{error}. The library 'renderers' reads those of some models{hint}, by their "
                "names on the hub",
                _UNREAD,
            ) from error
    return RendererBridge(encoder, tools, end_tokens, renderer, stop)


def find_renderer(encoder: Encoder) -> Any:
    """Return the renderer for the tokenizer's name. ``None`` if it or the library is missing.

    There are no guesses by model type, because a fine-tuned model may have another template. Raises
    ConfigError if the renderer does not accept the tokenizer.
    """
    if not is_installed("renderers"):
        return None
    base: Any = import_module("renderers.base")
    if encoder.tokenizer.name_or_path not in base.MODEL_RENDERER_MAP:
        return None
    try:
        return base.create_renderer(PlainTokenizer(encoder))
    except Exception as error:  # it asserts properties of a tokenizer
        raise ConfigError(
            f"the library 'renderers' does not take the tokenizer of "
            f"{encoder.tokenizer.name_or_path}: {first_line(error)}. Use the tokenizer that the "
            "model came with, or another model",
            "renderer-differs",
        ) from error


class PlainTokenizer:
    """A tokenizer for renderers, with which no text can spell a control token."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._tokenizer = encoder, encoder.tokenizer
        self.name_or_path = encoder.tokenizer.name_or_path
        self.unk_token_id: int | None = encoder.tokenizer.unk_token_id
        self.eos_token_id: int | None = encoder.tokenizer.eos_token_id

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._encoder.ids(self._encoder.escape(text))

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return str(self._tokenizer.decode(list(token_ids), **options))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokenizer.convert_tokens_to_ids(tokens)


class RendererBridge(Bridge):
    """A bridge of a renderer. Prompts are rendered by the chat template."""

    _reads_calls = False

    def __init__(
        self,
        encoder: Encoder,
        tools: Tools,
        end_tokens: frozenset[int],
        renderer: Any,
        stop: Sequence[str] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Raise ConfigError unless the renderer and the template agree on a prompt."""
        super().__init__(encoder, tools, end_tokens, stop, arguments)
        self._renderer = renderer
        template_ids, text = self.prompt([QUESTION])
        options = {"tools": self._listed(None), "add_generation_prompt": True}
        ids = list(renderer.render_ids([dict(QUESTION)], **options))
        if template_ids != ids:
            raise ConfigError(
                f"the library 'renderers' reads a question as {self._encoder.spelled(ids)!r}, "
                f"and the model's chat template as {text!r}; its calls of tools cannot be read. "
                "Use the template that the model came with, or another model",
                "renderer-differs",
            )

    def _with(self, arguments: Mapping[str, Any]) -> Bridge:
        settings = self._encoder, self._tools, self._end_tokens, self._renderer
        return RendererBridge(*settings, self._stop, arguments)

    def _listed(self, tools: Tools | None) -> list[dict[str, Any]] | None:
        """Return tools in the form of renderers: only the functions."""
        tools = self._tools if tools is None else tools
        return [dict(tool.get("function", tool)) for tool in tools] or None

    def parse(self, ids: Sequence[int], *, ended: bool, tools: Tools | None = None) -> Turn:
        """Parse a turn (see :meth:`Bridge.parse`)."""
        stop = self._stop if ended else ()
        text = before_stop(self._without_control(self._spelled(ids)), stop)
        try:
            read = self._renderer.parse_response(list(ids), tools=self._listed(tools))
        except Exception:  # a policy may write text that its model never would
            return Turn(text, Message(role="assistant", content=text), ())
        names = names_of(self._tools if tools is None else tools)
        calls = numbered([_call(call, names) for call in read.tool_calls])
        content = read.content
        if read.reasoning_content:
            content = f"{THINK}\n{read.reasoning_content}\n{UNTHINK}\n\n{content}"
        message = Message(role="assistant", content=before_stop(content, stop))
        if good := [as_written(call) for call in calls if call.status == "ok"]:
            message["tool_calls"] = good
        return Turn(text, message, tuple(calls))

    def context(
        self,
        standing: Sequence[int],
        messages: Sequence[Message],
        *,
        prompt: Sequence[Message] | None = None,
    ) -> list[int] | None:
        """Return the tokens to append (see :meth:`Bridge.context`)."""
        standing = list(standing)
        shaped = [cast("dict[str, Any]", dict(m)) for m in messages]
        split = len(standing) - 1
        rendered = self._renderer.bridge_to_next_turn(
            standing[:split], standing[split:], shaped, tools=self._listed(None)
        )
        if rendered is None or list(rendered.token_ids[: len(standing)]) != standing:
            return None
        return list(rendered.token_ids[len(standing) :])


def _call(read: Any, names: Any) -> ToolCall:
    status, name = str(read.status.value), read.name or ""
    if status == "unclosed_block":
        reason = "the turn ended before the call was closed"
        return ToolCall(name, {}, "unclosed", read.raw, "", reason)
    if status != "ok":
        reason = f"the call cannot be read: {status.replace('_', ' ')}"
        return ToolCall(name, {}, "invalid", read.raw, "", reason)
    return checked(name, read.arguments, read.raw, read.id or "", names=names)
