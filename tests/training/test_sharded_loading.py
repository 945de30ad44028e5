"""Ranks that load a model and keep a part: the same weights, and never the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mapped_workers import MappedRank, load
from run_helpers import settings
from stretto.config import ClusterConfig
from stretto.models.tiny import byte_tokenizer
from stretto.models.weights import fingerprint
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

SMALL = 20_000
"""Bytes of buffers, names' hashes and the like; the models below have 100 times as much."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of 4 and 8 MB, with tied embeddings and with an output layer of their own."""
    found = {}
    for name, dtype in (("tied", torch.float32), ("untied", torch.bfloat16)):
        found[name] = tmp_path_factory.mktemp("models") / name
        large(tied=name == "tied").to(dtype).save_pretrained(found[name], max_shard_size="3MB")
        byte_tokenizer().save_pretrained(found[name])
    return found


def large(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=700,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    ranks = RankGroup(GroupSpec(2), MappedRank).start()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def both() -> Iterator[RankGroup]:
    """Two slices, each in two shards."""
    ranks = RankGroup(GroupSpec(4), MappedRank, (2,)).start()
    yield ranks
    ranks.close()


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("layout", "name", "dtype", "kind"),
    [
        ("two", "tied", F32, "actor"),
        ("two", "tied", BF16, "critic"),
        ("two", "untied", F32, "actor"),
        ("two", "untied", BF16, "lora"),
        ("both", "tied", BF16, "actor"),
        ("both", "untied", F32, "critic"),
        ("both", "untied", BF16, "lora"),
    ],
)
def test_shards_are_those_of_the_whole_and_all_that_is_held(
    layout: str,
    name: str,
    dtype: torch.dtype,
    kind: str,
    folders: dict[str, Path],
    request: pytest.FixtureRequest,
) -> None:
    """Shards of a model in the files' type and in another; but for one tensor, while it is cut."""
    ranks: RankGroup = request.getfixturevalue(layout)
    whole = load(folders[name], dtype, kind, in_files=False)
    largest = 4 * max(p.numel() for p in whole.parameters())
    for mark, own, held, most in ranks.call(MappedRank.shards, folders[name], dtype, kind):
        assert mark == fingerprint(whole.named_parameters())
        assert held <= own + SMALL
        assert most <= own + largest + SMALL


@pytest.mark.parametrize(
    ("name", "dtype", "kind"), [("tied", BF16, "actor"), ("untied", BF16, "lora")]
)
def test_slices_are_those_of_the_whole_and_all_that_is_held(
    two: RankGroup, name: str, dtype: torch.dtype, kind: str, folders: dict[str, Path]
) -> None:
    whole = load(folders[name], dtype, kind, in_files=False)
    two.call(
        MappedRank.slice, folders[name], dtype, kind
    )  # the first one of a process fills caches
    for mark, own, held in two.call(MappedRank.slice, folders[name], dtype, kind):
        assert mark == fingerprint(whole.named_parameters())
        assert held <= own + SMALL


def test_adapters_beside_weights_of_another_type_are_those_of_a_whole_load(
    two: RankGroup, folders: dict[str, Path]
) -> None:
    """The weights beside them leave their files before they are divided."""
    whole = load(folders["tied"], BF16, "lora", in_files=False)
    for mark, own, held, _ in two.call(MappedRank.shards, folders["tied"], BF16, "lora"):
        assert mark == fingerprint(whole.named_parameters())
        assert held <= own + SMALL


@pytest.mark.parametrize("role", ["learner", "generator", "reference", "critic"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_services_hold_nothing_before_they_divide(
    two: RankGroup, name: str, role: str, folders: dict[str, Path]
) -> None:
    """The learner too has actor, critic and reference then."""
    layout = {"fsdp": 2} if role == "learner" else {"tp": 2}
    process = {"roles": [role], "ranks": 2, "layout": {role: layout}}
    config = settings(
        folders[name],
        runtime="local",
        model={"name": str(folders[name]), "dtype": "bfloat16"},
        cluster=ClusterConfig.model_validate({"processes": [process]}),
    )
    assert max(two.call(MappedRank.served, config, role)) <= SMALL
