"""Files of a checkpoint run no code: torch's own pass, a pickle with a function in it is refused by name, unread."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_ppo.mcore.checkpoint_safety import METADATA_FILE, check_objects, read_metadata
from megatron_ppo.protocol.errors import CheckpointError


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._proof}",)


def saved(folder: Path, **state: object) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves without a process group
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def test_what_torch_writes_passes(tmp_path: Path) -> None:
    dtypes = {str(d): torch.zeros(2, dtype=d) for d in (torch.float32, torch.bfloat16, torch.int64)}
    path = saved(tmp_path / "checkpoint", steps=[1, {"lr": 0.5}], name="policy", **dtypes)
    metadata = read_metadata(path)
    assert set(metadata.state_dict_metadata) >= {"name", *dtypes}
    check_objects(path, metadata)


def test_an_index_with_a_function_in_it_is_refused_before_it_runs(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint", w=torch.zeros(2))
    proof = tmp_path / "proof"
    (path / METADATA_FILE).write_bytes(pickle.dumps(Evil(proof)))
    with pytest.raises(CheckpointError, match=r"\.metadata is refused: it would load posix\.system"):
        read_metadata(path)
    assert not proof.exists()
    pickle.loads((path / METADATA_FILE).read_bytes())
    assert proof.exists()  # it would have run


def test_a_stored_object_with_a_function_in_it_is_refused_before_it_runs(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    path = saved(tmp_path / "checkpoint", rng=Evil(proof), w=torch.zeros(2))
    metadata = read_metadata(path)
    with pytest.raises(
        CheckpointError, match=r"(?s)object rng cannot be read as plain data: .*posix\.system"
    ):
        check_objects(path, metadata)
    assert not proof.exists()


def test_an_index_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="holds a dict, must be torch's Metadata"):
        read_metadata(tmp_path)


def test_torn_files_raise_what_the_reader_expects(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint", w=torch.zeros(2))
    whole = (path / METADATA_FILE).read_bytes()
    (path / METADATA_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        read_metadata(path)
