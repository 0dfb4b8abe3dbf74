"""Jobs that move a model off its device and back; what they return is compared by test_residence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ppo.loop.residency import EVERYTHING, STATE, WEIGHTS, Model, Part, Residency, ResidencyError
from megatron_ppo.mcore.checkpoint import load_models, save_models
from megatron_ppo.mcore.critic import MegatronCritic
from megatron_ppo.mcore.parallel import ParallelContext, distributed_runtime
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.mcore.residence import Residence, trained_tensors
from megatron_ppo.numerics.loss_settings import PolicyLossSettings
from tests.functional.mcore.jobs import (
    Layout,
    build,
    context,
    full_parameters,
    random_batch,
    scored,
    settings,
)


def moved_between_steps(*, kind: str, folder: str, layout: Layout, **changes: Any) -> dict[str, Any]:
    """Four updates with every part away in between, against four without: metrics, weights, scores."""
    with context(layout) as parallel:
        moved, stayed = (build(kind, folder, parallel, **changes) for _ in range(2))
        metrics: list[tuple[dict[str, float], dict[str, float]]] = []
        for step in range(4):
            _away_and_back(moved.residence)
            batch = random_batch(seed=step)
            metrics.append((moved.update([batch]), stayed.update([batch])))
            # Scoring with the weights alone, as the schedule does it, after an update and before the next.
            moved.residence.offload(EVERYTHING)
            moved.residence.load(WEIGHTS)
            mine = scored(moved, batch)
            moved.residence.load(EVERYTHING)
            assert torch.equal(mine, scored(stayed, batch))
        return {
            "metrics": metrics,
            "moved": full_parameters(moved),
            "stayed": full_parameters(stayed),
            "hashes": (moved.parameters_hash(), stayed.parameters_hash()),
            "adam": (_state(moved), _state(stayed)),
        }


def _away_and_back(residence: Residence) -> None:
    """Off, its old memory overwritten by others, and back, part by part in another order."""
    residence.offload(frozenset({Part.GRADIENTS, Part.OPTIMIZER}))
    residence.offload(EVERYTHING)
    squatters = [torch.full((size,), torch.nan) for size in (10, 1000, 100_000, 200_000)]
    residence.load(frozenset({Part.OPTIMIZER}))
    residence.load(EVERYTHING)
    assert all(squatter.isnan().all() for squatter in squatters)


def _state(model: MegatronPolicy | MegatronCritic) -> list[Tensor]:
    """Main parameters and moments of this rank's optimizer shard."""
    return [
        tensor.detach().clone() for tensor in trained_tensors([], model.trained.optimizer)[Part.OPTIMIZER]()
    ]


def device_bytes(*, folder: str, precision: str) -> dict[str, Any]:
    """Bytes per part on the device, and what is left of them while the model is away."""
    with context({}) as parallel:
        model = build("policy", folder, parallel, precision=precision)
        model.update([random_batch()])
        tensors = trained_tensors(model.trained.modules, model.trained.optimizer)
        everything = [tensor for of_part in tensors.values() for tensor in of_part()]

        def present() -> int:
            return sum(
                {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in everything}.values()
            )

        before = present()
        per_part = {}
        for part in (Part.OPTIMIZER, Part.GRADIENTS, Part.PARAMETERS):
            held = present()
            model.residence.offload(frozenset({part}))
            per_part[str(part)] = held - present()
        away = present()
        messages = {}
        calls = {
            "an update": lambda: model.update([random_batch()]),
            "a forward pass": lambda: scored(model, random_batch()),
            "a digest of the parameters": model.parameters_hash,
            "reading the weights": lambda: list(model.full_weights()),  # type: ignore[union-attr]
        }
        for name, call in calls.items():
            try:
                call()
            except ResidencyError as error:
                messages[name] = str(error)
        model.residence.load(EVERYTHING)
        numel = sum(parameter.numel() for chunk in model.trained.chunks for parameter in chunk.parameters())
        after = {"before": before, "after": present(), "numel": numel}
        return {**after, "per_part": per_part, "away": away, "messages": messages}


def one_rank_leaves_alone(*, folder: str) -> dict[str, Any]:
    """Rank 0 offloads after a failure that no other rank knows of, when a gather is due and when one runs."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    with context({}) as parallel:
        model = build("policy", folder, parallel, **overlap)
        model.update(
            [random_batch()]
        )  # parameters of the other rank's shard are one step old until the next gather
        message = "nothing raised"
        if parallel.everyone.rank() == 0:
            model.residence.offload(EVERYTHING, after_failure=True)
            model.residence.load(EVERYTHING)
        model.residence.offload(frozenset({Part.OPTIMIZER}))  # together again, so the gather is made up for
        model.residence.load(EVERYTHING)
        (group, *_) = [g for module in model.trained.modules for g in module.bucket_groups]
        group.start_param_sync()
        assert group.param_gather_handle is not None
        try:
            model.residence.offload(EVERYTHING, after_failure=True)
        except ResidencyError as error:
            message = str(error)
        present = model.residence.present
        group.finish_param_sync(skip_next_bucket_dispatch=True)
        stayed = build("policy", folder, parallel)
        stayed.update([random_batch()])
        return {
            "message": message,
            "present": present,
            "hashes": (model.parameters_hash(), stayed.parameters_hash()),
        }


def gradients_come_back_as_zeros(*, folder: str) -> float:
    """The largest gradient after a move that followed an update."""
    with context({}) as parallel:
        model = build("policy", folder, parallel)
        model.update([random_batch()])
        model.residence.offload(EVERYTHING)
        model.residence.load(EVERYTHING)
        buffers = [buffer for module in model.trained.modules for buffer in module.buffers]
        return max(float(buffer.grad_data.abs().max()) for buffer in buffers)


def saved_while_away(*, folder: str, checkpoint: str, layout: Layout) -> dict[str, Any]:
    """Both models away between phases: train, save, go on; and the same from the checkpoint, and without any move."""
    moved, stayed = _run(folder, checkpoint, layout, moves=True), _run(folder, None, layout, moves=False)
    with distributed_runtime(timeout_s=60.0):
        policy, critic, residency = _models(folder, layout, moves=True)
        load_models(Path(checkpoint), {"policy": policy, "critic": critic}, residency=residency)
        assert not residency.resident
        resumed = _steps(policy, critic, residency, (2, 3))
    return {"moved": moved, "stayed": stayed, "resumed": resumed}


def _run(folder: str, checkpoint: str | None, layout: Layout, *, moves: bool) -> dict[str, Any]:
    with distributed_runtime(timeout_s=60.0):
        policy, critic, residency = _models(folder, layout, moves=moves)
        assert residency.moves == moves
        assert not moves or STATE & policy.residence.present == frozenset()
        _steps(policy, critic, residency, (0, 1))
        if checkpoint is not None:
            save_models(Path(checkpoint), {"policy": policy, "critic": critic}, residency=residency)
            assert not residency.resident
        return _steps(policy, critic, residency, (2, 3))


def _models(folder: str, layout: Layout, *, moves: bool) -> tuple[MegatronPolicy, MegatronCritic, Residency]:
    parallel = ParallelContext.create(**layout, timeout_s=60.0)  # type: ignore[arg-type]
    residency = Residency()
    loss = PolicyLossSettings(reference_policy_kl_penalty=0.1)
    policy = MegatronPolicy(parallel=parallel, **settings(folder, reference=True, loss=loss))
    if moves:
        residency.built(Model.POLICY, policy.residence)
        residency.built(Model.REFERENCE, policy.reference_residence)
    critic = MegatronCritic(parallel=parallel, **settings(folder))
    if moves:
        residency.built(Model.CRITIC, critic.residence)
    return policy, critic, residency


def _steps(
    policy: MegatronPolicy, critic: MegatronCritic, residency: Residency, seeds: tuple[int, ...]
) -> dict[str, Any]:
    """The phases of a step as the loop takes them."""
    metrics = []
    for seed in seeds:
        batch = random_batch(seed=seed)
        with residency.step(f"step {seed}"):
            with residency.scoring(Model.CRITIC):
                batch = batch.replace(values_BT=critic.values(batch))
            with residency.scoring(Model.POLICY):
                batch = batch.replace(old_logprobs_BT=policy.logprobs(batch))
            with residency.scoring(Model.REFERENCE):
                batch = batch.replace(ref_logprobs_BT=policy.reference_logprobs(batch))
            with residency.training(Model.CRITIC):
                metrics.append(critic.update([batch]))
            with residency.training(Model.POLICY, stays=True):
                metrics.append(policy.update([batch]))
            with residency.publishing():
                weights = [tensor.clone() for tensor in policy.full_weights()]
    return {"metrics": metrics, "weights": weights}
