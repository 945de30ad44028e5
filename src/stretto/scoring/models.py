"""Scores from models: the reference, the critic, and reward models, over whole rollouts.

Shapes: N response tokens of one micro-batch, flattened; H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.models.forward import (
    by_token_budget,
    hidden_states,
    microbatches,
    output_head,
    pad_right,
    response_hidden,
    response_tokens,
    unwrapped,
)
from stretto.models.heads import apply_scalar_head, scalar_head
from stretto.models.logits import token_logprobs
from stretto.scoring.pending import Pending
from stretto.scoring.text import response_text
from stretto.types import Chunk, Rollout, Score, ScoreKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelScorer:
    """The part that all model scorers share; methods as in :class:`~stretto.protocols.Scorer`.

    Args:
        name: unique in a run.
        kind: what :meth:`_score` gives.
    """

    def __init__(self, name: str, kind: ScoreKind) -> None:
        self.name, self.kind = name, kind
        self._pending = Pending(name)

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Learn of rollouts whose chunks will follow."""
        self._pending.admit(rollouts)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Take more tokens of admitted rollouts, in order for each rollout."""
        self._pending.extend(chunks)

    def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts without a score."""
        self._pending.release(rollout_ids)

    @torch.no_grad()
    def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
        """Score finished rollouts, in the order asked, and forget them."""
        rollouts = self._pending.take(rollout_ids)
        values: dict[int, Tensor] = {}
        for part, scores in self._score(rollouts):
            values |= {r.id: s for r, s in zip(part, scores, strict=True)}
        return [
            Score(r.id, self.name, self.kind, values[r.id].float().cpu().numpy()) for r in rollouts
        ]

    def _score(
        self, rollouts: Sequence[Rollout]
    ) -> Iterator[tuple[Sequence[Rollout], Sequence[Tensor]]]:
        """Micro-batches of rollouts with one tensor each: [1] for a reward, else [T]."""
        raise NotImplementedError


class TokenScorer(ModelScorer):
    """A number for each response token, from the hidden state that predicts it."""

    def __init__(
        self,
        name: str,
        kind: ScoreKind,
        model: nn.Module,
        read: Callable[[Tensor, Tensor], Tensor],
        token_budget: int,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(name, kind)
        self._model, self._read, self._budget = model, read, token_budget
        self._context = context

    def _score(
        self, rollouts: Sequence[Rollout]
    ) -> Iterator[tuple[Sequence[Rollout], Sequence[Tensor]]]:
        for chosen in microbatches(rollouts, self._budget):
            part = [rollouts[i] for i in chosen]
            with self._context():
                hidden = response_hidden(self._model, part)
                numbers = self._read(hidden, response_tokens(part, hidden.device))
            yield part, numbers.split([len(r) for r in part])


def reference_scorer(model: nn.Module, temperature: float, token_budget: int) -> TokenScorer:
    """Log-probabilities of the reference policy, at the sampling temperature.

    A PEFT model serves as its own reference, with its adapters off.
    """
    head = output_head(model)
    adapters_off: Any = getattr(model, "disable_adapter", nullcontext)
    return TokenScorer(
        "reference",
        "logprobs",
        model,
        lambda hidden, tokens: token_logprobs(head, hidden, tokens, temperature)[0],
        token_budget,
        adapters_off,
    )


@torch.no_grad()
def reads_last_token(model: nn.Module) -> bool:
    """Whether a sequence classifier's output is its scalar head on the last token's state.

    So it is with causal models. Encoders pool their states in ways of their own.
    """
    try:
        scalar_head(model)
    except ModelError:
        return False
    config: Any = model.config
    tokens = [t for t in range(64) if t != config.pad_token_id and t < config.vocab_size]
    rows = [tokens[start::4] for start in range(4)]  # several, as one could agree by chance
    device = next(model.parameters()).device
    ours = torch.stack([apply_scalar_head(model, hidden_states(model, [r])[0, -1]) for r in rows])
    each = [model(torch.tensor([row], device=device)).logits[0, 0] for row in rows]
    theirs = torch.stack(each).float()
    worst = (ours - theirs).abs().max().item()
    return bool(worst <= 0.02 * theirs.abs().max().item() + 1e-4)


def critic_scorer(model: nn.Module, token_budget: int) -> TokenScorer:
    """V(s_t), the value of the state before response token t.

    Raises:
        ModelError: the model gives no values of single tokens.
    """
    if not reads_last_token(model):
        raise ModelError(
            f"a critic gives each token's state a value, from what came before it alone; "
            f"{type(unwrapped(model)).__name__} is no causal model with a linear head. Choose "
            "another model in critic.init, or 'actor'"
        )
    return TokenScorer(
        "critic", "values", model, lambda hidden, _: apply_scalar_head(model, hidden), token_budget
    )


class RewardModelScorer(ModelScorer):
    """A scalar from a sequence classifier, for prompt and response together.

    A causal model is read at the last token, whatever token that is; any other runs whole.

    A reward model with the actor's tokenizer reads the very tokens that were sampled. One with a
    tokenizer of its own reads the same conversation: through its chat template where it has one,
    else as the turns' text with empty lines between; a plain prompt and its response as text.

    Attributes:
        same_tokenizer: whether it reads the actor's tokens as they are.
        model: the classifier; a critic may start from it.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        actor_tokenizer: PreTrainedTokenizerBase,
        token_budget: int,
        stop: Sequence[str] = (),
    ) -> None:
        super().__init__(name, "reward")
        self.model, self._tokenizer, self._budget = model, tokenizer, token_budget
        self._actor_tokenizer, self._stop = actor_tokenizer, stop
        self.same_tokenizer = same_tokenizer(tokenizer, actor_tokenizer)
        self._causal = reads_last_token(model)

    def _score(
        self, rollouts: Sequence[Rollout]
    ) -> Iterator[tuple[Sequence[Rollout], Sequence[Tensor]]]:
        rows = [self._tokens(r) for r in rollouts]
        for chosen in by_token_budget([len(row) for row in rows], self._budget):
            part = [rows[i] for i in chosen]
            yield [rollouts[i] for i in chosen], list(self._read(part)[:, None])

    def _read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores [b] of rows of token ids."""
        if self._causal:
            hidden = hidden_states(self.model, rows)
            last = torch.stack([h[len(row) - 1] for h, row in zip(hidden, rows, strict=True)])
            return apply_scalar_head(self.model, last)
        ids = pad_right(rows, next(self.model.parameters()).device)
        mask = pad_right([[1] * len(row) for row in rows], ids.device)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        return logits[:, 0]

    def _tokens(self, rollout: Rollout) -> list[int]:
        if self.same_tokenizer:
            return [*rollout.prompt.tokens, *rollout.tokens]
        text = response_text(self._actor_tokenizer, rollout.tokens, rollout.finish, self._stop)
        prompt = rollout.prompt
        if not prompt.messages:
            return list(self._tokenizer(prompt.text + text)["input_ids"])
        turns: list[Any] = [*prompt.messages, {"role": "assistant", "content": text}]
        if not self._tokenizer.chat_template:
            return list(self._tokenizer("\n\n".join(t["content"] for t in turns))["input_ids"])
        return self._apply_template(turns)

    def _apply_template(self, turns: Sequence[Any]) -> list[int]:
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(list(turns), tokenize=False)
        except TemplateError as error:
            raise ModelError(
                f"the chat template of reward model '{self.name}' refuses the conversation "
                f"{list(turns)}: {error}. Leave task.system empty, or choose another reward model"
            ) from error
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same ids: the same vocabulary, applied the same way."""
    probe = "Two tokenizers, 1234 words; naïve — “quotes”,\n\n\tand  spaces."
    return a.get_vocab() == b.get_vocab() and a(probe)["input_ids"] == b(probe)["input_ids"]
