"""Checkpoints in torch_dist format: equal contents are equal wherever they lie, and every other bit is a finding."""

from __future__ import annotations

import math
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dist

from megatron_ppo.telemetry.checkpoint_pieces import DATA_SUFFIX, INDEX_FILE, differing_pieces
from megatron_ppo.telemetry.run_comparison import compare_runs

# A save of one process is meant.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WORDS = ["learning_rate"] * 16  # so many that a pickle's length differs by more than its file's padding


def copied(words: list[str]) -> list[str]:
    """Equal strings that are objects of their own."""
    return ["".join(list(word)) for word in words]


def common(**changed: object) -> tuple[dict[str, object]]:
    """In a tuple, because torch would store the entries of a bare dict one by one."""
    return ({"names": WORDS, "lr": 0.1, "betas": (0.9, 0.95), **changed},)


def content() -> dict[str, Any]:
    return {
        "common": common(),
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bias": torch.zeros(3),
    }


def saved(folder: Path, state: dict[str, Any]) -> Path:
    torch_dist.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return saved(tmp_path / "first", content())


def test_an_object_whose_pickle_has_another_length_is_equal_and_moves_what_is_behind_it(
    tmp_path: Path, first: Path
) -> None:
    second = saved(tmp_path / "second", {**content(), "common": common(names=copied(WORDS))})
    [data] = [path.name for path in first.glob(f"*{DATA_SUFFIX}")]
    for name in (INDEX_FILE, data):
        assert (first / name).read_bytes() != (second / name).read_bytes()
    # The object must lie before a tensor, or nothing has moved.
    indexes = [pickle.loads((folder / INDEX_FILE).read_bytes()) for folder in (first, second)]
    places = [
        {key.fqn: place.offset for key, place in index.storage_data.items() if key.fqn != "common"}
        for index in indexes
    ]
    assert places[0] != places[1]
    assert list(differing_pieces(first, second)) == []


@pytest.mark.parametrize(
    ("key", "value", "finding"),
    [
        ("weight", torch.arange(6, dtype=torch.float32).reshape(2, 3).nextafter(torch.tensor(9.0)), "weight at (0, 0)"),
        ("bias", torch.tensor([0.0, -0.0, 0.0]), "bias at (0,)"),
        ("common", common(lr=math.nextafter(0.1, 1.0)), "common"),
        ("common", common(betas=[0.9, 0.95]), "common"),
        ("common", common(names=WORDS[1:]), "common"),
        ("common", (dict(reversed(common()[0].items())),), "common"),
        ("weight", torch.arange(6, dtype=torch.int32).reshape(2, 3), INDEX_FILE),
        ("weight", torch.arange(6, dtype=torch.float32).reshape(3, 2), INDEX_FILE),
        ("more", torch.zeros(1), INDEX_FILE),
    ],
)  # fmt: skip
def test_every_other_bit_of_a_piece_is_named(
    tmp_path: Path, first: Path, key: str, value: Any, finding: str
) -> None:
    second = saved(tmp_path / "second", {**content(), key: value})
    [line] = differing_pieces(first, second)
    assert line.startswith(f"{finding} ") and line.endswith("another content")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.write_bytes(data.read_bytes() + b"0"), "its pieces end at"),
        (lambda data: data.write_bytes(data.read_bytes()[:-1]), "its pieces end at"),
        (lambda data: data.with_name("__1_0.distcp").write_bytes(b"0"), "its pieces end at 0"),
        (lambda data: data.with_name(INDEX_FILE).write_bytes(b"abc"), "not a pickle"),
        (lambda data: data.with_name(INDEX_FILE).write_bytes(pickle.dumps([1])), "where a record belongs"),
    ],
)
def test_bytes_that_no_piece_explains_are_refused(
    tmp_path: Path, first: Path, change: Callable[[Path], None], message: str
) -> None:
    second = tmp_path / "second"
    shutil.copytree(first, second)
    [data] = second.glob(f"*{DATA_SUFFIX}")
    change(data)
    with pytest.raises(ValueError, match=message):
        list(differing_pieces(first, second))


def test_a_piece_that_is_no_file_of_torch_is_compared_by_its_bytes(tmp_path: Path, first: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(first, second)
    [data] = second.glob(f"*{DATA_SUFFIX}")
    changed = bytearray(data.read_bytes())
    at = changed.find(struct.pack("<6f", *range(6)))  # inside of the tensor, behind the zip's checksum of it
    assert at > 0
    changed[at] ^= 1
    data.write_bytes(changed)
    assert list(differing_pieces(first, second)) == [f"weight at (0, 0) in {data.name} has another content"]


def test_the_comparison_of_runs_reads_pieces_and_names_what_differs(tmp_path: Path) -> None:
    runs = []
    for name, lr in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        state = {**content(), "common": common(lr=lr, names=WORDS if name == "a" else copied(WORDS))}
        run = tmp_path / name
        saved(run / "checkpoints" / "step_2" / "models", state)
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        runs.append(run)
    equal, other = (compare_runs(runs[0], run) for run in runs[1:])
    assert (equal.findings, equal.num_files) == ((), 2)
    assert other.findings == ("step_2: models: common in __0_0.distcp has another content",)
    (runs[1] / "checkpoints" / "step_2" / "models" / INDEX_FILE).write_bytes(b"")
    [finding] = compare_runs(runs[0], runs[1]).findings
    assert "cannot be read piece by piece: not a pickle" in finding
