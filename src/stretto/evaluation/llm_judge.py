"""An LLM as judge of pairs, through any OpenAI-compatible endpoint.

Judges favour one position (Zheng et al. 2023, section 3.3). So each pair is shown twice, the second
time with the sides swapped, and counts as won only if the same response is preferred twice.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from stretto.bounds import checked, kinds
from stretto.config.sections import Seconds, Workers
from stretto.errors import ConfigError, JudgeError, require
from stretto.evaluation.gold import tally
from stretto.types import Prompt
from stretto.workers.drive import drive

if TYPE_CHECKING:
    from openai import AsyncOpenAI

RETRIES = 4  # retries after a lost connection, a rate limit or a server error, with growing pauses
ANSWER_TOKENS = 512  # token limit of a judge's answer

OPTIONS: Mapping[str, Any] = {"temperature": 0, "max_tokens": ANSWER_TOKENS}
"""Options of a question, with names that all servers know."""

REASONING_OPTIONS: Mapping[str, Any] = {"max_completion_tokens": 8 * ANSWER_TOKENS}
"""Options for models that refuse :data:`OPTIONS`, because their temperature is fixed and their
reasoning counts as part of the answer."""

Verdict = Literal["A", "B", "tie"]

RUBRIC, _QUESTION = (
    Path(__file__).with_name(f"judge_{name}.txt").read_text(encoding="utf-8").rstrip()
    for name in ("rubric", "question")
)

JudgedPair = tuple[Prompt, str, str]  # a prompt, the policy's response and the reference

_VERDICT = re.compile(r"verdict\W*\b(a|b|tie)\b(.*)", re.IGNORECASE)
"""The verdict, with the rest of its line."""


@dataclass(frozen=True, slots=True)
class LlmJudge:
    """A judge and its endpoint. The key is taken from OPENAI_API_KEY.

    Attributes:
        model: its name at the endpoint.
        url: of the endpoint, including '/v1'. Empty takes OPENAI_BASE_URL, or else OpenAI's.
        concurrency: questions at a time.
        timeout_s: for one question, including retries.
    """

    model: str
    url: str = ""
    concurrency: Workers = 8
    timeout_s: Seconds = 120.0

    def __post_init__(self) -> None:
        checked(kinds(LlmJudge), {"concurrency": self.concurrency, "timeout_s": self.timeout_s})


@dataclass(frozen=True, slots=True)
class Judgement:
    """Pairs as an LLM judged them in both orders.

    Attributes:
        judge: the LLM.
        rate: (wins + ties / 2) / pairs judged.
        standard_error: of the rate.
        wins: pairs of which both orders prefer the policy's response.
        losses: pairs of which both orders prefer the reference.
        ties: pairs called a tie, or with a different verdict in each order.
        consistent: share of the judged pairs with the same verdict in both orders.
        unparsable: answers without a verdict, or cut off at their token limit.
        left_out: pairs with such an answer. They are not counted above.
    """

    judge: str
    rate: float
    standard_error: float
    wins: int
    ties: int
    losses: int
    consistent: float
    unparsable: int
    left_out: int


def open_judge(judge: LlmJudge) -> Callable[[Sequence[JudgedPair]], Judgement]:
    """Make a function that judges pairs, each in both orders. Nothing is sent yet.

    The function raises JudgeError if a question is refused or not answered in time, or if no pair
    has two verdicts. This one raises MissingExtraError, or ConfigError for OpenAI's endpoint
    without key.
    """
    require("openai", "judge", "an LLM judge")
    from openai import AsyncOpenAI

    key = os.environ.get("OPENAI_API_KEY")
    if not key and not (judge.url or os.environ.get("OPENAI_BASE_URL")):
        raise ConfigError(
            f"the judge '{judge.model}' is asked at OpenAI's endpoint, which needs a key: set "
            "OPENAI_API_KEY, or name another endpoint with `judge_url`",
            "judge-without-key",
        )
    key = key or "none"
    url = judge.url or None
    client = AsyncOpenAI(api_key=key, base_url=url, max_retries=RETRIES, timeout=judge.timeout_s)
    return partial(_judge, judge, client)


def _judge(judge: LlmJudge, client: AsyncOpenAI, pairs: Sequence[JudgedPair]) -> Judgement:
    questions = []
    for prompt, policy, reference in pairs:
        request = "\n\n".join(f"{m['role']}: {m['content']}" for m in prompt.messages or ())
        request = prompt.text if prompt.messages is None else request
        for a, b in ((policy, reference), (reference, policy)):
            questions.append(_QUESTION.format(request=request, a=a, b=b))
    verdicts: list[Verdict | None] = []

    async def ask() -> None:
        """Ask all questions in order. The first failure ends all of them."""
        gate = asyncio.Semaphore(judge.concurrency)

        async def one(question: str) -> str:
            async with gate:
                return await _ask(judge, client, question)

        async with client:
            verdicts.extend(map(parse, await asyncio.gather(*map(one, questions))))

    drive(ask())
    return counted(judge.model, list(zip(verdicts[::2], verdicts[1::2], strict=True)))


def parse(answer: str) -> Verdict | None:
    """Return an answer's final verdict. ``None`` without one, or if words follow ('A or B')."""
    bare = answer.strip().strip(".*`\"'").lower()
    matches = [(bare, "")] if bare in ("a", "b", "tie") else _VERDICT.findall(answer)
    last, rest = matches[-1] if matches else ("", "")
    if re.search(r"\w", rest):
        return None
    verdicts: Mapping[str, Verdict] = {"a": "A", "b": "B", "tie": "tie"}
    return verdicts.get(last.lower())


def counted(judge: str, verdicts: Sequence[tuple[Verdict | None, Verdict | None]]) -> Judgement:
    """Count verdicts with the policy as A, then as B. JudgeError if no pair has two."""
    first = {"A": 1, "tie": 0, "B": -1}
    outcomes = [(first[a], -first[b]) for a, b in verdicts if a and b]
    if not outcomes:
        raise JudgeError(
            f"none of {len(verdicts)} pairs got two verdicts from the judge '{judge}': its answers "
            "do not end with 'Verdict: A', 'Verdict: B' or 'Verdict: tie'. Ask another model",
            "judge-without-verdicts",
        )
    return Judgement(
        judge=judge,
        **tally([a if a == b else 0 for a, b in outcomes]),
        consistent=fmean(a == b for a, b in outcomes),
        unparsable=sum(v is None for pair in verdicts for v in pair),
        left_out=len(verdicts) - len(outcomes),
    )


async def _ask(judge: LlmJudge, client: AsyncOpenAI, question: str) -> str:
    """Return one answer, or an empty text if it was cut off."""
    from openai import BadRequestError, OpenAIError

    messages = [{"role": "system", "content": RUBRIC}, {"role": "user", "content": question}]
    completions: Any = client.chat.completions
    complete = partial(completions.create, model=judge.model, messages=messages)
    try:
        async with asyncio.timeout(judge.timeout_s):
            try:
                answer = await complete(**OPTIONS)
            except BadRequestError as error:
                if not any(option in str(error) for option in OPTIONS):
                    raise
                answer = await complete(**REASONING_OPTIONS)
    except TimeoutError as error:
        raise JudgeError(
            f"the judge '{judge.model}' did not answer within {judge.timeout_s:g} s, with retries; "
            "raise `judge_timeout`, or lower `judge_concurrency`",
            "judge-timed-out",
        ) from error
    except OpenAIError as error:
        raise JudgeError(
            f"the judge '{judge.model}' at {client.base_url} failed: {error}. Check `judge`, "
            "`judge_url` and OPENAI_API_KEY",
            "judge-failed",
        ) from error
    choices = getattr(answer, "choices", None)
    if not choices:
        raise JudgeError(
            f"the judge '{judge.model}' at {client.base_url} answered with no chat completion: "
            f"{str(answer)[:200]!r}. Check `judge_url`, which usually ends in /v1",
            "no-chat-completion",
        )
    return "" if choices[0].finish_reason == "length" else choices[0].message.content or ""
