"""Every layout trains exactly like one process: loss, gradients and their norm, parameters, log-probs, values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ppo.data.microbatch_plan import TokenBudget
from megatron_ppo.mcore.settings import RecomputeSettings
from megatron_ppo.numerics.loss_settings import PolicyLossSettings, ValueLossSettings
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.jobs:"
Layout = dict[str, int | bool]
TP2: Layout = {"tensor_model_parallel_size": 2}
SP: Layout = {"sequence_parallel": True}
PP2: Layout = {"pipeline_model_parallel_size": 2}
CP2: Layout = {"context_parallel_size": 2}
VPP2: Layout = {"virtual_pipeline_model_parallel_size": 2}
# Sequences have 7 to 14 tokens: 2 to 5 of them in a microbatch, of different numbers.
PACKED = {
    "train_batches": TokenBudget(tokens=40, packed=True),
    "score_batches": TokenBudget(tokens=32, packed=True),
}
DYNAMIC = {
    "train_batches": TokenBudget(tokens=36, packed=False, multiple=4),
    "score_batches": TokenBudget(tokens=48, packed=False, multiple=8),
}
# Buckets of fewer parameters than the model has, so that several are on their way at a time.
GRAD_OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}
OVERLAP = GRAD_OVERLAP | {"overlap_param_gather": True}
ALL_LAYERS = {"recompute": RecomputeSettings(granularity="full", method="uniform", num_layers=1)}
FIRST_LAYER = {"recompute": RecomputeSettings(granularity="full", method="block", num_layers=1)}
MODULES = {"recompute": RecomputeSettings(granularity="selective", modules=("core_attn", "layernorm", "mlp"))}

EXPERTS = {"recompute": RecomputeSettings(granularity="selective", modules=("moe",))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to train the same model on the same batches.

    Attributes:
        layout: of the ranks.   world_size: 1 runs without a launcher.
        changes: further constructor arguments.   model: a kind of `jobs.MODEL_KINDS`.
    """

    layout: Layout = field(default_factory=dict)
    world_size: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen2"


# Four layers, so that two stages can have two chunks each.
DEEP = "qwen2_deep"
TABLE: dict[str, Row] = {
    "tp2": Row(layout=TP2),
    "tp2_sp": Row(layout=TP2 | SP),
    # Key/value heads that the ranks cannot share equally.
    "tp2_three_kv": Row(layout=TP2, model="qwen2_three_kv"),
    "tp2_sp_one_kv": Row(layout=TP2 | SP, model="qwen3_one_kv"),
    "pp2": Row(layout=PP2),
    "dp2": Row(),
    "cp2": Row(layout=CP2),
    "dp2_grad_overlap": Row(changes=GRAD_OVERLAP),
    "dp2_overlap": Row(changes=OVERLAP),
    "pp2_vpp2": Row(layout=PP2 | VPP2, model=DEEP),
    # The stages at both ends share an embedding.
    "pp2_vpp2_tied": Row(layout=PP2 | VPP2, model="qwen3_deep"),
    # Three microbatches of different lengths: a group of three, since one may not be left over.
    "pp2_vpp2_three_microbatches": Row(layout=PP2 | VPP2, model=DEEP, changes={"train_micro_batch_size": 3}),
    "full_recompute": Row(world_size=1, changes=ALL_LAYERS),
    "block_recompute": Row(world_size=1, changes=FIRST_LAYER),
    "selective_recompute": Row(world_size=1, changes=MODULES),
    "tp2_sp_full_recompute": Row(layout=TP2 | SP, changes=ALL_LAYERS),
    "pp2_vpp2_selective_recompute": Row(layout=PP2 | VPP2, model=DEEP, changes=MODULES),
    "tp2_cp2": Row(layout=TP2 | CP2, world_size=4),
    "tp2_sp_cp2": Row(layout=TP2 | SP | CP2, world_size=4),
    "cp2_dp2": Row(layout=CP2, world_size=4),
    "cp2_pp2": Row(layout=CP2 | PP2, world_size=4),
    "cp2_pp2_vpp2_grad_overlap": Row(
        layout=CP2 | PP2 | VPP2,
        world_size=4,
        model=DEEP,
        changes=GRAD_OVERLAP | {"train_micro_batch_size": 2},
    ),
    "cp2_overlap": Row(layout=CP2, changes=OVERLAP),
    "cp4": Row(layout={"context_parallel_size": 4}, world_size=4),
    # Two key/value heads: the last two ranks have nothing but zeros.
    "tp4": Row(layout={"tensor_model_parallel_size": 4}, world_size=4),
    "tp4_sp_three_kv": Row(
        layout={"tensor_model_parallel_size": 4} | SP, world_size=4, model="qwen2_three_kv"
    ),
    "dp4": Row(world_size=4),
    "dp4_packed_overlap": Row(world_size=4, changes=PACKED | OVERLAP),
    "experts_ep4": Row(layout={"expert_model_parallel_size": 4}, world_size=4, model="qwen3_moe_deep"),
    # Stages between the first and the last, which share an embedding.
    "pp4": Row(layout={"pipeline_model_parallel_size": 4}, world_size=4, model="qwen3_deep"),
    "pp4_vpp2": Row(
        layout={"pipeline_model_parallel_size": 4} | VPP2,
        world_size=4,
        model="qwen2_tied_deeper",
        changes={"train_micro_batch_size": 1},
    ),
    "tp2_sp_pp2_vpp2": Row(layout=TP2 | SP | PP2 | VPP2, world_size=4, model=DEEP),
    "pp2_dp2_overlap": Row(layout=PP2, world_size=4, changes=OVERLAP),
    "pp2_vpp2_dp2_overlap": Row(
        layout=PP2 | VPP2, world_size=4, model=DEEP, changes=OVERLAP | {"train_micro_batch_size": 2}
    ),
    # Layers with and without experts; the experts' gradients have buckets and groups of their own.
    "experts_pp2_vpp2": Row(layout=PP2 | VPP2, model="qwen3_moe_deep"),
    "experts_ep2_overlap_recompute": Row(
        layout={"expert_model_parallel_size": 2}, model="qwen3_moe_deep", changes=OVERLAP | EXPERTS
    ),
    # Packed sequences.
    "tp2_sp_packed": Row(layout=TP2 | SP, changes=PACKED),
    "pp2_packed": Row(layout=PP2, changes=PACKED),
    "dp2_packed": Row(changes=PACKED),
    "cp2_packed": Row(layout=CP2, changes=PACKED),
    "cp2_pp2_packed": Row(layout=CP2 | PP2, world_size=4, changes=PACKED),
    "tp2_sp_cp2_packed": Row(layout=TP2 | SP | CP2, world_size=4, changes=PACKED),
    "pp2_vpp2_packed_full_recompute": Row(layout=PP2 | VPP2, model=DEEP, changes=PACKED | ALL_LAYERS),
    # Padded microbatches by a token budget, of other numbers of sequences than any fixed size.
    "pp2_vpp2_dynamic": Row(layout=PP2 | VPP2, model=DEEP, changes=DYNAMIC),
    "cp2_dp2_dynamic": Row(layout=CP2, world_size=4, changes=DYNAMIC),
}
# Further mixtures of what other rows have: run by `make test-long`, since `make test` has its 25 minutes.
RARE = (
    "block_recompute", "tp2_sp_full_recompute", "pp2_vpp2_selective_recompute", "pp2_vpp2_three_microbatches",
    "tp2_sp_cp2", "cp2_pp2_vpp2_grad_overlap", "cp2_overlap", "cp4", "pp4", "tp2_sp_pp2_vpp2",
    "pp2_vpp2_dp2_overlap", "cp2_pp2_packed", "pp2_packed", "cp2_dp2_dynamic",
)  # fmt: skip
# What a plan of microbatches is like, and so not the same in every layout.
OF_THE_PLAN = ("packing_efficiency", "num_microbatches", "token_imbalance")
# float32 sums in another order: relative differences of a few 1e-7 per reduction, grown over three steps.
RELATIVE = 1e-5
# Adam divides by the root of the second moment, so where the true gradient is 0 (key biases) it amplifies
# rounding to the size of the learning rate, 1e-4: three such steps may differ by a small part of it.
PARAMETER_ABSOLUTE = 1e-6
# Of the norm of each tensor's gradient.
GRADIENT_RELATIVE = 1e-5
# Of the norm of all gradients; counts instead of the tensor's own norm where that is smaller. Where the true gradient
# is nearly 0 (key biases: a constant added to all scores of a query changes no softmax) little but rounding is left.
GRADIENT_FLOOR = 1e-3
# Values are read after the steps and sum over the whole network.
VALUE_RELATIVE = 1e-4


def assert_same_training(seen: dict[str, Any], expected: dict[str, Any], prefix: str) -> None:
    for step, (mine, theirs) in enumerate(zip(seen["metrics"], expected["metrics"], strict=True)):
        assert mine.keys() == theirs.keys()
        for name in (f"{prefix}/loss", f"{prefix}/grad_norm", f"{prefix}/lr"):
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE), f"{name} of step {step}"
        for name, value in theirs.items():
            if name.endswith(OF_THE_PLAN):
                continue
            # Divergences are differences of near-equal numbers, hence the absolute part.
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-6), f"{name} of step {step}"
    floor = GRADIENT_FLOOR * math.sqrt(
        sum(float(g.float().norm()) ** 2 for g in expected["gradients"].values())
    )
    for name, tensor in expected["gradients"].items():
        difference = float((seen["gradients"][name].float() - tensor.float()).norm())
        allowed = GRADIENT_RELATIVE * max(float(tensor.float().norm()), floor)
        assert difference <= allowed, f"gradient of {name}: {difference} > {allowed}"
    torch.testing.assert_close(seen["scores_before"], expected["scores_before"], rtol=0.0, atol=1e-5)
    for name, tensor in expected["parameters"].items():
        torch.testing.assert_close(
            seen["parameters"][name],
            tensor,
            rtol=0.0,
            atol=PARAMETER_ABSOLUTE,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    torch.testing.assert_close(seen["scores"], expected["scores"], rtol=VALUE_RELATIVE, atol=1e-5)


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in TABLE]
)
def test_a_layout_trains_like_one_process(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[[str, str], dict[str, Any]],
    name: str,
    kind: str,
) -> None:
    row = TABLE[name]
    arguments = {"kind": kind, "folder": str(tiny_model(row.model)), "layout": row.layout, **row.changes}
    if row.world_size == 1:
        ranks = [workers.run_alone(JOBS + "train", **arguments)]
    else:
        ranks = workers.run(JOBS + "train", world_size=row.world_size, **arguments)
    expected = one_process(kind, row.model)
    for rank in ranks:
        assert_same_training(rank, expected, "train" if kind == "policy" else "train/critic")
        # Results are not only close but the same on every rank, so that all ranks take the same decisions.
        assert rank["metrics"] == ranks[0]["metrics"]
        assert torch.equal(rank["scores"], ranks[0]["scores"])
        assert rank["hash"] == ranks[0]["hash"]


# Terms and normalisations that the rows above leave off, with metrics that would be 0, or absent, if they did nothing.
TERMS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "every_term_per_token": (
        "policy",
        {
            "loss": PolicyLossSettings(
                ratio_clip_c=1.5,
                truncated_importance_sampling_type="icepop",
                truncated_importance_sampling_ratio=1.1,
                truncated_importance_sampling_ratio_min=0.9,
                reference_policy_kl_penalty=0.3,
                positive_example_nll_weight=0.2,
            )
        },
        ("train/kl_penalty", "train/positive_nll_loss", "train/is_oob_ratio", "train/clip_fraction"),
    ),
    "every_term_per_sequence": (
        "policy",
        {
            "loss": PolicyLossSettings(
                token_level_loss=False,
                sequence_level_importance_ratios=True,
                reference_policy_kl_penalty=0.3,
                use_on_policy_kl_approximation=True,
                positive_example_nll_weight=0.2,
            )
        },
        ("train/kl_penalty", "train/positive_nll_loss", "train/clip_fraction"),
    ),
    "clipped_values": (
        "critic",
        {"value_loss": ValueLossSettings(scale=0.5, cliprange=0.1)},
        ("train/critic/vf_clipfrac",),
    ),
}


@pytest.mark.parametrize("terms", TERMS)
def test_every_term_of_every_loss_is_normalised_by_the_counts_of_the_whole_minibatch(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], terms: str
) -> None:
    # Sequences of 7 to 14 tokens, one of them excluded, some without reward: every rank and every microbatch has other
    # numbers of tokens, sequences and positive examples than the whole.
    kind, changes, alive = TERMS[terms]
    job, arguments = JOBS + "train", {"kind": kind, "folder": str(tiny_model("qwen2")), **changes}
    expected = workers.run_alone(job, layout={}, train_micro_batch_size=8, **arguments)
    for name in alive:
        assert all(metrics[name] != 0.0 for metrics in expected["metrics"]), name
    prefix = "train" if kind == "policy" else "train/critic"
    assert_same_training(
        workers.run_alone(job, layout={}, train_micro_batch_size=3, **arguments), expected, prefix
    )
    for layout in ("dp2", "cp2_packed"):
        row = TABLE[layout]
        for seen in workers.run(job, layout=row.layout, **arguments, **row.changes):
            assert_same_training(seen, expected, prefix)


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2", "cp2"])
@pytest.mark.parametrize("model", ["qwen2_tied", "qwen3"])
def test_tied_embeddings_and_query_key_norms_train_alike_in_every_layout(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[[str, str], dict[str, Any]],
    layout: str,
    model: str,
) -> None:
    folder = str(tiny_model(model))
    ranks = workers.run(JOBS + "train", kind="policy", folder=folder, layout=TABLE[layout].layout)
    for rank in ranks:
        assert_same_training(rank, one_process("policy", model), "train")


def test_query_key_norms_without_sequence_parallelism_train_like_one_process(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], one_process: Callable[[str, str], dict[str, Any]]
) -> None:
    # Their gradients differ per tensor rank even when the sequence is whole: each rank sees its heads only.
    ranks = workers.run(JOBS + "train", kind="policy", folder=str(tiny_model("qwen3")), layout=TP2)
    assert_same_training(ranks[1], one_process("policy", "qwen3"), "train")


@pytest.mark.parametrize("model", ["qwen2_three_kv", "qwen3_one_kv"])
def test_padded_heads_stay_exactly_zero(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], model: str
) -> None:
    zero, one = workers.run(
        JOBS + "padding_after_training", kind="policy", folder=str(tiny_model(model)), layout=TP2
    )
    assert (zero["entries"], zero["largest"], one["largest"]) == (0, 0.0, 0.0)
    assert one["entries"] > 0


BATCHINGS: dict[str, dict[str, Any]] = {
    **{f"of_{size}": {"train_micro_batch_size": size, "logprob_batch_size": size} for size in (1, 2, 8)},
    "packed": PACKED,
    "packed_into_one": {"train_batches": TokenBudget(tokens=112, packed=True)},
    "budget": {
        "train_batches": TokenBudget(tokens=40, packed=False),
        "score_batches": TokenBudget(tokens=28, packed=False),
    },
}


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_cut_into_microbatches_changes_no_result(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[[str, str], dict[str, Any]],
    kind: str,
    batching: str,
) -> None:
    folder = str(tiny_model("qwen2"))
    seen = workers.run_alone(JOBS + "train", kind=kind, folder=folder, layout={}, **BATCHINGS[batching])
    prefix = "train" if kind == "policy" else "train/critic"
    assert_same_training(seen, one_process(kind, "qwen2"), prefix)


@pytest.mark.parametrize(
    ("world_size", "policy", "critic", "critic_changes"),
    [
        (2, TP2, {}, {}),
        # The layouts of the reference's nightly run, the critic with dynamic batches.
        (4, TP2 | CP2, TP2 | SP, {"train_batches": TokenBudget(tokens=40, packed=False)}),
        # A pipeline next to none, and the critic's communication overlapped.
        (2, PP2, {}, OVERLAP),
    ],
    ids=["tp2_and_dp2", "tp2_cp2_and_tp2_sp", "pp2_and_dp2_overlap"],
)
def test_policy_and_critic_may_have_different_layouts_on_the_same_ranks(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    world_size: int,
    policy: Layout,
    critic: Layout,
    critic_changes: dict[str, Any],
) -> None:
    folder = str(tiny_model("qwen2"))
    expected = workers.run_alone(JOBS + "train_both", folder=folder, policy_layout={}, critic_layout={})
    ranks = workers.run(
        JOBS + "train_both",
        world_size=world_size,
        folder=folder,
        policy_layout=policy,
        critic_layout=critic,
        critic_changes=critic_changes,
    )
    for seen in ranks:
        for mine, theirs in zip(seen["metrics"], expected["metrics"], strict=True):
            for name in mine:
                if name.endswith(("loss", "grad_norm")):
                    # The losses start near 0 (ratio 1, centred values), so an absolute floor is needed.
                    assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE, abs=1e-6), name
        for model in ("policy", "critic"):
            for name, tensor in expected[model].items():
                torch.testing.assert_close(seen[model][name], tensor, rtol=0.0, atol=PARAMETER_ABSOLUTE)
        torch.testing.assert_close(seen["values"], expected["values"], rtol=VALUE_RELATIVE, atol=1e-5)


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_scoring_takes_any_number_of_sequences_in_every_layout(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], rows: int, kind: str
) -> None:
    # Probes and last batches do not divide by the data-parallel size.
    folder = str(tiny_model("qwen2"))
    expected = workers.run_alone(JOBS + "score_rows", kind=kind, folder=folder, layout={}, rows=rows)
    for seen in workers.run(JOBS + "score_rows", kind=kind, folder=folder, layout={}, rows=rows):
        torch.testing.assert_close(seen, expected, rtol=0.0, atol=1e-5)


# bfloat16 has 8 significant bits: 2^-8 = 0.4 % per rounding, several roundings deep, weights scaled up by 4.
BF16_AGAINST_FP32 = 0.1
# Of layouts that add up in another order before they round, against one process: a rounding of what is added (2^-8) in
# the first step, and after each of the two further ones the weights are rounded in other places as well.
BF16_ROUNDED = (2**-8, 2**-7, 2**-6)


@pytest.mark.parametrize(
    ("kind", "name", "sums_alike"),
    [
        ("policy", "dp2", True),
        pytest.param("critic", "pp2", True, marks=pytest.mark.slow),
        ("critic", "tp2_sp", False),
        ("policy", "cp2_packed", False),
        ("critic", "cp2_packed", False),
    ],
)
def test_bf16_trains_alike_in_every_layout_and_close_to_fp32(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[..., dict[str, Any]],
    kind: str,
    name: str,
    sums_alike: bool,
) -> None:
    row, prefix = TABLE[name], "train" if kind == "policy" else "train/critic"
    folder = str(tiny_model("qwen2"))
    ranks = workers.run(
        JOBS + "train", kind=kind, folder=folder, layout=row.layout, precision="bf16", **row.changes
    )
    alone, exact = one_process(kind, "qwen2", "bf16"), one_process(kind, "qwen2")
    for seen in ranks:
        assert seen["hash"] == ranks[0]["hash"]
        assert all(tensor.dtype == torch.bfloat16 for tensor in seen["parameters"].values())
        if sums_alike:
            # Nothing but float32 gradients is summed in another order.
            assert_same_training(seen, alone, prefix)
        steps = zip(seen["metrics"], alone["metrics"], exact["metrics"], BF16_ROUNDED, strict=True)
        for step, (mine, theirs, fp32, tolerance) in enumerate(steps):
            for metric in (f"{prefix}/loss", f"{prefix}/grad_norm"):
                assert mine[metric] == pytest.approx(theirs[metric], rel=tolerance), (
                    f"{metric} of step {step}"
                )
                assert mine[metric] == pytest.approx(fp32[metric], rel=BF16_AGAINST_FP32)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tensor_model_parallel_size": 3}, ("tensor_model_parallel_size=3", "2 ranks")),
        ({"sequence_parallel": True}, ("sequence_parallel", "> 1, got 1")),
        ({"context_parallel_size": 3}, ("context_parallel_size=3", "2 ranks")),
        ({"expert_model_parallel_size": 2}, ("expert_model_parallel_size=2", "Qwen2ForCausalLM has none")),
        ({"expert_model_parallel_size": 3}, ("expert_model_parallel_size=3", "2 data-parallel ranks")),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            ("virtual_pipeline_model_parallel_size=2", "pipeline_model_parallel_size > 1, got 1"),
        ),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_its_key(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], layout: Layout, words: tuple[str, ...]
) -> None:
    for message in workers.run(JOBS + "layout_error", folder=str(tiny_model("qwen2")), layout=layout):
        assert all(word in message for word in words), message
