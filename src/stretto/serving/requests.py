"""Request bodies in OpenAI's and vLLM's form.

A field that would change an answer and is not supported is refused by name. Programs of episodes
may send any field, because the run's settings determine their sampling. Fields without effect are
then noted. Limits are checked first, so that a small body cannot cause much work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stretto.config.sections import Temperature, wrong_arguments
from stretto.plain import parse
from stretto.tasks.encode import utf8
from stretto.types import Sampling

MOST_CHOICES, MOST_LOGPROBS = 128, 20

MOST_STOPS, MOST_STOP_CHARACTERS = 4, 256

MOST_VALUES = 200_000
"""Most lists, objects and texts in a body, because parsing blocks the whole process. A server with
longer contexts accepts one per token."""

WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier",
        "parallel_tool_calls", "cache_salt", "detokenize", "prompt_cache_retention",
        "routed_experts_prompt_start",
    }
)  # fmt: skip
"""Fields that change no answer here."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("functions", "bad_words"), ([],)),
    "logit_bias": ({},),
    "function_call": ("none",),
    **dict.fromkeys(("echo", "ignore_eos", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (True,)),
    "include_stop_str_in_output": (False,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "priority": (0,),
    "suffix": ("",),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "output_mode": ("tokens",),
    **dict.fromkeys(
        (
            "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options",
            "structured_outputs", "prompt_logprobs", "truncate_prompt_tokens", "features",
            "allowed_token_ids", "chat_template", "kv_transfer_params", "content_parts",
        ),
        (),
    ),
}  # fmt: skip
"""Unsupported fields, with the values (in addition to null) that have no effect."""


class ApiError(Exception):
    """An error to be answered in OpenAI's form."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        about = {"type": kind, "param": self.param, "code": self.code}
        return {"error": {"message": str(self), **about}}


class RequestLimits(NamedTuple):
    """Limits of a request.

    Attributes:
        answers: prompts times ``n``.
        tokens: of a prompt and its answer.
        characters: of a prompt. A longer one has more than ``tokens`` tokens.
        note: called with the names of fields that have no effect, in an episode.
    """

    answers: int = 1 << 30
    tokens: int = 1 << 30
    characters: int = 1 << 30
    note: Callable[[Collection[str]], None] | None = None

    def check(self, prompts: Sequence[str | list[int]], n: int) -> None:
        """Raise ApiError for prompts that can never fit, or for too many answers."""
        for prompt in prompts:
            is_text = isinstance(prompt, str)
            limit, unit = (self.characters, "characters") if is_text else (self.tokens, "tokens")
            if len(prompt) > limit:
                message = f"a prompt of {len(prompt)} {unit} cannot fit; the most are {limit}"
                raise ApiError(f"{message}. Shorten it", 400, "context_length_exceeded")
        if len(prompts) * n > self.answers:
            message = f"{len(prompts)} prompts with n = {n} are more answers than {self.answers}"
            message += ", which a request may have; send several"
            raise ApiError(message, 400, "too_many_answers", "n")


UNLIMITED = RequestLimits()

_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


class Options(_Body):
    """Sampling options of answers."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop: Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def options(self) -> Options:
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def likeliest(self) -> int | None:
        raise NotImplementedError

    def sampling(self, number: int, most: int) -> Sampling:
        """Return the sampling of an answer of up to ``most`` tokens. With a seed, each answer of a
        request has a random stream of its own by its ``number``. Without one, the engine's is used.
        """
        return Sampling(
            max_new_tokens=most,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p or 1.0,
            seed=None if self.seed is None else (self.seed, number),
            top_logprobs=self.likeliest or 0,
            stop=tuple(self.stop or ()),
        )


class StreamOptions(_Body):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis, not done here


class _Request(_Body):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None


class Function(_Body):
    """The function of a call. Its arguments are JSON, as the policy wrote it."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ChatCall(_Body):
    """A tool call in a turn of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Tool(_Body):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: Annotated[dict[str, Any], Field(min_length=1)]

    @field_validator("function")
    @classmethod
    def _named(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("name"), str):
            raise ValueError("a function has a name")
        return value


class ChatMessage(_Body):
    """A turn of a conversation. Its content may be a list of text parts.

    Keys that no chat template reads are dropped, because clients append messages unchanged.
    """

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        calls = (str(call.function.arguments) for call in self.tool_calls or ())
        return "".join([self.role, self.content, self.reasoning_content or "", *calls])

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Drop keys without a value. A turn of the assistant may also lack content."""
        if not isinstance(value, dict):
            return value
        fields = {k: v for k, v in value.items() if v not in (None, [])}
        if "content" in value or value.get("role") == "assistant":
            fields.setdefault("content", "")
        return fields

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        parts = [part if isinstance(part, dict) else {} for part in value]
        texts: list[Any] = [p.get(p["type"]) for p in parts if p.get("type") in ("text", "refusal")]
        if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
            raise ValueError('parts of a content are {"type": "text", "text": "..."} alone')
        return "".join(texts)


class ChatRequest(_Request, Options):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_reserved(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        arguments = {
            name: argument for name, argument in (value or {}).items() if argument is not None
        }
        if why := wrong_arguments(arguments):
            raise ValueError(why)
        return arguments

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        tools = (str(tool.function) for tool in self.tools or ())
        return ["".join([*(message.text for message in self.messages), *tools])]

    @property
    def offered(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        return [tool.model_dump() for tool in self.tools or ()]

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs = true")
        return value

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(_Request, Options):
    """``POST /v1/completions``: texts or token ids, one or several."""

    prompt: Annotated[list[str | list[int]], SkipValidation]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return self.prompt

    @field_validator("prompt", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        prompts = [value] if _is_prompt(value) else value
        if not isinstance(prompts, list) or not (prompts and all(map(_is_prompt, prompts))):
            raise ValueError("give a text or token ids, or a list of such prompts")
        return prompts


def _is_prompt(value: Any) -> bool:
    are_ids = isinstance(value, list) and value != [] and all(type(x) is int for x in value)
    return isinstance(value, str) or are_ids


class SamplingParams(Options):
    """vLLM's sampling parameters, as far as they are supported."""

    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class GenerateRequest(_Request):
    """``POST /inference/v1/generate``: token ids in, token ids out."""

    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    sampling_params: SamplingParams

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return [self.token_ids]

    @property
    def options(self) -> Options:
        return self.sampling_params


R = TypeVar("R", ChatRequest, CompletionRequest, GenerateRequest)


def read_json(raw: bytes, limits: RequestLimits = UNLIMITED) -> Any:
    """Parse a body. Raises ApiError if it is not JSON, or too much to parse."""
    values = raw.count(b"{") + raw.count(b"[") + raw.count(b'"') // 2
    if values > (limit := max(MOST_VALUES, limits.tokens)):
        raise ApiError(f"the body has {values} lists, objects and texts; the most are {limit}", 413)
    try:
        body = parse(raw)
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}") from error
    if _HALF_PAIR.search(raw):  # JSON can spell invalid Unicode
        utf8(json.dumps(body, ensure_ascii=False))
    return body


def parsed(kind: type[R], body: Any, limits: RequestLimits = UNLIMITED) -> R:
    """Validate a request. Raises ApiError if it is invalid or exceeds limits."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    body = _known(body, kind, limits)
    if isinstance(inner := body.get("sampling_params"), dict):
        of_text = ("skip_special_tokens", "include_stop_str_in_output")  # there is none
        inner = {k: v for k, v in inner.items() if k not in of_text}
        body["sampling_params"] = _known(inner, SamplingParams, limits)
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [str(part) for part in first["loc"]]
        param = next((part for part in parts if not part.isdigit()), None)
        message = first["msg"].removeprefix("Value error, ")
        message = f"'{'.'.join(parts)}': {message}" if parts else message
        raise ApiError(message, 400, "invalid_value", param) from error
    limits.check(request.prompts, request.options.choices)
    return request


def _known(body: Mapping[str, Any], kind: type[_Body], limits: RequestLimits) -> dict[str, Any]:
    """Return a request's supported fields. Refuse all others, or note them in an episode."""
    fields: dict[str, Any] = {}
    ignored_names = []
    for name, value in body.items():
        neutral = value is None or name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ())
        is_field = name in kind.model_fields
        if neutral or (is_field and name not in NEUTRAL):
            fields |= {name: value} if is_field and value is not None else {}
        elif limits.note:
            ignored_names.append(name)
        elif name in NEUTRAL:
            raise ApiError(
                f"'{name}' is not supported; leave it out", 400, "unsupported_parameter", name
            )
        else:
            message = f"'{name}' is not supported, and would be without effect; leave it out"
            raise ApiError(message, 400, "unknown_parameter", name)
    if ignored_names and limits.note:
        limits.note(ignored_names)
    return fields
