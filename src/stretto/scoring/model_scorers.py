"""Scores from models: the reference, the critic, and reward models.

Shapes: N sampled tokens of a pass (flattened), b sequences of a micro-batch, n rows and q tokens
per row of a streamed pass, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.models.forward import (
    head_reader,
    last_hidden,
    pad_right,
    response_hidden,
    response_tokens,
    states_at,
    text_config,
    unwrapped,
)
from stretto.models.heads import apply_scalar_head, scalar_head
from stretto.models.layer_shards import GatheredPasses, computed
from stretto.models.load import named_ends
from stretto.models.logits import token_logprobs
from stretto.models.weights import with_own_structure
from stretto.saying import Say
from stretto.scoring.base_scorer import (
    ModelScorer,
    RowSpan,
    Scored,
    StreamedRow,
    StreamedRows,
    warn,
)
from stretto.scoring.retokenise import ConversationReader, StablePrefix
from stretto.tasks.encode import same_tokenizer
from stretto.types import Response, sampled_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenScorer(ModelScorer):
    """Computes a number for each sampled token from the hidden state [N, H] that predicts it.
    Responses with a token id of ``vocabulary`` or more fail. ``applies`` selects the responses to
    read by their prompts' data. Others get a score without a value.
    """

    def __init__(
        self,
        read: Callable[[Tensor, Tensor], Tensor],
        *args: Any,
        vocabulary: int | None = None,
        applies: Callable[[Mapping[str, Any]], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._read = read
        self._vocabulary = vocabulary
        self._applies = applies
        self.reads_text = applies is not None

    def _row_of(self, rows: StreamedRows, response: Response) -> StreamedRow | None:
        if self._reads(response):
            return super()._row_of(rows, response)
        rows.close([response.id])
        return None

    def _reads(self, response: Response) -> bool:
        applies = self._applies is None or self._applies(response.prompt.data)
        return applies and self._knows(response)

    def _knows(self, response: Response) -> bool:
        if self._vocabulary is None:
            return True
        highest = int(response.tokens.max(initial=0))
        if highest < self._vocabulary:
            return True
        self._failures[response.id] = (
            f"'{self.name}' knows {self._vocabulary} token ids, and rollout {response.id} has the "
            f"id {highest}, which pads the actor's vocabulary. Choose another model, or an actor "
            "that does not sample such ids"
        )
        return False

    def _take_hidden(self, spans: Sequence[RowSpan], hidden: Tensor) -> None:
        places = [span.predicting for span in spans]
        pairs = list(zip(spans, places, strict=True))
        tokens = [span.row.tokens[at + 1] for span, indices in pairs for at in indices]
        if not tokens:
            return
        states = states_at(hidden, [[at - span.start for at in indices] for span, indices in pairs])
        numbers = self._read(states, torch.tensor(tokens, device=hidden.device))
        for span, part in zip(
            spans, numbers.split([len(indices) for indices in places]), strict=True
        ):
            span.row.numbers.append(part)

    def _score(self, responses: Sequence[Response]) -> Scored:
        responses = [r for r in responses if self._reads(r)]
        self.read_tokens += sum(r.total_tokens - 1 for r in responses)
        for indices in self._passes([r.total_tokens for r in responses]):
            part = [responses[i] for i in indices]
            numbers = self._compute(partial(self._numbers, part))
            yield part, numbers.split([int(sampled_of(r).sum()) for r in part])

    def _numbers(self, responses: Sequence[Response]) -> Tensor:
        hidden = response_hidden(self.model, responses)
        return self._read(hidden, response_tokens(responses, hidden.device))


def reference_scorer(
    model: nn.Module,
    temperature: float,
    token_budget: int,
    gathered: GatheredPasses | None = None,
    name: str = "reference",
    scorer: type[TokenScorer] = TokenScorer,
    **options: Any,
) -> TokenScorer:
    """Return a scorer by the log-probabilities of the reference or another model (``name``), at the
    sampling temperature.

    A PEFT model is its own reference: the scorer runs its frozen weights in separate modules
    without adapters. Disabling the adapters instead would also disable their gradients for a
    learner that may be at work in another thread. Passes of shards replace the adapters themselves.
    """
    if gathered is None and hasattr(model, "peft_config"):
        adapted: Any = with_own_structure(model)
        model = cast(nn.Module, adapted.unload())
    head = computed(gathered, partial(head_reader, model))

    def read(hidden: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(head(), hidden, tokens, temperature)[0]

    options["gathered"] = gathered
    return scorer(read, name, "logprobs", model, token_budget, **options)


@torch.no_grad()
def reads_last_token(model: nn.Module) -> bool:
    """Whether a classifier's output is its scalar head on the last token's state."""
    try:
        scalar_head(model)
    except ModelError:
        return False
    config = text_config(model)
    tokens = [t for t in range(64) if t != config.pad_token_id and t < config.vocab_size]
    rows = [tokens[start::4] for start in range(4)]  # several, because one could agree by chance
    device = next(model.parameters()).device
    ours = torch.stack([apply_scalar_head(model, last_hidden(model, [r])[0]) for r in rows])
    logits = [model(torch.tensor([row], device=device)).logits[0, 0] for row in rows]
    theirs = torch.stack(logits).float()
    worst = (ours - theirs).abs().max().item()
    return bool(worst <= 0.02 * theirs.abs().max().item() + 1e-4)


def critic_scorer(
    model: nn.Module, token_budget: int, gathered: GatheredPasses | None = None, **options: Any
) -> TokenScorer:
    """Return a scorer by V(s_t), the value of the state before token t. It follows the critic."""
    if not computed(gathered, partial(reads_last_token, model)):
        raise ModelError(
            f"a critic gives each token's state a value, from what came before it alone; "
            f"{type(unwrapped(model)).__name__} is no causal model with a linear head. Choose "
            "another model in critic.init, or 'actor'",
            "no-values",
        )

    def read(hidden: Tensor, _: Tensor) -> Tensor:
        return apply_scalar_head(model, hidden)

    options |= {"follows": "critic", "gathered": gathered}
    return TokenScorer(read, "critic", "values", model, token_budget, **options)


class RewardModelScorer(ModelScorer):
    """A scalar from a sequence classifier, for prompt and response together.

    A causal model is read at the last token, whichever it is. Other models run on complete
    sequences. With the actor's tokenizer, the model reads the sampled tokens. With another one, it
    reads the conversation as text (``retokenise.py``), and tokens that were read during decoding
    are rolled back if the complete response has other ones.

    Args:
        given_ends: the actor's end tokens, for responses that were not sampled.
        episodes: whether responses have several turns. With another tokenizer they are read at
            their end, as messages, because later turns may change how a template renders a turn.

    Attributes:
        rolled_back_tokens: tokens read so far and rolled back.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        actor_tokenizer: PreTrainedTokenizerBase,
        token_budget: int,
        stop: Sequence[str] = (),
        *,
        given_ends: frozenset[int] = frozenset(),
        episodes: bool = False,
        slots: int = 0,
        gathered: GatheredPasses | None = None,
        say: Say = warn,
    ) -> None:
        self._episodes = episodes
        self.same_tokenizer = same_tokenizer(tokenizer, actor_tokenizer)
        self.reads_text = not self.same_tokenizer
        self.rolled_back_tokens = 0
        self._causal = computed(gathered, partial(reads_last_token, model))
        ends = frozenset[int]()
        if self._causal and tokenizer.eos_token_id is not None:
            ends = named_ends(text_config(model), tokenizer)
        self._reading = ConversationReader(name, tokenizer, actor_tokenizer, stop, ends, given_ends)
        self._has_offsets = self.same_tokenizer or tokenizer.is_fast
        super().__init__(
            name, "reward", model, token_budget, slots=slots, gathered=gathered, say=say
        )

    def _open_rows(self, slots: int) -> StreamedRows | None:
        why = "its tokenizer does not say where in the text its tokens are"
        if not self._causal:
            why = "the model is no causal decoder with a linear head on the last token"
        elif self.reads_text and self._episodes:
            why = "it has a tokenizer of its own, and reads episodes as messages"
        elif self._has_offsets:
            return super()._open_rows(slots)
        self._say(f"'{self.name}' scores rollouts whole, at their end: {why}")
        return None

    def _open(self, rows: StreamedRows, response: Response) -> StreamedRow:
        if self.same_tokenizer:
            return super()._open(rows, response)
        text = self._reading.prefix(response.prompt)
        text.grow(self._reading.begun(response))
        return rows.open(response.id, text.tokens, text)

    def _update(self, row: StreamedRow, response: Response) -> None:
        if row.numbers:
            return  # it has its score
        if row.text is None:
            super()._update(row, response)
        else:
            self._retokenise(row, row.text, response)
        if response.finish:
            fits = self._fits(response, row.tokens)
            row.goal = len(row.tokens) if fits else 0
        elif self._positions is not None:
            row.goal = min(row.goal, self._positions)

    def _retokenise(self, row: StreamedRow, text: StablePrefix, response: Response) -> None:
        if response.finish:
            prefix_length = text.close(self._reading.tokens(response))
        else:
            prefix_length = text.grow(self._reading.begun(response))
        self.rolled_back_tokens += row.retokenise(text.tokens, prefix_length)

    def _take_hidden(self, spans: Sequence[RowSpan], hidden: Tensor) -> None:
        pairs = zip(hidden, spans, strict=True)
        last = [(h, span) for h, span in pairs if span.stop == len(span.row.tokens)]
        if last:
            states = torch.stack([h[span.stop - span.start - 1] for h, span in last])
            for (_, span), score in zip(last, apply_scalar_head(self.model, states), strict=True):
                span.row.numbers.append(score[None])

    def _score(self, responses: Sequence[Response]) -> Scored:
        pairs = [(r, self._tokens(r)) for r in responses]
        pairs = [(r, row) for r, row in pairs if self._fits(r, row)]
        responses, rows = [r for r, _ in pairs], [row for _, row in pairs]
        self.read_tokens += sum(map(len, rows))
        for indices in self._passes([len(row) for row in rows]):
            scores = self._compute(partial(self._read, [rows[i] for i in indices]))
            yield [responses[i] for i in indices], list(scores[:, None])

    def _read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        if self._causal:
            return apply_scalar_head(self.model, last_hidden(self.model, rows))
        ids = pad_right(rows, next(self.model.parameters()).device)
        mask = pad_right([[1] * len(row) for row in rows], ids.device)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        return logits[:, 0]

    def _tokens(self, response: Response) -> list[int]:
        if self.same_tokenizer:
            return super()._tokens(response)
        return self._reading.tokens(response)
