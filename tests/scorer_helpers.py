"""A tokenizer of bytes, rollouts in its tokens, a small reward model, scores whole and streamed."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from stretto.schedules.rollout import Rollout
from stretto.scoring.model_scorers import ModelScorer
from stretto.testing.contracts import scores_of
from stretto.types import FinishReason, Message, Prompt

EOS = 258


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte (ids from 2), '<s>' = 0 before every plain text, '</s>' = 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def byte_rollout(id_: int, prompt: str, response: str, *, stop: bool = True) -> Rollout:
    """A rollout of the byte tokenizer's tokens; a stopped one ends in <eos>."""
    messages: tuple[Message, ...] = (Message(role="user", content=prompt),)
    tokens = tuple(prompt.encode())
    rollout = Rollout(id_, Prompt(id_, tokens, prompt, messages), id_)
    rollout.tokens = array("i", [*response.encode(), *([EOS] if stop else [])])
    rollout.logprobs = array("f", [-1.0] * len(rollout))
    rollout.versions = array("i", [0] * len(rollout))
    rollout.finish = FinishReason.STOP if stop else FinishReason.LENGTH
    return rollout


def reward_model(vocabulary: int = 259, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=256,
        **settings,
    )
    return LlamaForSequenceClassification(config).eval()


def bert(vocabulary: int = 259) -> Any:
    """An encoder that gives a score."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=256,
    )
    return BertForSequenceClassification(config).eval()


def plain_score(model: Any, tokens: Sequence[int]) -> float:
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([list(tokens)])).logits[0, 0])


def begun(r: Rollout, tokens: int = 0) -> Rollout:
    """The rollout as it was after so many tokens."""
    return Rollout(r.id, r.prompt, r.group, r.tokens[:tokens])


def stream(scorer: ModelScorer, made: Sequence[Rollout], size: int) -> list[np.ndarray[Any, Any]]:
    """Scores of rollouts that all grow by chunks of one size."""
    return [score.values for score in scores_of(scorer, made, size)]


CORPUS = [
    "the weather in the north is rather cold, and the wind doesn't help; isn't it?",
    "Größenwahn für Anfänger: über die Brücke, naïve café crème brûlée",
    "日本語のテキストは、空白なしで書かれる。それは普通です。",
    "x = 12345 + 678; y = f(x)\n\nreturn y  # done\n",
    "emoji 🙂🙃 and 👩‍🔬 in the text",
]


@cache
def trained(kind: str) -> Any:
    """A small BPE tokenizer: byte-level, or of the kind that marks words with a leading '▁'."""
    special = ["<pad>", "<s>", "<sep>"]
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<pad>"))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    words = CORPUS if kind == "bytes" else [w for line in CORPUS for w in line.split(" ")]
    tokenizer.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<sep>")


def other_tokenizer(kind: str, template: str | None = None) -> Any:
    tokenizer = copy.deepcopy(trained(kind))
    tokenizer.chat_template = template
    return tokenizer


def text_rollout(id_: int, text: str, *, chat: bool, finish: FinishReason) -> Rollout:
    """A response in the byte tokenizer's tokens, so that chunks may cut characters."""
    said = "What is the weather in the north?\n"
    messages = (Message(role="user", content=said),) if chat else None
    r = Rollout(id_, Prompt(1, tuple(said.encode()), said, messages), 1)
    r.tokens = array("i", [*text.encode(), *([EOS] if finish is FinishReason.STOP else [])])
    r.logprobs, r.versions = array("f", [-1.0] * len(r)), array("i", [0] * len(r))
    r.finish = finish
    return r


def long_text(words: int) -> str:
    rng = random.Random(5)
    vocabulary = " ".join(CORPUS).split(" ")
    return " ".join(rng.choice(vocabulary) for _ in range(words))
