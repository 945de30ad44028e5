"""Bodies of requests in OpenAI's and vLLM's form; what would change an answer and is not known, or
cannot be done, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stretto.config.sections import Temperature
from stretto.types import Sampling

MOST_CHOICES, MOST_LOGPROBS = 128, 20

WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier",
        "parallel_tool_calls", "cache_salt", "detokenize", "prompt_cache_retention",
        "routed_experts_prompt_start",
    }
)  # fmt: skip
"""Fields that no answer depends on here."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("functions", "bad_words"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("function_call",), ("none",)),
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
"""Fields that are not supported, with the values that they have no effect with, besides null."""


class ApiError(Exception):
    """An error that is answered in OpenAI's form."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        about = {"type": kind, "param": self.param, "code": self.code}
        return {"error": {"message": str(self), **about}}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Options(_Body):
    """How answers are sampled."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: list[int] | None = None

    @property
    def options(self) -> Options:
        """How answers are sampled, wherever a request has it."""
        return self

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def likeliest(self) -> int | None:
        """Likeliest tokens to report in each place; ``None`` for no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, number: int, most: int) -> Sampling:
        """Return how an answer of up to ``most`` tokens is sampled; answers to one request have
        numbers, and random streams of their own. Without a seed, streams are the engine's.
        """
        return Sampling(
            max_new_tokens=most,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p or 1.0,
            seed=None if self.seed is None else (self.seed, number),
            top_logprobs=self.likeliest or 0,
        )


class StreamOptions(_Body):
    """What a stream has besides answers."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # a defence of networks' traffic; none here


class _Request(_Body):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Function(_Body):
    """The function that a call names; its arguments are JSON, as the policy wrote it."""

    name: str
    arguments: str


class ChatCall(_Body):
    """A call of a tool, in a turn of the assistant."""

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
    """A turn of a conversation, whose content may come in parts that are text."""

    role: str
    content: str
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Leave out what an answer of a server has besides its text, where that is nothing."""
        if not isinstance(value, dict):
            return value
        found = {k: v for k, v in value.items() if k == "content" or v not in (None, [])}
        if found.get("tool_calls") and found.get("content") is None:
            found["content"] = ""
        return found

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for part in value:
            match part:
                case {"type": "text", "text": str(), **others} if not others:
                    pass
                case _:
                    raise ValueError('parts of a content are {"type": "text", "text": "..."} alone')
        return "".join(part["text"] for part in value)


class ChatRequest(_Request, Options):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the policy is told of."""
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
        """As in other requests."""
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(_Request, Options):
    """``POST /v1/completions``: texts or token ids, one or several."""

    prompt: Annotated[list[str | list[int]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        """As in other requests."""
        return self.logprobs

    @field_validator("prompt", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        single = isinstance(value, str) or (isinstance(value, list) and _are_ids(value))
        prompts = [value] if single else value
        if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
            raise ValueError("give a text or token ids, or a list of such prompts")
        return prompts


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _are_ids(value)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(x) is int for x in value)


class SamplingParams(Options):
    """vLLM's, as far as there are such."""

    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        """As in other requests."""
        return self.logprobs


class GenerateRequest(_Request):
    """``POST /inference/v1/generate``: token ids in, token ids out."""

    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: SamplingParams

    @property
    def options(self) -> Options:
        """As in other requests."""
        return self.sampling_params


R = TypeVar("R", bound=_Request)


def parsed(kind: type[R], body: Any) -> R:
    """Return a request; raise ApiError for a body that is none, or asks for what there is not."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    body = _known(body)
    if isinstance(inner := body.get("sampling_params"), dict):
        of_text = ("skip_special_tokens", "include_stop_str_in_output")  # and there is none
        body["sampling_params"] = _known({k: v for k, v in inner.items() if k not in of_text})
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        unknown = first["type"] == "extra_forbidden"
        parts = [str(part) for part in first["loc"]]
        param = next((part for part in parts if not part.isdigit()), None)
        place = ".".join(parts)
        if unknown:
            message = f"'{place}' is not supported, and would be without effect; leave it out"
            raise ApiError(message, 400, "unknown_parameter", place) from error
        raise ApiError(f"'{place}': {first['msg']}", 400, "invalid_value", param) from error


def _known(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without fields that change nothing; refuse those that cannot be honoured."""
    kept = {}
    for name, value in body.items():
        if name in WITHOUT_EFFECT or (name in NEUTRAL and value in (None, *NEUTRAL[name])):
            continue
        if name in NEUTRAL:
            raise ApiError(
                f"'{name}' is not supported; leave it out", 400, "unsupported_parameter", name
            )
        kept[name] = value
    return kept
