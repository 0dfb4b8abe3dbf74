"""The proof that the gates accept good runs and reject broken ones, and that a killed run loses nothing: real runs, one
after another.

    python tests/proof/run_proof.py                      everything that has not run yet, then docs/runs.md
    python tests/proof/run_proof.py --only seeds --seeds 0,1,2
    python tests/proof/run_proof.py --only 'broken_*' --redo
    python tests/proof/run_proof.py --budget-minutes 60  starts no run, and no kill, after that; call it again to
                                                         continue. SIGUSR1 ends it at once in the same way
    python tests/proof/run_proof.py --only kills --kills 'collector-*' 'tree-save'
    python tests/proof/run_proof.py --report             only rewrites docs/runs.md
    python tests/proof/run_proof.py --report --record tests/unit/proof/recorded
                                                         keeps the curves that the unit tests judge again

Every case leaves outputs/proof/<case>.json and every kill outputs/proof/kills/<kill>.json, so that several calls
continue one proof. Exit code: 0 when all that was asked for has run and shows what it must, otherwise 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kill_proof import KILLS_ID, KillFolders, run_kills, write_kill_report
from proof_cases import DEFAULT_SEEDS, all_cases, select
from proof_jobs import ROOT, ProofFolders, has_run, run_case
from proof_mutations import MUTATIONS_ID, run_mutations
from proof_report import Proof, record_curves, verdict_of, write_report


def main() -> int:
    """Run what is missing, one job at a time; rewrite the report after each."""
    arguments = _parse()
    # Jobs run in sessions of their own; whoever ends this process must not leave them behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    enough = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: enough.set())
    folders = ProofFolders(root=arguments.state)
    folders.root.mkdir(parents=True, exist_ok=True)
    everything = all_cases(arguments.seeds)
    wants_mutations = not arguments.only or MUTATIONS_ID in arguments.only
    wants_kills = not arguments.only or KILLS_ID in arguments.only
    patterns = [pattern for pattern in arguments.only if pattern not in (MUTATIONS_ID, KILLS_ID)]
    chosen = select(everything, patterns) if patterns or not arguments.only else ()
    deadline = time.monotonic() + 60 * arguments.budget_minutes
    left = 0

    def may_begin() -> bool:
        return time.monotonic() < deadline and not enough.is_set()

    def report() -> Proof:
        return write_report(arguments.document, folders, everything)

    if not arguments.report:
        if wants_mutations and (arguments.redo or folders.read(MUTATIONS_ID) is None):
            run_mutations(folders)
            report()
        for case in chosen:
            if not arguments.redo and has_run(folders.read(case.id)):
                continue
            if not may_begin():
                left += 1
                continue
            print(f"{case.id}: {case.shows}", flush=True)
            result = run_case(case, folders)
            verdict = verdict_of(case, result)
            print(f"  {verdict.text} ({result['wall_s']:.0f} s)", flush=True)
            report()
    failures: list[str] = []
    if wants_kills and not arguments.report:
        left_kills, failures = run_kills(
            KillFolders(root=folders.root / KILLS_ID),
            patterns=arguments.kills,
            may_begin=may_begin,
            document=arguments.document,
            redo=arguments.redo,
        )
        left += left_kills
    elif wants_kills:
        write_kill_report(arguments.document, KillFolders(root=folders.root / KILLS_ID))
    proof = report()
    if arguments.record is not None:
        record_curves(arguments.record, proof)
    if left:
        print(f"{left} cases left after {arguments.budget_minutes:g} minutes; call it again to continue")
    failures += proof.failures(chosen, mutations=wants_mutations)
    for failure in failures:
        print(failure)
    return 1 if left or failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Real runs that prove the gates; resumable.")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN",
        help="seeds, variants, long, real, chaos, broken, mutations, kills, or shell patterns of case ids",
    )  # fmt: skip
    parser.add_argument(
        "--kills", nargs="+", default=[], metavar="PATTERN", help="shell patterns of kills, as 'collector-*'"
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=DEFAULT_SEEDS, help="comma-separated seeds of the sweep (0,1,...,9)"
    )
    parser.add_argument(
        "--budget-minutes", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument("--redo", action="store_true", help="run the chosen cases again")
    parser.add_argument("--report", action="store_true", help="run nothing, rewrite the report")
    parser.add_argument(
        "--state", type=Path, default=ROOT / "outputs" / "proof", help="folder of the results"
    )
    parser.add_argument(
        "--document", type=Path, default=ROOT / "docs" / "runs.md", help="file with the tables"
    )
    parser.add_argument(
        "--record", type=Path, help="folder for the curves of one seed and of the broken cases"
    )
    return parser.parse_args()


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
