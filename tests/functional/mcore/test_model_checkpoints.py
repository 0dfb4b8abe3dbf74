"""Checkpoints of real models: any layout loads what any other saved, in the foreground or background; bad files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.checkpoint_jobs:"
TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
# Buckets of fewer parameters than the model has, so that several are on their way at a time.
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000}

# Another layout adds in another order (see test_layouts): relative rounding of a few 1e-7, grown over four steps.
RELATIVE = 1e-5
# Adam scales rounding up where the true gradient is 0; a small part of four steps of 1e-4.
PARAMETER_ABSOLUTE = 1e-6
# Scores are read after the steps and sum over the whole network.
SCORE_RELATIVE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to hold the same two models.

    Attributes:
        changes: further constructor arguments.
        loads: the rows whose checkpoints it continues from; every row is loaded by one process, and by its successor.
    """

    layout: dict[str, int | bool] = field(default_factory=dict)
    world_size: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    loads: tuple[str, ...]


# Four layers, so that two stages can have two chunks each.
MODEL = "qwen2_deep"
TABLE: dict[str, Row] = {
    "one": Row(
        world_size=1,
        loads=("one", "tp2", "tp2_sp", "pp2", "dp2", "dp2_overlap", "cp2", "pp2_vpp2", "tp2_pp2"),
    ),
    "tp2": Row(layout=TP2, loads=("one", "tp2_pp2")),
    "tp2_sp": Row(layout=TP2 | SP, loads=("one", "tp2")),
    "pp2": Row(layout=PP2, loads=("one", "tp2_sp")),
    "dp2": Row(loads=("one", "pp2")),
    # Saved while a gather of parameters is on its way.
    "dp2_overlap": Row(changes=OVERLAP, loads=("dp2_overlap", "dp2")),
    "cp2": Row(layout=CP2, loads=("one", "dp2_overlap")),
    "pp2_vpp2": Row(layout=PP2 | VPP2, loads=("one", "cp2")),
    "tp2_pp2": Row(layout=TP2 | PP2, world_size=4, loads=("one", "pp2_vpp2")),
}


def run(workers: WorkerGroup, row: Row, job: str, **arguments: Any) -> list[Any]:
    arguments = {"layout": row.layout, **row.changes, **arguments}
    if row.world_size == 1:
        return [workers.run_alone(JOBS + job, **arguments)]
    return workers.run(JOBS + job, world_size=row.world_size, **arguments)


@pytest.fixture(scope="module")
def expected(workers: WorkerGroup, tiny_model: Callable[[str], Path]) -> dict[str, Any]:
    """Four steps in one process, never interrupted."""
    result: dict[str, Any] = workers.run_alone(
        JOBS + "uninterrupted", folder=str(tiny_model(MODEL)), layout={}
    )
    return result


@pytest.fixture(scope="module")
def saved_by(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """The checkpoint after two steps that a row of the table saved; made once."""
    made: dict[str, str] = {}

    def checkpoint(name: str) -> str:
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name) / "models")
            run(workers, TABLE[name], "save_after_two", folder=str(tiny_model(MODEL)), checkpoint=made[name])
        return made[name]

    return checkpoint


def assert_same(seen: dict[str, Any], expected: dict[str, Any], *, exact: bool = False) -> None:
    for mine, theirs in zip(seen["metrics"], expected["metrics"], strict=True):
        for name in theirs:
            if exact or name.endswith("/lr"):
                assert mine[name] == theirs[name], name
            elif name.endswith(("loss", "grad_norm")):
                assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE), name
    for model, parameters in expected["parameters"].items():
        for name, tensor in parameters.items():
            tolerance = 0.0 if exact else PARAMETER_ABSOLUTE
            torch.testing.assert_close(
                seen["parameters"][model][name],
                tensor,
                rtol=0.0,
                atol=tolerance,
                msg=lambda text, what=f"{model} {name}": f"{what}: {text}",
            )
        scores = seen["scores"][model]
        if exact:
            assert torch.equal(scores, expected["scores"][model])
        else:
            torch.testing.assert_close(scores, expected["scores"][model], rtol=SCORE_RELATIVE, atol=1e-5)
    assert seen["adam_steps"] == expected["adam_steps"] == [4.0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TABLE)
def test_two_steps_saved_in_any_layout_and_two_more_in_another_are_four_steps_of_one_process(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    saved_by: Callable[[str], str],
    expected: dict[str, Any],
    name: str,
) -> None:
    row = TABLE[name]
    ranks = run(
        workers,
        row,
        "resume_each",
        folder=str(tiny_model(MODEL)),
        checkpoints=[saved_by(saver) for saver in row.loads],
    )
    for rank in ranks:
        for saver, seen in zip(row.loads, rank, strict=True):
            assert_same(seen, expected, exact=name == saver == "one")


# Three key/value heads are filled up to four for two tensor ranks, 61 vocabulary entries to 62.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["qwen2_three_kv", "qwen2_odd_vocab"])
def test_what_fills_up_tensor_ranks_is_no_part_of_a_checkpoint(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    folder = str(tiny_model(model))
    rows = {name: Row(layout=layout, loads=()) for name, layout in (("tp2", TP2), ("pp2", PP2))}
    rows["one"] = Row(world_size=1, loads=())
    whole = workers.run_alone(JOBS + "uninterrupted", folder=folder, layout={})
    saved = {name: str(tmp_path / name) for name in ("one", "tp2")}
    for name, checkpoint in saved.items():
        run(workers, rows[name], "save_after_two", folder=folder, checkpoint=checkpoint)
    for saver, loader in (("one", "tp2"), ("tp2", "one"), ("tp2", "pp2")):
        for rank in run(workers, rows[loader], "resume_each", folder=folder, checkpoints=[saved[saver]]):
            assert_same(rank[0], whole)


def test_float32_copies_of_bf16_parameters_are_restored_in_full(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Made of the saved bf16 parameters they would lose 16 bits, and the next steps would differ."""
    row = Row(changes={"precision": "bf16"}, loads=())
    folder, checkpoint = str(tiny_model("qwen2")), str(tmp_path / "models")
    whole = run(workers, row, "uninterrupted", folder=folder)
    run(workers, row, "save_after_two", folder=folder, checkpoint=checkpoint)
    for rank, seen in enumerate(run(workers, row, "resume_each", folder=folder, checkpoints=[checkpoint])):
        assert_same(seen[0], whole[rank], exact=True)


@pytest.mark.parametrize("layout", [{}, TP2], ids=["dp2", "tp2"])
def test_a_save_in_the_background_holds_the_step_at_which_it_began(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path, layout: dict[str, int]
) -> None:
    checkpoints = {name: str(tmp_path / name) for name in ("synchronous", "background")}
    ranks = workers.run(
        JOBS + "save_in_background",
        folder=str(tiny_model("qwen2")),
        checkpoints=checkpoints,
        layout=layout,
    )
    for seen in ranks:
        # The models went on training before the first byte was written.
        assert (seen["early"], seen["files_early"], seen["late"]) == (False, [], True)
        assert_same(seen["results"]["background"], seen["results"]["synchronous"], exact=True)
        # The generators go on where each rank's own were.
        assert seen["drawn_again"] == dict.fromkeys(checkpoints, seen["drawn"])
    assert ranks[0]["drawn"]["torch"] != ranks[1]["drawn"]["torch"]
    # Megatron seeds this one by tensor rank: two copies of a model share it, two halves do not.
    same = ranks[0]["drawn"]["tensor rank"] == ranks[1]["drawn"]["tensor rank"]
    assert same == ("tensor_model_parallel_size" not in layout)


# What torch's AdamW needs: each answer of ours is taken away, and the test sees what it is for.


@pytest.fixture(scope="module")
def resumed_without(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    def result(handling: str) -> dict[str, Any]:
        checkpoint = str(tmp_path_factory.mktemp("adam") / "models")
        found: dict[str, Any] = workers.run_alone(
            JOBS + "resume_without",
            folder=str(tiny_model("qwen2")),
            checkpoint=checkpoint,
            handling=handling,
        )
        return found

    return result


def test_a_resume_with_all_three_answers_is_exact(resumed_without: Callable[[str], dict[str, Any]]) -> None:
    found = resumed_without("")
    assert found["error"] == ""
    assert found["seen"]["adam_steps"] == found["expected"]["adam_steps"] == [2.0, 3.0]
    assert found["seen"]["metrics"] == found["expected"]["metrics"]


def test_without_a_state_from_the_start_a_model_that_was_never_stepped_cannot_be_saved(
    resumed_without: Callable[[str], dict[str, Any]],
) -> None:
    assert resumed_without("initialise_adam_state")["error"].startswith("AssertionError")


def test_without_passing_the_step_on_the_restored_state_lacks_it(
    resumed_without: Callable[[str], dict[str, Any]],
) -> None:
    assert resumed_without("keeping_adam_step")["error"] == "KeyError: 'step'"


def test_without_separate_step_counters_every_parameter_advances_all_of_them(
    resumed_without: Callable[[str], dict[str, Any]],
) -> None:
    """Silent: nothing is raised, the following steps are wrong."""
    found = resumed_without("separate_adam_steps")
    assert found["error"] == ""
    assert max(found["seen"]["adam_steps"]) > 10 * max(found["expected"]["adam_steps"])
    assert found["seen"]["metrics"] != found["expected"]["metrics"]


# Bad files


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("*.distcp"))[-1]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garble(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "shard lost": (lambda f: _shard(f).unlink(), (".distcp is missing; it holds ",)),
    "shard cut": (lambda f: _cut(_shard(f)), (".distcp has ", " ends at ")),
    "shard garbled": (lambda f: _garble(_shard(f)), ("cannot be read",)),
    "metadata lost": (lambda f: (f / ".metadata").unlink(), (".metadata is missing",)),
    "metadata cut": (lambda f: _cut(f / ".metadata"), (".metadata cannot be read",)),
    "format lost": (lambda f: (f / "metadata.json").unlink(), ("metadata.json is missing",)),
    "format cut": (lambda f: _cut(f / "metadata.json"), ("metadata.json is no JSON",)),
    "common cut": (lambda f: _cut(f / "common.pt"), ("common",)),
    "common lost": (lambda f: (f / "common.pt").unlink(), ("common.pt is missing",)),
    "everything lost": (shutil.rmtree, ("is missing",)),
}


def test_a_torn_checkpoint_and_one_of_other_models_are_refused_by_name_on_every_rank(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    saved_by: Callable[[str], str],
    tmp_path: Path,
) -> None:
    source, folder = Path(saved_by("dp2")), str(tiny_model(MODEL))
    copies = {}
    for number, (name, (damage, _)) in enumerate(DAMAGES.items()):
        if "common" in name and not (source / "common.pt").exists():
            continue  # megatron-core 0.19 saves that state with the shards
        copies[name] = tmp_path / str(number)
        shutil.copytree(source, copies[name])
        damage(copies[name])
    others = tmp_path / "others"
    workers.run_alone(JOBS + "with_other_tensors", folder=folder, checkpoint=str(others))
    checkpoints = {name: str(path) for name, path in copies.items()} | {"others": str(others)}
    for messages in workers.run(JOBS + "load_errors", folder=folder, checkpoints=checkpoints, layout={}):
        for name, path in copies.items():
            words = (str(path), *DAMAGES[name][1])
            assert [word for word in words if word not in messages[name]] == [], (name, messages[name])
        assert "has no tensor policy.decoder.final_layernorm.weight" in messages["others"]
    other_model = {"dp2": str(source)}
    for messages in workers.run(
        JOBS + "load_errors", folder=str(tiny_model("qwen3")), checkpoints=other_model, layout={}
    ):
        assert "policy was MegatronPolicy of" in messages["dp2"]
        assert "Qwen3ForCausalLM" in messages["dp2"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, less than one rank's part."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs the right to mount one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("in_background", [False, True], ids=["synchronous", "background"])
def test_a_full_disk_is_one_error_on_every_rank(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], small_disk: Path, in_background: bool
) -> None:
    (small_disk / "step").mkdir()
    messages = workers.run(
        JOBS + "save_error",
        folder=str(tiny_model("qwen2")),
        checkpoint=str(small_disk / "step"),
        layout=TP2,
        in_background=in_background,
        longest_file=None,
    )
    assert messages[0] == messages[1]
    assert "rank 0: " in messages[0] and "No space left on device" in messages[0]
    assert "rank 1: " in messages[0]


@pytest.mark.parametrize("in_background", [False, True], ids=["synchronous", "background"])
def test_a_file_that_the_kernel_cuts_is_one_error_on_every_rank(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path, in_background: bool
) -> None:
    """As on a full disk, also where no small one can be mounted."""
    messages = workers.run(
        JOBS + "save_error",
        folder=str(tiny_model("qwen2")),
        checkpoint=str(tmp_path),
        layout=TP2,
        in_background=in_background,
        longest_file=64 * 1024,
    )
    assert messages[0] == messages[1]
    assert "rank 0: " in messages[0] and "File too large" in messages[0]
    assert "rank 1: " in messages[0]


# A critic from another run


@pytest.mark.parametrize("name", ["one", "tp2_sp", "pp2_vpp2"])
def test_a_critic_takes_over_weights_from_another_layout_but_neither_optimizer_nor_schedule(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    saved_by: Callable[[str], str],
    expected: dict[str, Any],
    name: str,
) -> None:
    folder = str(tiny_model(MODEL))
    source = run(workers, TABLE["one"], "warm_start", folder=folder, checkpoint=saved_by("one"))[0]
    for seen in run(workers, TABLE[name], "warm_start", folder=folder, checkpoint=saved_by("dp2")):
        assert not torch.equal(seen["before"], seen["after"])
        assert seen["after"].abs().max() > 0.0
        torch.testing.assert_close(seen["after"], source["after"], rtol=SCORE_RELATIVE, atol=1e-5)
        for tensor in expected["parameters"]["critic"]:
            torch.testing.assert_close(
                seen["parameters"][tensor], source["parameters"][tensor], rtol=0.0, atol=PARAMETER_ABSOLUTE
            )
        # The first step of a new schedule and of a new optimizer.
        assert seen["adam_steps"] == {1.0}
        assert seen["lr"] == pytest.approx(1e-4)
        torch.testing.assert_close(seen["values"], source["values"], rtol=SCORE_RELATIVE, atol=1e-5)


def test_a_bf16_critic_trains_on_from_the_weights_that_it_took_over(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], saved_by: Callable[[str], str]
) -> None:
    """Its float32 copies must follow, or the first step would put the old weights back."""
    seen = workers.run_alone(
        JOBS + "warm_start",
        folder=str(tiny_model(MODEL)),
        checkpoint=saved_by("dp2"),
        layout={},
        precision="bf16",
    )
    moved = (seen["after"] - seen["before"]).abs().max()
    # One step of 1e-4 moves the values far less than two steps of another run's have.
    assert (seen["values"] - seen["after"]).abs().max() < 0.75 * moved
    assert (seen["values"] - seen["before"]).abs().max() > 0.25 * moved
