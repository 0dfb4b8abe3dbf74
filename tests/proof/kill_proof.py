"""The kill table: runs chains of kills until none is left, keeps one JSON file a kill, writes its part of docs/runs.md.

Driven by `run_proof.py`. Several calls continue one table: a kill that is proven is not repeated, one that failed is
tried again on another commit, and its failure stays in the table.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kill_chain import Chain, ChainResult, Death
from kill_checks import trained_ordinals
from kill_plan import Kill, all_kills, chain_settings, next_chain, select_kills
from proof_jobs import commit, machine
from proof_report import table, with_section

from megatron_ppo.telemetry.run_dir import write_json_atomically

KILLS_ID = "kills"
CHAIN_LENGTH = 7
UNDISTURBED = "undisturbed"
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillFolders:
    """`outputs/proof/kills`: one file a kill, one for the run without kills, run folders of chains that failed."""

    root: Path

    def path(self, kill_id: str) -> Path:
        return self.root / f"{kill_id}.json"

    def read(self, kill_id: str) -> dict[str, Any] | None:
        """The result of a kill, None when it was not carried out."""
        path = self.path(kill_id)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def results(self, kills: Sequence[Kill]) -> dict[str, Result]:
        """Those that there are, by id, in the order of the plan."""
        found = {kill.id: self.read(kill.id) for kill in kills}
        return {kill_id: result for kill_id, result in found.items() if result is not None}

    def num_chains(self) -> int:
        """How many were begun; each one has a number of its own."""
        return len(list(self.root.glob("chain_*.begun")))


def is_proven(result: Result | None) -> bool:
    """Whether the struck run came to its end and passed every check."""
    return result is not None and not result["problems"]


def is_pending(result: Result | None, *, code: str) -> bool:
    """Whether the kill has to be carried out, or after a failure again, because the code has changed since."""
    return result is None or (bool(result["problems"]) and result["commit"] != code)


def run_kills(
    folders: KillFolders,
    *,
    patterns: Sequence[str],
    may_begin: Callable[[], bool],
    document: Path,
    redo: bool = False,
) -> tuple[int, list[str]]:
    """Carry out what is missing while `may_begin` allows another kill; the report is written after each chain.

    Returns: how many are left, and what failed, one line each.
    """
    folders.root.mkdir(parents=True, exist_ok=True)
    chosen = select_kills(all_kills(), patterns)
    if redo:
        for kill in chosen:
            folders.path(kill.id).unlink(missing_ok=True)
    code = commit()
    if is_pending(folders.read(UNDISTURBED), code=code) and may_begin():
        _run_chain(folders, (), may_begin)
    tried: set[str] = set()
    while may_begin():
        pending = [k for k in chosen if is_pending(folders.read(k.id), code=code) and k.id not in tried]
        chain = next_chain(pending, length=CHAIN_LENGTH)
        if not chain:
            break
        tried |= {chain[0].id}  # a chain that does not reach its first kill must not be repeated for ever
        _run_chain(folders, chain, may_begin)
        write_kill_report(document, folders)
    write_kill_report(document, folders)
    results = folders.results(chosen)
    left = sum(1 for kill in chosen if is_pending(folders.read(kill.id), code=code))
    failures = [
        f"kill {kill_id}: {'; '.join(result['problems'])[:500]}"
        for kill_id, result in results.items()
        if not is_proven(result)
    ]
    undisturbed = folders.read(UNDISTURBED)
    if not is_proven(undisturbed):
        failures.append(f"the run without kills: {undisturbed and undisturbed['problems']}")
    return left, failures


def _run_chain(folders: KillFolders, kills: tuple[Kill, ...], may_begin: Callable[[], bool]) -> None:
    number = folders.num_chains()
    settings = chain_settings(number, kills)
    (folders.root / f"chain_{number}.begun").touch()
    base = folders.root / "runs" / settings.name
    started, load = time.time(), os.getloadavg()[0]
    print(f"{settings.name}: {', '.join(kill.id for kill in kills) or 'no kill'}", flush=True)
    result = Chain(settings, kills, base, may_strike=may_begin).run()
    print(f"  {len(result.deaths)} kills, {result.lives} lives, {result.wall_s:.0f} s", flush=True)
    facts = {
        "chain": asdict(settings),
        "commit": commit(),
        "machine": machine(),
        "load_at_start": round(load, 1),
        "started_utc": datetime.fromtimestamp(started, tz=UTC).isoformat(timespec="seconds"),
        "chain_wall_s": round(result.wall_s, 1),
        "lives": result.lives,
        "ledger": None if result.problems else ledger_cost(result),
    }
    for problem in (*result.failed.values(), *result.problems):
        print(f"  FAILED: {problem}", flush=True)
    if not kills:
        write_json_atomically(folders.path(UNDISTURBED), {**facts, "problems": result.problems})
    for kill_id, (death, problems) in attributed(result).items():
        earlier = folders.read(kill_id)
        failures = [*earlier["earlier_failures"], *earlier["problems"]] if earlier else []
        content = {
            "death": None if death is None else asdict(death),
            "problems": problems,
            "earlier_failures": failures,
        }
        write_json_atomically(folders.path(kill_id), {**facts, **content})
    if not result.problems and not result.failed:
        shutil.rmtree(base, ignore_errors=True)
        for output in base.parent.glob(f"{base.name}.*.out"):
            output.unlink()


def attributed(result: ChainResult) -> dict[str, tuple[Death | None, list[str]]]:
    """What a chain says of its kills: how each was carried out (None: it was not), and what is wrong with it."""
    found: dict[str, tuple[Death | None, list[str]]] = {
        death.kill: (death, list(result.problems)) for death in result.deaths
    }
    for kill_id, problem in result.failed.items():
        death, _ = found.get(kill_id, (None, []))
        found[kill_id] = (death, [problem])
    return found


def ledger_cost(result: ChainResult) -> dict[str, float]:
    """Bytes of the ledger's file per trained prompt."""
    assert result.run_dir is not None
    size = (result.run_dir / "ledger.jsonl").stat().st_size
    return {"bytes": size, "bytes_per_prompt": round(size / len(trained_ordinals(result.run_dir)), 1)}


def write_kill_report(document: Path, folders: KillFolders) -> None:
    """Replace the section of the kills."""
    body = kill_section(folders.results(all_kills()), folders.read(UNDISTURBED))
    if body is not None:
        text = document.read_text(encoding="utf-8")
        document.write_text(with_section(text, KILLS_ID, body), encoding="utf-8")


COLUMNS = (
    "killed", "planned", "struck in step, stage", "ranks", "what followed", "torn save", "resumed from", "run",
    "as it must",
)  # fmt: skip
METHOD = f"""`make proof ARGS='--only kills --budget-minutes 60'` continues the table. A run with critic warm-up, epochs
that end inside of steps and a checkpoint after every step is struck with SIGKILL up to {CHAIN_LENGTH} times, resumed by
the same command, and compared at its end with a run without kills: every prompt trained exactly once, by batches and by
the ledger; no token older than allowed, in any attempt; every row there once; `scripts/ledger.py` explains every
ordinal. After each death: no process left, `latest` and every visible checkpoint complete, a cause on the terminal.
Planned is a phase of the step as the trainer's heartbeat shows it, with a seeded delay; struck is what the heartbeat
had when the signal was sent."""


def kill_section(results: Mapping[str, Result], undisturbed: Result | None) -> str | None:
    """Markdown of the section; None without any result."""
    if not results:
        return None
    proven = sum(is_proven(result) for result in results.values())
    deaths = [result["death"] for result in results.values() if is_proven(result)]
    survived = sum(death["outcome"] == "survived" for death in deaths)
    chains = {result["chain"]["name"]: result for result in results.values()}
    some = next(iter(results.values()))
    commits = sorted({result["commit"][:7] for result in results.values()})
    loads = [result["load_at_start"] for result in chains.values()]
    days = sorted({result["started_utc"][:10] for result in results.values()})
    steps, wall_s = some["chain"]["steps"], sum(result["chain_wall_s"] for result in chains.values())
    whole = "has not run yet" if undisturbed is None else "passes" if is_proven(undisturbed) else "FAILS"
    days_words = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"## Kills\n\n{days_words}, commit {', '.join(f'`{c}`' for c in commits)}, on {some['machine']}. Load of the "
        f"machine when the runs started: {min(loads):.0f} to {max(loads):.0f}.\n\n"
        f"**{proven} of {len(results)} kills pass every check** (of {len(all_kills())} planned; after {survived} the "
        f"run went on by itself, after {len(deaths) - survived} it ended and was resumed), in {len(chains)} runs of "
        f"{steps} steps, {wall_s:.0f} s in all. The run without kills {whole}.\n\n{METHOD}\n\n"
        f"{table(COLUMNS, [_row(result) for result in results.values()])}{_failures(results)}"
    )


def _row(result: Result) -> list[str]:
    death, chain = result["death"], result["chain"]
    saves = "async" if chain["async_save"] else "plain"
    window = "" if chain["load_replay_buffer"] else ", window not restored"
    run = f"{chain['name'].removeprefix('chain_')}: age {chain['age']}, {saves} saves{window}"
    verdict = "yes" if is_proven(result) else "**NO**"
    if death is None:
        return ["", "", "", "", "not reached", "", "", run, verdict]
    if death["outcome"] == "survived":
        followed, resumed = "the run went on", ""
    else:
        took = "?" if death["ended_after_s"] is None else f"{death['ended_after_s']:.0f} s"
        followed = f"ended after {took}: {_short(death['cause'])}"
        resumed = "" if death["resumed_from"] is None else f"step {death['resumed_from']}"
    return [
        death["victim"], death["when"], f"{death['row']}, {death['stage']}", str(death["num_ranks"]), followed,
        ", ".join(death["left"]), resumed, run, verdict,
    ]  # fmt: skip


def _failures(results: Mapping[str, Result]) -> str:
    lines = [
        f"- `{kill_id}` failed: {_short(problem)}"
        for kill_id, result in results.items()
        for problem in (*result["earlier_failures"], *result["problems"])
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def _short(text: str, limit: int = 160) -> str:
    return textwrap.shorten(text.replace("`", "'"), limit, placeholder=" …")
