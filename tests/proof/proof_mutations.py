"""Mistakes that no learning curve shows, and the unit test that notices each.

`run_mutations` applies each mistake to a copy of the package and runs the named test on it: the test must pass on
the code as it is and fail on the mistake. A mutation whose text is no longer in the file is an error, so that this
list follows the code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from proof_jobs import ROOT, ProofFolders, commit

from megatron_ppo.telemetry.run_dir import write_json_atomically

MUTATIONS_ID = "mutations"
COPIED = ("megatron_ppo", "conf", "tests/conftest.py", "tests/unit", "pyproject.toml")
WORKER_END_TIMEOUT_S = 60.0
ASSERTION = re.compile(r"^E +(assert |AssertionError|[\w.]*CallerError)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`before` becomes `after` in `file`, exactly once; `test` (below tests/unit) must then fail."""

    name: str
    file: str
    before: str
    after: str
    test: str


GAE, LOSS = "megatron_ppo/numerics/gae.py", "megatron_ppo/numerics/losses.py"
VALUE, ADVANTAGE = "megatron_ppo/numerics/value_losses.py", "megatron_ppo/loop/advantage.py"

MUTATIONS = (
    Mutation(
        name="GAE mask one token long: reward and value on the padding after the end",
        file=ADVANTAGE,
        before='        value_BT = select(batch.values_BT, mask_BT, name="values_BT")\n',
        after="        mask_BT[:, 1:] |= batch.response_mask_BT[:, :-1]\n"
        '        value_BT = select(batch.values_BT, mask_BT, name="values_BT")\n',
        test="loop/test_advantage.py::test_unset_lambdas_fall_back_to_the_common_one",
    ),
    Mutation(
        name="response mask of the batch one token long",
        file="megatron_ppo/data/batch.py",
        before="            mask[row, start:end] = True\n",
        after="            mask[row, start : end + 1] = True\n",
        test="data/test_batch.py::test_packing_marks_response_tokens_and_aligns_their_logprobs",
    ),
    Mutation(
        name="λ ignored",
        file=GAE,
        before="advantage_B = delta_B + discount * gae_lambda * next_advantage_B",
        after="advantage_B = delta_B + discount * next_advantage_B",
        test="numerics/test_gae.py::test_gae_equals_the_literal_double_sum",
    ),
    Mutation(
        name="λ of policy and critic exchanged",
        file=ADVANTAGE,
        before="self._lambda_value = gae_lambda if gae_lambda_value is None else gae_lambda_value\n"
        "        self._lambda_policy = gae_lambda if gae_lambda_policy is None else gae_lambda_policy\n",
        after="self._lambda_policy = gae_lambda if gae_lambda_value is None else gae_lambda_value\n"
        "        self._lambda_value = gae_lambda if gae_lambda_policy is None else gae_lambda_policy\n",
        test="loop/test_advantage.py::test_value_and_policy_lambda_are_used_for_returns_and_advantages",
    ),
    Mutation(
        name="discount ignored",
        file=GAE,
        before="reward_BT[:, t] + discount * next_value_B - value_BT[:, t]",
        after="reward_BT[:, t] + next_value_B - value_BT[:, t]",
        test="numerics/test_gae.py::test_gae_equals_the_literal_double_sum",
    ),
    Mutation(
        name="no whitening",
        file=ADVANTAGE,
        before="        if self._normalize:\n",
        after="        if False:\n",
        test="loop/test_advantage.py::test_whitening_leaves_returns_alone",
    ),
    Mutation(
        name="whitening by the biased variance",
        file=GAE,
        before="/ max(count - 1, 1)",
        after="/ max(count, 1)",
        test="numerics/test_gae.py::test_whitening_uses_the_unbiased_variance",
    ),
    Mutation(
        name="returns whitened as well",
        file=ADVANTAGE,
        before="            advantage_BT = whiten(advantage_BT, mask_BT)\n",
        after="            advantage_BT, return_BT = whiten(advantage_BT, mask_BT), whiten(return_BT, mask_BT)\n",
        test="loop/test_advantage.py::test_whitening_leaves_returns_alone",
    ),
    Mutation(
        name="no cap on the importance weight",
        file=LOSS,
        before="weight_BT.clamp(low, high)",
        after="weight_BT",
        test="numerics/test_policy_loss.py::test_tis_caps_the_weight",
    ),
    Mutation(
        name="importance weight left out",
        file=LOSS,
        before="        loss_BT = loss_BT * weight.applied\n",
        after="        loss_BT = loss_BT * 1.0\n",
        test="numerics/test_policy_loss.py::"
        "test_untruncated_correction_multiplies_each_token_by_old_over_generation",
    ),
    Mutation(
        name="importance weight inverted",
        file=LOSS,
        before="log_weight_BT = tokens.old - tokens.generation\n",
        after="log_weight_BT = tokens.generation - tokens.old\n",
        test="numerics/test_policy_loss.py::"
        "test_untruncated_correction_multiplies_each_token_by_old_over_generation",
    ),
    Mutation(
        name="PPO denominator is the engine's log-prob instead of the recomputed one",
        file=LOSS,
        before="log_ratio_BT = tokens.logprob - tokens.old\n",
        after="log_ratio_BT = tokens.logprob - tokens.generation\n",
        test="numerics/test_loss_invariants.py::test_loss_equals_a_literal_loop_over_tokens",
    ),
    Mutation(
        name="clipping takes the better branch instead of the worse",
        file=LOSS,
        before="torch.maximum(-advantage_BT * ratio.plain, -advantage_BT * ratio.clipped)",
        after="torch.minimum(-advantage_BT * ratio.plain, -advantage_BT * ratio.clipped)",
        test="numerics/test_policy_loss.py::"
        "test_clipped_loss_is_the_worse_of_the_clipped_and_the_plain_branch",
    ),
    Mutation(
        name="token mean and sequence mean exchanged",
        file=LOSS,
        before="    if settings.token_level_loss:\n",
        after="    if not settings.token_level_loss:\n",
        test="numerics/test_policy_loss.py::"
        "test_sequence_level_loss_is_the_mean_over_sequences_of_their_token_means",
    ),
    Mutation(
        name="loss divided by the microbatch's tokens instead of the minibatch's",
        file=LOSS,
        before=".sum(dim=1) / max(counts.valid_tokens, 1)\n    return sequence_mean",
        after=".sum(dim=1) / max(int(mask_BT.sum()), 1)\n    return sequence_mean",
        test="numerics/test_loss_invariants.py::"
        "test_shares_of_any_split_add_up_to_the_whole_gradients_and_metrics_included",
    ),
    Mutation(
        name="value clipping takes the smaller error",
        file=VALUE,
        before="torch.maximum(error_BT, clipped_error_BT)",
        after="torch.minimum(error_BT, clipped_error_BT)",
        test="numerics/test_value_loss.py::test_clipped_loss_is_never_below_the_plain_one",
    ),
    Mutation(
        name="value loss without its factor one half",
        file=VALUE,
        before="loss_B = 0.5 * settings.scale",
        after="loss_B = settings.scale",
        test="numerics/test_value_loss.py::test_plain_loss_is_half_the_mean_squared_error",
    ),
    Mutation(
        name="the critic's output read one token late, in scoring and training alike",
        file="megatron_ppo/data/batch.py",
        before="torch.nn.functional.pad(scores_BT, (1, 0))",
        after="torch.nn.functional.pad(scores_BT, (0, 1))",
        test="proof/test_value_alignment.py::test_value_of_a_token_is_the_critics_output_one_position_before",
    ),
    Mutation(
        name="old log-probs are the engine's, not recomputed when the batch is taken",
        file="megatron_ppo/loop/async_ppo.py",
        before="batch.replace(old_logprobs_BT=parts.policy.logprobs(batch))",
        after="batch.replace(old_logprobs_BT=batch.generation_logprobs_BT)",
        test="testing/test_loop_contract.py::test_the_order_of_one_step_is_the_documented_one",
    ),
)


class _Tester:
    """Runs unit tests on a copy of the package."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._process = subprocess.Popen(
            [sys.executable, "-B", str(Path(__file__).with_name("mutation_worker.py"))],
            cwd=copy,
            env={
                **os.environ,
                "PYTHONPATH": str(copy),
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> _Tester:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=WORKER_END_TIMEOUT_S)

    def run(self, tests: Sequence[str]) -> tuple[int, str]:
        """pytest's exit code and what it printed. pytest's own timeout bounds each test."""
        assert self._process.stdin is not None and self._process.stdout is not None
        words = ["-q", "-x", "-p", "no:cacheprovider", *(f"tests/unit/{test}" for test in tests)]
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        code, output_path = json.loads(self._process.stdout.readline())
        return code, Path(output_path).read_text(encoding="utf-8", errors="replace")

    def notices(self, mutation: Mutation) -> bool:
        """Whether the mutation's test fails on it. Raises: RuntimeError when pytest did not get that far."""
        path = self._copy / mutation.file
        source = path.read_text(encoding="utf-8")
        path.write_text(mutated(source, mutation), encoding="utf-8")
        try:
            code, output = self.run([mutation.test])
        finally:
            path.write_text(source, encoding="utf-8")
        # A mistake that only breaks the code (a NameError, say) would be noticed by any test and proves nothing.
        judged = code == pytest.ExitCode.TESTS_FAILED and ASSERTION.search(output)
        if code != pytest.ExitCode.OK and not judged:
            raise RuntimeError(
                f"mutation {mutation.name!r}: pytest ended with {code}, no assertion failed:\n{output}"
            )
        return code == pytest.ExitCode.TESTS_FAILED


def run_mutations(folders: ProofFolders) -> dict[str, Any]:
    """Try every mutation, write and return the result. Raises: RuntimeError when a test fails without one."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        copy = Path(scratch)
        _copy_package(copy)
        with _Tester(copy) as tester:
            code, output = tester.run(sorted({mutation.test for mutation in MUTATIONS}))
            if code != pytest.ExitCode.OK:
                raise RuntimeError(f"the unit tests fail on the code as it is:\n{output}")
            outcomes = [
                {"name": m.name, "file": m.file, "test": m.test, "noticed": tester.notices(m)}
                for m in MUTATIONS
            ]
    result = {"commit": commit(), "wall_s": round(time.time() - started, 1), "mutations": outcomes}
    write_json_atomically(folders.state_path(MUTATIONS_ID), result)
    return result


def mutated(source: str, mutation: Mutation) -> str:
    """The source with the mistake. Raises: ValueError unless its place is there exactly once."""
    count = source.count(mutation.before)
    if count != 1:
        raise ValueError(
            f"mutation {mutation.name!r}: its text occurs {count} times in {mutation.file}, not once"
        )
    return source.replace(mutation.before, mutation.after)


def _copy_package(copy: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
