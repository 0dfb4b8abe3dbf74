"""Jobs of `test_publishing`: a Megatron policy publishes to receivers in another process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.peak_memory import broadcasts_release_at_once, peak_bytes
from megatron_ppo.mcore import weight_export
from megatron_ppo.mcore.host_memory import SharedParameters, share_parameters
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.protocol.weights import largest_layer_bytes
from megatron_ppo.refit.agreement import agreement_over
from megatron_ppo.refit.broadcast import BroadcastRefit
from megatron_ppo.transport.broadcast_group import BroadcastStore
from tests.functional.mcore.every_rank import weights_on_every_rank
from tests.functional.mcore.jobs import Layout, context, random_batch, settings
from tests.functional.mcore.receiver_process import ReceiverFleet, receiver_process, tensor_hash

TIMEOUT_S = 60.0


def publish(
    *,
    folder: str,
    layout: Layout,
    receivers: int,
    staging_bytes: int,
    verify_checksum: bool = False,
    by_sockets: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Publishes, trains, publishes again. From rank 0: what arrived, what should have, and the peak of memory that
    the second publish allocated; beside it the peak of gathering the whole model at once, of each gathering whether
    rank 0 read the other ranks' memory, and the sizes of the largest layer and tensor.

    Args:
        by_sockets: as between hosts, where it cannot.
    """
    with context(layout) as parallel, ExitStack() as stack:
        reads: list[bool] = []

        def share(held: Mapping[str, Tensor], *, position: int) -> SharedParameters | None:
            shared = None if by_sockets else share_parameters(held, position=position)
            reads.append(shared is not None)
            return shared

        stack.enter_context(mock.patch.object(weight_export, "share_parameters", share))
        policy = MegatronPolicy(parallel=parallel, **settings(folder, **changes))
        is_sender = dist.get_rank() == 0
        fleet = None
        if is_sender:
            fleet = ReceiverFleet(receivers, stack.enter_context(receiver_process()))
        refit = BroadcastRefit(
            source=policy,
            sink=fleet,
            store=BroadcastStore(timeout_s=TIMEOUT_S) if is_sender else None,
            bucket_bytes=staging_bytes,
            verify_checksum=verify_checksum,
            timeout_s=TIMEOUT_S,
            agree=agreement_over(None),
        )
        stack.callback(refit.close)
        refit.push(version=0)
        policy.update([random_batch()])
        with broadcasts_release_at_once():
            peak = peak_bytes(lambda: refit.push(version=1))
        whole = peak_bytes(lambda: list(policy.full_weights()))
        # What the publish must have done by itself.
        policy.trained.flush()
        weights = weights_on_every_rank(policy.trained.chunks, policy.trained.weight_map)
        expected = {
            meta.name: tensor_hash(tensor)
            for meta, tensor in zip(policy.weight_metadata(), weights, strict=True)
        }
        return {
            "expected": expected,
            "reads": reads,
            "received": fleet.hashes if fleet else None,
            "peak_bytes": peak,
            "whole_bytes": whole,
            "layer_bytes": largest_layer_bytes(policy.weight_metadata()),
            "tensor_bytes": max(meta.num_bytes for meta in policy.weight_metadata()),
        }
