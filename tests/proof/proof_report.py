"""Turns the proof's state files into verdicts and into the tables of docs/runs.md.

Each section of the document stands between two comments and is replaced as a whole; text outside them is left alone,
so other parts of the document may be written by hand or by other tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from proof_cases import SEEDS_ALLOWED_TO_FAIL, Case
from proof_jobs import ProofFolders
from proof_mutations import MUTATIONS, MUTATIONS_ID

from megatron_ppo.protocol.faults import FaultKind, faults_metric

Result = Mapping[str, Any]

HEAD = """# Runs

Results of real runs on one machine, written by the tools named in each section. Failures stay in the tables.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a case showed what it must, and in words what it showed."""

    proven: bool
    text: str


def failed_gates(result: Result) -> list[str]:
    """Names of the gates that failed, in the order of the configuration."""
    return [gate["name"] for gate in result["gates"] if not gate["passed"]]


def verdict_of(case: Case, result: Result) -> Verdict:
    """A run that did not come to its end proves nothing, neither for a good nor for a broken trainer."""
    if result["unfinished"] is not None or not result["gates"]:
        return Verdict(proven=False, text=f"did not finish: {result['unfinished']}")
    failed = failed_gates(result)
    if not case.rejected_by:
        passed = f"{len(result['gates']) - len(failed)}/{len(result['gates'])} gates"
        return Verdict(proven=not failed, text=passed + (f", failed: {', '.join(failed)}" if failed else ""))
    # A gate without data fails too, but not because it saw the mistake.
    seen = [gate["name"] for gate in result["gates"] if not gate["passed"] and gate["observed"] is not None]
    by = [name for name in case.rejected_by if name in seen]
    return Verdict(proven=bool(by), text=f"rejected by {', '.join(seen)}" if seen else "NOT rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All cases with their results so far; None where a case has not run."""

    cases: tuple[Case, ...]
    results: Mapping[str, Result | None]
    mutations: Result | None

    def failures(self, chosen: Iterable[Case], *, mutations: bool) -> list[str]:
        """What the chosen cases do not show, one line each; of the seeds one may fail."""
        bad: dict[str, list[str]] = {}
        for case in chosen:
            result = self.results[case.id]
            verdict = (
                Verdict(proven=False, text="has not run") if result is None else verdict_of(case, result)
            )
            if not verdict.proven:
                bad.setdefault(case.section, []).append(f"{case.id}: {verdict.text}")
        if len(bad.get("seeds", [])) <= SEEDS_ALLOWED_TO_FAIL:
            bad.pop("seeds", None)
        lines = [line for section in bad.values() for line in section]
        if mutations:
            done = [] if self.mutations is None else self.mutations["mutations"]
            lines += [f"mutation not noticed: {m['name']}" for m in done if not m["noticed"]]
            lines += ["mutations have not run"] if self.mutations is None else []
        return lines


def write_report(document: Path, folders: ProofFolders, cases: tuple[Case, ...]) -> Proof:
    """Replace the proof's sections of the document by what the state files say; sections without any are left out."""
    proof = Proof(
        cases=cases,
        results={case.id: folders.read(case.id) for case in cases},
        mutations=folders.read(MUTATIONS_ID),
    )
    text = document.read_text(encoding="utf-8") if document.exists() else HEAD
    for name, body in sections(proof).items():
        text = with_section(text, name, body)
    document.write_text(text, encoding="utf-8")
    return proof


def record_curves(folder: Path, proof: Proof) -> None:
    """Write what the gates read of one good seed and of the broken cases, at five digits, a few kilobytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in proof.cases:
        result = proof.results[case.id]
        if result is None or not result["curves"] or not (case.section == "broken" or case.id == "seed_0"):
            continue
        curves = {
            name: [[step, float(f"{value:.5g}")] for step, value in points]
            for name, points in sorted(result["curves"].items())
        }
        text = json.dumps({"case": case.id, "commit": result["commit"], "curves": curves})
        # One line a metric, so that a new recording can be compared with the old one.
        (folder / f"{case.id}.json").write_text(text.replace('"train/', '\n"train/') + "\n", encoding="utf-8")


def with_section(text: str, name: str, body: str) -> str:
    """The document with the section replaced, or appended when it has none of that name."""
    begin, end = f"<!-- begin {name}: written by `make proof` -->", f"<!-- end {name} -->"
    block = f"{begin}\n\n{body.strip()}\n\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: block, text)
    return text.rstrip() + "\n\n" + block + "\n"


def sections(proof: Proof) -> dict[str, str]:
    """Markdown of every section that has a result."""
    by_section = {
        name: [(c, r) for c in proof.cases if c.section == name and (r := proof.results[c.id]) is not None]
        for name in ("seeds", "variants", "long", "real", "chaos", "broken")
    }
    bodies = {}
    if by_section["seeds"]:
        bodies["seeds"] = _seeds(by_section["seeds"])
    if by_section["variants"]:
        bodies["variants"] = _variants(by_section["variants"])
    if by_section["long"]:
        bodies["long"] = _long(by_section["long"])
    if by_section["real"]:
        bodies["real"] = _real(by_section["real"])
    if by_section["chaos"]:
        bodies["chaos"] = _chaos(by_section["chaos"])
    if by_section["broken"]:
        bodies["broken"] = _broken(by_section["broken"])
    if proof.mutations is not None:
        bodies["mutations"] = _mutations(proof.mutations)
    return bodies


Done = Sequence[tuple[Case, Result]]

SEED_COLUMNS = (
    "seed", "reward 1-5", "reward 11-20", "reward 36-40", "val 0 / 10 / 20 / 30 / 40", "EV 6-20", "EV 31-40", "clip",
    "entropy", "KL", "age", "probe", "gates", "wall s", "GB", "commit",
)  # fmt: skip
COLUMNS_MEAN = """EV is the critic's explained variance before the update; clip fraction over steps 6-40; entropy over
steps 31-40, in nats; KL is that of engine against trainer over steps 6-40, in nats; age is the largest in weight
versions; probe is the largest difference of log-probs between engine and trainer at the same version, in nats; wall
time is from the command to its end; GB is the largest proportional set size of all its processes."""


def _seeds(done: Done) -> str:
    passed = sum(verdict_of(case, result).proven for case, result in done)
    slowest, largest = (max(result[key] for _, result in done) for key in ("wall_s", "peak_pss_bytes"))
    rows = [
        [case.shows.removeprefix("run.seed="), *_numbers(result), *_costs(result)] for case, result in done
    ]
    return (
        f"## Seeds of the default experiment\n\n{_provenance(done)}\n\n"
        f"`megatron_40step`, one trainer rank. **{passed} of {len(done)} seeds pass every gate** (all but "
        f"{SEEDS_ALLOWED_TO_FAIL} must). Slowest {slowest:.0f} s, largest {largest / 1e9:.1f} GB.\n\n{COLUMNS_MEAN}"
        f"\n\n{table(SEED_COLUMNS, rows)}{_mishaps(done)}"
    )


def _variants(done: Done) -> str:
    columns = ("experiment", "what", *SEED_COLUMNS[1:])
    rows = [[_experiment(case), case.shows, *_numbers(result), *_costs(result)] for case, result in done]
    return (
        f"## Variants\n\n{_provenance(done)}\n\nColumns as above; one run each.\n\n"
        f"{table(columns, rows)}{_mishaps(done)}"
    )


def _long(done: Done) -> str:
    passed = sum(verdict_of(case, result).proven for case, result in done)
    rows = [
        [case.shows.removeprefix("run.seed="), *_numbers(result), *_costs(result)] for case, result in done
    ]
    return (
        f"## Seeds of the variant with long responses\n\n{_provenance(done)}\n\n`megatron_40step_long`: responses of "
        f"64 to 128 tokens on average, in-flight weight updates. **{passed} of {len(done)} seeds pass every gate** "
        f"(all must). Columns as above.\n\n{table(SEED_COLUMNS, rows)}{_mishaps(done)}"
    )


def _real(done: Done) -> str:
    [(case, result)] = done
    metrics = (
        ("reward", "train/reward", "{:.3f}"),
        ("policy loss", "train/loss", "{:.5f}"),
        ("gradient norm", "train/grad_norm", "{:.3f}"),
        ("critic loss", "train/critic/loss", "{:.5f}"),
        ("age", "age/max_versions", "{:.0f}"),
        ("probe", "probe/max_abs_logprob_diff_nats", "{:.1e}"),
        ("moved", "probe/max_abs_logprob_change_nats", "{:.3f}"),
        ("accuracy", "validation/accuracy", "{:.3f}"),
    )
    steps = sorted({int(step) for _, metric, _ in metrics for step, _ in result["curves"].get(metric, [])})
    rows = [
        [str(step), *(_mean(result, metric, step, step, style) for _, metric, style in metrics)]
        for step in steps
    ]
    gates, wall_s, largest_gb, _ = _costs(result)
    return (
        f"## A real pretrained model\n\n{_provenance(done)}\n\n{_experiment(case)}: {case.shows}, one trainer rank. "
        f"**{gates} gates pass.** {wall_s} s from the command to its end, largest {largest_gb} GB. Columns as above; "
        f"moved is how far the update moved the engine's log-probs, in nats; accuracy is that of greedy answers to 32 "
        f"prompts.\n\n{table(('step', *(name for name, _, _ in metrics)), rows)}{_mishaps(done)}"
    )


def _chaos(done: Done) -> str:
    columns = ("faults", *(kind.value for kind in FaultKind), *SEED_COLUMNS[1:])
    rows = [
        [
            case.shows,
            *(_largest(result, faults_metric(kind), "{:.0f}") for kind in FaultKind),
            *_numbers(result),
            *_costs(result),
        ]
        for case, result in done
    ]
    by_id = {case.id: result for case, result in done}
    cost = ""
    if {"chaos_on", "chaos_off"} <= by_id.keys():
        on, off = by_id["chaos_on"], by_id["chaos_off"]
        cost = (
            f" With faults the run took {on['wall_s']:.0f} s, without {off['wall_s']:.0f} s; from the first to the "
            f"last step, without the start, {on['training_s']:.0f} s and {off['training_s']:.0f} s."
        )
    return (
        f"## Faults that a run survives\n\n{_provenance(done)}\n\n`chaos_40step`: the default experiment while it "
        f"injects faults into itself, and the same without them. It has to pass the same gates, and every kind of "
        f"fault has to happen.{cost} The first columns count the faults, the others are those of the seeds.\n\n"
        f"{table(columns, rows)}{_mishaps(done)}"
    )


def _broken(done: Done) -> str:
    columns = ("case", "what is broken", "experiment", "reward by 5 steps", "val 10 / 40", "EV 6-20", "EV 31-40",
               "clip", "entropy", "KL", "must fail one of", "failed gates", "as it must")  # fmt: skip
    rows = []
    for case, result in done:
        verdict = verdict_of(case, result)
        failed = ", ".join(failed_gates(result)) or "none"
        if result["unfinished"] is not None:
            failed = verdict.text
        rows.append([
            case.bug or "nothing", case.shows, _experiment(case), _blocks(result), _validation(result, (10, 40)),
            *_critic_and_policy(result), ", ".join(case.rejected_by) or "must pass all", failed,
            "yes" if verdict.proven else "**NO**",
        ])  # fmt: skip
    return (
        f"## Broken trainers\n\n{_provenance(done)}\n\nThe real job with one part replaced by a broken one "
        f"(`tests/proof/alterations.py`); the experiments lie in `tests/proof/conf/experiment`. Good runs under the "
        f"same settings are in the table as controls. Each broken one has to fail at least one of the gates named for "
        f"it; a gate that fails for want of data does not count.\n\n{table(columns, rows)}{_mishaps(done)}"
    )


def _mutations(result: Result) -> str:
    rows = [
        [m["name"], f"`{m['file']}`", f"`tests/unit/{m['test']}`", "yes" if m["noticed"] else "**NO**"]
        for m in result["mutations"]
    ]
    noticed = sum(m["noticed"] for m in result["mutations"])
    return (
        f"## Mistakes that no learning curve shows\n\nCommit `{result['commit']}`. Each was made in a copy of the "
        f"package (`tests/proof/proof_mutations.py`) and the named unit test run on it: **{noticed} of "
        f"{len(result['mutations'])} fail their test** (of {len(MUTATIONS)} listed), and all these tests pass on the "
        f"code as it is.\n\n{table(('mistake', 'made in', 'unit test', 'fails'), rows)}"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _provenance(done: Done) -> str:
    machines = sorted({result["machine"] for _, result in done})
    commits = sorted({result["commit"][:7] for _, result in done})
    days = sorted(result["started_utc"][:10] for _, result in done)
    loads = [result["load_at_start"] for _, result in done]
    period = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return (
        f"{period}, commit {', '.join(f'`{commit}`' for commit in commits)}, on {'; '.join(machines)}. Load of the "
        f"machine when the runs started: {min(loads):.0f} to {max(loads):.0f} (other work ran beside them when that "
        f"is above 1)."
    )


def _mishaps(done: Done) -> str:
    lines = [
        f"- `{case.id}` was started again after: {reason}"
        for case, result in done
        for reason in result.get("earlier_failures", [])
    ]
    lines += [
        f"- `{case.id}`: {verdict_of(case, result).text}"
        for case, result in done
        if result["unfinished"] is not None
    ]
    lines += [
        f"- `{case.id}` failed {gate['name']}: {_plain(gate['observed'])}, required {gate['op']} {gate['value']:g}"
        for case, result in done
        if not case.rejected_by
        for gate in result["gates"]
        if not gate["passed"]
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def _numbers(result: Result) -> list[str]:
    return [
        _mean(result, "train/reward", 1, 5),
        _mean(result, "train/reward", 11, 20),
        _mean(result, "train/reward", 36, 40),
        _validation(result, (0, 10, 20, 30, 40)),
        *_critic_and_policy(result),
        _largest(result, "age/max_versions", "{:.0f}"),
        _largest(result, "probe/max_abs_logprob_diff_nats", "{:.1e}"),
    ]


def _critic_and_policy(result: Result) -> list[str]:
    explained = "train/critic/explained_var_before_update"
    return [
        _mean(result, explained, 6, 20, "{:.2f}"),
        _mean(result, explained, 31, 40, "{:.2f}"),
        _mean(result, "train/clip_fraction", 6, 40),
        _mean(result, "train/entropy", 31, 40),
        _mean(result, "train/gen_kl_error", 6, 40, "{:.4f}"),
    ]


def _costs(result: Result) -> list[str]:
    gates = len(result["gates"])
    return [
        f"{gates - len(failed_gates(result))}/{gates}",
        f"{result['wall_s']:.0f}",
        f"{result['peak_pss_bytes'] / 1e9:.1f}",
        result["commit"][:7],
    ]


def _points(result: Result, metric: str, first: int, last: int) -> list[float]:
    return [float(value) for step, value in result["curves"].get(metric, []) if first <= step <= last]


def _mean(result: Result, metric: str, first: int, last: int, style: str = "{:.3f}") -> str:
    points = _points(result, metric, first, last)
    return style.format(fmean(points)) if points else "none"


def _largest(result: Result, metric: str, style: str) -> str:
    points = _points(result, metric, 0, 10**9)
    return style.format(max(points)) if points else "none"


def _validation(result: Result, steps: Sequence[int]) -> str:
    return " / ".join(_mean(result, "validation/accuracy", step, step) for step in steps)


def _blocks(result: Result) -> str:
    return " ".join(_mean(result, "train/reward", first, first + 4, "{:.2f}") for first in range(1, 41, 5))


def _experiment(case: Case) -> str:
    return f"`{case.words[0].removeprefix('+experiment=')}`"


def _plain(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
