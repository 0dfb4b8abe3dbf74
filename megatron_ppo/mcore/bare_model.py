"""A model's weights out of a run's checkpoint, without optimizer or gradients, in any layout.

Driven by `app.export`. Imports `megatron.core`, so `platform.install()` must have run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from megatron_ppo.mcore import checkpoint_reader, platform
from megatron_ppo.mcore.hf_config import HFModelConfig
from megatron_ppo.mcore.model import build_model, transformer_config
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.settings import RecomputeSettings
from megatron_ppo.mcore.weight_export import export_hf_weights, hf_weight_metadata
from megatron_ppo.mcore.weights import WeightMap
from megatron_ppo.protocol.weights import TensorMeta


class BareModel:
    """This rank's part of one model of a checkpoint.

    Args:
        name: `policy` or `critic`.   checkpoint: folder with the models of a run's checkpoint.
        model: what the initial folder's config.json says.   dtype: of the saved parameters.
    Raises: CheckpointError if the folder is no complete checkpoint, or one of another model.
    """

    def __init__(
        self,
        *,
        name: str,
        checkpoint: Path,
        model: HFModelConfig,
        parallel: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        model.check_parallelism(
            tensor_model_parallel_size=parallel.tp_size,
            pipeline_model_parallel_size=parallel.pp_size,
            expert_model_parallel_size=parallel.ep_size,
            sequence_parallel=parallel.sequence_parallel,
        )
        self._dtype, value_head = dtype, name == "critic"
        self._map = WeightMap(model=model, parallel=parallel, value_head=value_head)
        kernels = platform.kernels("auto", "fp32" if dtype == torch.float32 else "bf16")
        config = transformer_config(model, parallel, kernels, dtype=dtype, recompute=RecomputeSettings())
        self._chunks = build_model(model, config, parallel, kernels, value_head=value_head)
        if dtype != torch.float32:
            for chunk in self._chunks:
                chunk.to(dtype)
        self._load(name, checkpoint)

    def metadata(self) -> tuple[TensorMeta, ...]:
        """Names and shapes in the order of `tensors`."""
        return hf_weight_metadata(self._map.model, self._dtype, value_head=self._map.value_head)

    def tensors(self) -> Iterator[Tensor]:
        """Full Hugging Face tensors, one at a time, on rank 0 of the job alone; collective over all ranks, which all
        run it to its end.
        """
        return export_hf_weights(self._chunks, self._map)

    def _load(self, name: str, checkpoint: Path) -> None:
        metadata = {"dp_cp_group": self._map.parallel.data_context}
        # Keys as `mcore.checkpoint` gives them: the model's name before Megatron's own.
        template: dict[str, Any] = {
            f"chunk{index}": chunk.sharded_state_dict(metadata=metadata)
            for index, chunk in enumerate(self._chunks)
        }
        add_prefix_for_sharding(template, f"{name}.")
        kind = "MegatronCritic" if self._map.value_head else "MegatronPolicy"
        checkpoint_reader.read_about(checkpoint, {name: f"{kind} of {self._map.model}"})
        loaded = checkpoint_reader.load(template, checkpoint)
        for index, chunk in enumerate(self._chunks):
            chunk.load_state_dict(loaded[f"chunk{index}"])
