"""vLLM serves an exported mixture of experts, and takes its weights tensor by tensor, one per expert and matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ppo.mcore.hf_export import appearing_folder, write_companions, write_weights
from megatron_ppo.protocol.weights import TensorMeta
from megatron_ppo.transport.buckets import tensor_meta
from tests.functional.inference.hf_oracle import MAX_MODEL_LEN, TOLERANCE_NATS, VOCABULARY, worst_difference

pytestmark = [pytest.mark.vllm]

PROMPT = [3, 4, 5]


def tiny_mixture(seed: int) -> torch.nn.Module:
    """Four experts, two per token. Head size 32 is the smallest that vLLM's CPU attention takes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3MoeForCausalLM(config).eval()


class FileSource:
    """The weights of a saved folder as `loop.ports.WeightSource`: the names and layout that a trainer publishes."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")

    def weight_metadata(self) -> tuple[TensorMeta, ...]:
        """See the port."""
        return tuple(tensor_meta(name, tensor) for name, tensor in self._tensors.items())

    def full_weights(self) -> Iterator[Tensor]:
        """See the port."""
        yield from self._tensors.values()


def exported(folder: Path, output: Path) -> None:
    """What `scripts/export_hf.py` writes for these weights, in several files."""
    source = FileSource(folder)
    with appearing_folder(output) as written:
        write_companions(written, folder, value_head=False, dtype=torch.float32)
        write_weights(written, source.weight_metadata(), source.full_weights(), max_file_bytes=200_000)
    assert len(list(output.glob("*.safetensors"))) > 1


def test_a_mixture_samples_like_transformers_before_and_after_a_refit(
    engine_process_environment: None, tmp_path: Path
) -> None:
    from tests.functional.inference.engine_rig import running_rig_of

    torch.set_num_threads(1)
    models = [tiny_mixture(1), tiny_mixture(2)]
    for name, model in zip(("first", "second"), models, strict=True):
        model.save_pretrained(tmp_path / name)
    exported(tmp_path / "first", tmp_path / "exported")
    with running_rig_of(models, tmp_path / "exported") as rig:
        for version, model in enumerate(models):
            if version == 1:
                with rig.refit(FileSource(tmp_path / "second")) as refit:
                    refit.push(version=1)
            for completion in rig.generate(PROMPT, seeds=[1, 2], max_new_tokens=30):
                assert [span.version for span in completion.spans] == [version]
                assert worst_difference(model, PROMPT, completion, version) < TOLERANCE_NATS
