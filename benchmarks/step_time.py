"""Time per step and its parts, asynchronous against synchronous, with the real job.

    python -m benchmarks.step_time                         the default experiment and the 30-million-parameter model
    python -m benchmarks.step_time --model 30m --repeats 2

Per model, runs of age 1 and of age 0 in turn, on the same machine within minutes: compare the columns and the
ratios, not the seconds of two invocations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.job import prepare_models, run_job
from benchmarks.report import BenchmarkError, machine, save, show_machine, show_table
from benchmarks.step_parts import OVERHEAD, REFIT, TRAINING, StepTimes, expected_gain, mean_of, step_times

SKIP = 2
"""First steps that are not measured: at age 1 the groups of both were generated before the first update."""
DROP = 1
AGES = {"async": 1, "sync": 0}
_NAMES = {
    "waiting": "wait for running generation",
    "hand_over": "hand-over: polling, scoring, commits",
    "data_processing": "padding and metrics",
    "value_inference": "critic values",
    "policy_and_reference_logprobs": "policy log-probs",
    "advantage_calculation": "advantages",
    "value_training": "critic update",
    "policy_training": "policy update",
    "drain": "running generation drains",
    "refit": "transfer and switch",
    "probe": "same-version probe",
    "validation": "validation",
    "rest": "rest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A configuration to measure. `steps`: measured in each run.   timeout_s: of one run."""

    words: tuple[str, ...]
    steps: int
    timeout_s: float = 1800.0


WORKLOADS = {
    "default": Workload(words=("+experiment=megatron_40step",), steps=12),
    "30m": Workload(words=("+experiment=bench_30m",), steps=5),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(WORKLOADS), action="append", help="default: all")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each schedule (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps measured in each run")
    options = parser.parse_args(arguments)
    facts = machine()
    show_machine(facts)
    results = {}
    for name in options.model or list(WORKLOADS):
        workload = WORKLOADS[name]
        steps = workload.steps if options.steps is None else options.steps
        results[name] = measure(name, workload, steps=steps, repeats=options.repeats)
    save("step_time", facts, results)


def words_of(workload: Workload, *, steps: int, age: int) -> list[str]:
    """Overrides of one run: training and publishing in every step, and nothing that some steps have and others not."""
    return [
        *workload.words,
        f"run.max_num_steps={SKIP + steps + DROP}",
        f"schedule.max_trajectory_age_steps={age}",
        "schedule.policy_training_start_step=0",
        "validation.period=0",
        "validation.at_start=false",
        "validation.at_end=false",
        "checkpoint.period=0",
        "gates=null",
    ]


def measure(name: str, workload: Workload, *, steps: int, repeats: int) -> dict[str, object]:
    """Run both schedules in turn `repeats` times, print the table, return it as JSON values."""
    prepare_models(words_of(workload, steps=steps, age=1))
    measured: dict[str, list[StepTimes]] = {schedule: [] for schedule in AGES}
    loads: list[float] = []
    for repeat in range(repeats):
        for schedule, age in AGES.items():
            label = f"{name}_{schedule}"
            print(f"{label}, run {repeat + 1} of {repeats}", flush=True)
            job = run_job(
                words_of(workload, steps=steps, age=age),
                label=label,
                timeout_s=workload.timeout_s,
            )
            loads.append(job.load)
            _check_age(job.rows, age)
            measured[schedule].append(step_times(job.rows, skip=SKIP, drop=DROP))
    times = {schedule: mean_of(runs) for schedule, runs in measured.items()}
    _show(name, times, loads)
    return {
        "load_before_runs": loads,
        "runs": {schedule: [asdict(run) for run in runs] for schedule, runs in measured.items()},
        "eta": {schedule: run.eta for schedule, run in times.items()},
        "overhead_share": {schedule: run.overhead_share for schedule, run in times.items()},
        "sync_over_async": times["sync"].step_s / times["async"].step_s,
        "expected_gain": expected_gain(times["sync"]),
    }


def _check_age(rows: Sequence[dict[str, object]], age: int) -> None:
    """A schedule that did not take effect would measure the same thing twice."""
    steady = [row["age/max_versions"] for row in rows if int(str(row["step"])) > SKIP]
    if any(seen != age for seen in steady):
        raise BenchmarkError(f"steps after the first {SKIP} must have age {age}, got {steady}")


def _show(name: str, times: dict[str, StepTimes], loads: Sequence[float]) -> None:
    columns = list(times)
    rows = [[f"**step** ({times['async'].num_steps} measured)", *_seconds(times, lambda t: t.step_s)]]
    for part, words in _NAMES.items():
        rows.append([_kind(part) + words, *_seconds(times, lambda t, part=part: t.learner_s[part])])
    rows += [
        ["**train**", *_seconds(times, lambda t: t.train_s)],
        ["**generate** (engines busy)", *_seconds(times, lambda t: t.generate_s)],
        ["**η** = max(train, generate) / step", *(f"{times[c].eta:.3f}" for c in columns)],
        [
            "**other** = neither train, generate nor refit",
            *(f"{100 * times[c].overhead_share:.1f} %" for c in columns),
        ],
    ]
    show_table(f"{name}: seconds per step", ["", *columns], rows)
    gain = times["sync"].step_s / times["async"].step_s
    print(
        f"\nsynchronous / asynchronous step time: {gain:.2f} "
        f"(full overlap of the synchronous parts would give {expected_gain(times['sync']):.2f}); "
        f"load before the runs: {', '.join(f'{load:.1f}' for load in loads)}",
        flush=True,
    )


def _kind(part: str) -> str:
    """What a part of the step counts as; waiting counts as nothing, it is the other side's work."""
    kinds = {
        **dict.fromkeys(TRAINING, "train: "),
        **dict.fromkeys(REFIT, "refit: "),
        **dict.fromkeys(OVERHEAD, "other: "),
    }
    return kinds.get(part, "")


def _seconds(times: dict[str, StepTimes], value) -> list[str]:
    return [f"{value(run):.3f}" for run in times.values()]


if __name__ == "__main__":
    main()
