"""What runs inside a vLLM worker: receiving weights, listening on loopback only, and dying with the parent process.

vLLM imports this module in every worker because the engine names `WorkerExtension` as its
`worker_extension_cls`; the import registers the "megatron_ppo" weight-transfer backend. vLLM drives it
through `init_weight_transfer_engine`, `start_weight_update`, `update_weights`, `finish_weight_update`.
Invariant: `update_weights` succeeds only if every parameter of the model has arrived.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.rendezvous
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_ppo.protocol.errors import RefitError
from megatron_ppo.protocol.weights import RefitGroupSpec, TensorMeta, WeightManifest
from megatron_ppo.transport.broadcast_group import BroadcastGroup
from megatron_ppo.transport.streams import receive_stream
from megatron_ppo.transport.tcp_stores import keep_to_loopback

logger = logging.getLogger(__name__)

BACKEND = "megatron_ppo"
_ORPHAN_EXIT_CODE = 17


class WorkerExtension:
    """Mixed into vLLM's worker class. Its methods are reachable through `collective_rpc`."""

    def megatron_ppo_worker_pid(self) -> int:
        """Process id of this worker."""
        return os.getpid()

    def megatron_ppo_forget_update(self) -> None:
        """End the update of weights that is open here because it failed on another worker.

        vLLM ends it where it failed, and refuses to start the next one where it is open (0.32 and 0.33).
        """
        worker: Any = self
        if worker._weight_update_active:
            worker._weight_update_active = False
            worker.weight_transfer_engine.reset_weight_update_target()


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Fields of `RefitGroupSpec`, as vLLM's RPC carries them."""

    host: str
    port: int
    generation: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Fields of `WeightManifest`: `tensors` holds [name, shape, dtype] triples."""

    tensors: list[list[Any]]
    bucket_bytes: int
    verify_checksum: bool


class BroadcastWeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The "megatron_ppo" backend: buckets over a `BroadcastGroup` into vLLM's layerwise reload.

    Raises: RefitError for a refused manifest, a broken transfer or missing parameters; the engine must then
        stay paused until a complete transfer has succeeded.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: BroadcastGroup | None = None
        self._expected = {name for name, _ in self.model.named_parameters()}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the group as rank `rank_offset` + this worker's rank within its engine."""
        self.shutdown()
        spec = RefitGroupSpec(**vars(init_info))
        rank = spec.rank_offset + self.parallel_config.rank
        self._group = BroadcastGroup(spec, rank=rank, device=self.device)

    def start_weight_update(self) -> None:
        """Make every layer ready to load, also after a transfer that broke half-way."""
        _forget_partial_reload(self.model)
        if self.device.type == "cpu":
            _pack_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_dict: dict[str, Any]) -> None:
        """Receive a whole manifest and load it."""
        self.receive_weights(self.parse_update_info(update_dict))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Confirm the manifest, then load bucket after bucket; the next one arrives meanwhile."""
        if self._group is None:
            raise RefitError("no refit group has been joined; join_refit_group comes first")
        try:
            buckets = receive_stream(self._group, _manifest(update_info))
            # One call for all: each one walks the whole model before it loads anything.
            loaded = self.model.load_weights(tensor for tensors in buckets for tensor in tensors)
            # Checked here and not at the finish: vLLM ends the update session only when this method raises.
            self._check_complete(loaded)
        except Exception as error:
            # The others must not wait for this worker: vLLM hears them in their order, and so the cause after them.
            self._group.abandon(f"{type(error).__name__}: {error}")
            raise

    def _check_complete(self, loaded: set[str] | None) -> None:
        # A model whose loader reports nothing cannot be checked for completeness.
        if loaded is not None and (missing := self._expected - set(loaded)):
            raise RefitError(f"{len(missing)} parameters were not in the manifest: {sorted(missing)[:5]}")
        if partial := _partly_loaded(self.model):
            raise RefitError(f"{len(partial)} layers received only a part of their elements: {partial[:5]}")

    def finish_weight_update(self) -> None:
        """Finish the layers that could not be processed on the way."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _manifest(info: UpdateInfo) -> WeightManifest:
    tensors = tuple(
        TensorMeta(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in info.tensors
    )
    return WeightManifest(
        tensors=tensors, bucket_bytes=info.bucket_bytes, verify_checksum=info.verify_checksum
    )


def _forget_partial_reload(model: nn.Module) -> None:
    # A broken transfer leaves layers that count the elements they have received and hold views of them;
    # `initialize_layerwise_reload` skips such layers, so they would mix two transfers.
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


def _partly_loaded(model: nn.Module) -> list[str]:
    # A fused projection counts as loaded from its first shard on. Embeddings pad their vocabulary and never
    # fill.
    return [
        f"{name} ({info.load_numel} of {info.load_numel_total})"
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase)
        and (info := get_layerwise_info(layer)).can_load()
        and 0 < info.load_numel < info.load_numel_total
    ]


def _repack_tied_head(model: nn.Module) -> None:
    # On CPU a tied lm_head computes from a packed copy of the embedding, and no checkpoint name maps to it,
    # so the reload never rebuilds it and the logits would stay those of the old weights (vllm 0.32 and 0.33).
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding:
        return
    if head.weight is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


def _pack_experts_again(model: nn.Module) -> None:
    # On CPU experts compute from packed weights. vLLM packs them only where it builds the layer's kernel, so a reload
    # would leave plain weights where packed ones are read: wrong tokens, no error (vllm 0.32). Without a kernel it
    # builds one, and packs.
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _register_backend() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeightReceiver)


def _die_with_parent() -> None:
    # vLLM's engine core does not notice a parent that was killed with SIGKILL and would keep a core and its
    # memory for ever. In thread mode there is no parent process of multiprocessing, hence nothing to watch.
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == "die-with-parent" for thread in threading.enumerate()):
        return

    def watch() -> None:
        while parent.is_alive() and os.getppid() == parent.pid:
            parent.join(timeout=1.0)
        os._exit(_ORPHAN_EXIT_CODE)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


# Importing this module in a worker process is vLLM's hook for extensions; there is no later call to use.
_register_backend()
# vLLM 0.32 and 0.33 let torch open the store of an engine's workers, which all are on one host, afterwards.
keep_to_loopback(torch.distributed.rendezvous)
_die_with_parent()
