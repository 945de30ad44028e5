"""Files of a learner's state: what is in them, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers import critic_of, full_beyond, llama, make_learner
from learner_helpers import algorithm_settings, in_memory, make_batch
from raising import raises
from stretto import files
from stretto.errors import StateError
from stretto.models.shards import TensorShard
from stretto.schedules.rollout import train_batch
from stretto.training.learner import PolicyLearner
from stretto.training.shard_files import file_name, packed, read, write


def learner(steps: int) -> PolicyLearner:
    given = algorithm_settings({"name": "ppo"}, training={"lr_schedule": "linear"})
    actor = llama()
    actor.model.embed_tokens.requires_grad_(False)
    made = make_learner(actor, critic_of(actor), given, updates=10)
    for _ in range(steps):
        made.train(train_batch(make_batch(actor, given["algorithm"])))
    return made


def assert_same(one: Any, other: Any) -> None:
    """Tuples come back as lists."""
    if isinstance(one, torch.Tensor):
        assert one.equal(other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_read_is_what_was_written(steps: int, tmp_path: Path) -> None:
    """Before the first step AdamW has no moments."""
    state = learner(steps).state_dict()
    write(tmp_path / file_name(), packed(state))
    assert_same({**state, "published": {}}, in_memory(read(tmp_path)))


# -- pieces --------------------------------------------------------------------------------------

WHOLE = torch.arange(12.0).reshape(3, 4)
BOXES = (((0, 2), (0, 4)), ((2, 3), (0, 1)), ((2, 3), (1, 4)), ((0, 0), (0, 0)))


def written(folder: Path, whole: torch.Tensor = WHOLE) -> Path:
    """Four ranks' files: two rows; an element; the rest of its row; nothing.

    Second moments are ten more than the masters, first moments their negative.
    """
    for rank, box in enumerate(BOXES):
        (a, b), (c, d) = box
        master, first, second = (
            TensorShard(tensor[a:b, c:d], (3, 4), box) for tensor in (whole, -whole, whole + 10)
        )
        moments = {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second}
        own = {
            "masters": {"w": master},
            "moments": {"w": moments},
            "schedule": {"last_epoch": 7},
        }
        state = {"models": {"actor": own}, "version": 3}
        write(folder / file_name(rank, 4), packed(state, rank, 4))
    return folder


def test_names_and_metadata_say_what_a_file_has(tmp_path: Path) -> None:
    file = written(tmp_path) / "rank-2-of-4.safetensors"
    names = ["actor/masters/w", "actor/exp_avg/w", "actor/exp_avg_sq/w"]
    found = load_file(file)
    assert found.keys() == {*names}
    assert found["actor/exp_avg/w"].tolist() == [[-9.0, -10.0, -11.0]]
    with safe_open(file, "pt") as stored:
        about = json.loads(stored.metadata()["stretto"])
    assert about == {
        "rank": 2,
        "ranks": 4,
        "pieces": {name: [[3, 4], [[2, 3], [1, 4]]] for name in names},
        "published": [],
        "state": {
            "models": {
                "actor": {
                    "names": ["w"],
                    "steps": {"w": 7.0},
                    "schedule": {"last_epoch": 7},
                }
            },
            "version": 3,
        },
    }
    assert load_file(tmp_path / "rank-3-of-4.safetensors") == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("box", [((0, 3), (0, 4)), ((1, 3), (0, 2)), ((2, 3), (1, 2))])
def test_any_part_is_put_together(box: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = WHOLE.to(dtype)
    state = read(written(tmp_path, whole))
    (a, b), (c, d) = box
    part = state["models"]["actor"]["masters"]["w"].read(box)
    assert part.dtype == dtype
    assert part.equal(whole[a:b, c:d])
    moments = in_memory(state)["models"]["actor"]["moments"]["w"]
    assert moments["exp_avg_sq"].equal(whole + 10)
    assert moments["step"].item() == 7


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    """A file that has nothing of it may change."""
    state = read(written(tmp_path))
    with (tmp_path / file_name(1, 4)).open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\xff\xff\xff\xff")
    stored = state["models"]["actor"]["masters"]["w"]
    assert stored.read(((0, 2), (1, 3))).equal(WHOLE[:2, 1:3])
    assert stored.read(((2, 3), (1, 1))).shape == (1, 0)


def test_a_file_that_changed_is_found_by_the_sum_that_its_writer_told(tmp_path: Path) -> None:
    file = tmp_path / file_name()
    told = write(file, packed(learner(0).state_dict()))
    content = bytearray(file.read_bytes())
    assert told == (len(content), hashlib.sha256(content).hexdigest())
    assert told == files.sum_of(file)
    content[-1] ^= 1
    file.write_bytes(content)
    assert told != files.sum_of(file)


# -- what is refused -----------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def foreign(file: Path) -> None:
    save_file({"actor/masters/w": WHOLE}, file)


@pytest.mark.parametrize(
    ("rank", "damage", "code", "fact"),
    [
        (1, Path.unlink, "missing-file", "the one before"),
        (0, Path.unlink, "missing-file", ""),
        (3, Path.unlink, "missing-file", ""),
        (2, truncate, "damaged-file", "SafetensorError"),
        (2, foreign, "damaged-file", "KeyError('stretto')"),
    ],
)
def test_a_damaged_or_missing_file_is_refused(
    rank: int, damage: Callable[[Path], None], code: str, fact: str, tmp_path: Path
) -> None:
    name = file_name(rank, 4)
    damage(written(tmp_path) / name)
    with raises(StateError, code, name, fact):
        read(tmp_path)


def test_files_of_different_writings_are_refused(tmp_path: Path) -> None:
    for folder, boxes in (("a", BOXES), ("b", (((0, 1), (0, 4)), *BOXES[1:]))):
        (tmp_path / folder).mkdir()
        for rank, ((a, b), (c, d)) in enumerate(boxes):
            piece = TensorShard(WHOLE[a:b, c:d], (3, 4), ((a, b), (c, d)))
            own = {"masters": {"w": piece}, "moments": {}, "schedule": {}}
            write(tmp_path / folder / file_name(rank, 4), packed({"models": {"m": own}}, rank, 4))
    (tmp_path / "b" / file_name(0, 4)).replace(tmp_path / "a" / file_name(0, 4))
    with raises(StateError, "missing-pieces", 8, "m/masters/w", (3, 4)):
        read(tmp_path / "a")


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with raises(StateError, "missing-file", "rank-0-of-1.safetensors"):
        read(tmp_path)


def test_the_systems_error_is_told(tmp_path: Path) -> None:
    with full_beyond(1000), pytest.raises(OSError, match="File too large") as refused:
        write(tmp_path / file_name(), packed(learner(0).state_dict()))
    assert refused.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
