"""What a training run leaves behind is one model: in the trainer, in an exported folder, in transformers and in vLLM.

Each row trains policy and critic on two ranks, saves them, exports the policy with the command, and starts an engine
from the folder that it wrote. The engine then takes other weights of that model, tensor by tensor (of a mixture one per
expert and matrix), as it does in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ppo.protocol.weights import TensorMeta
from tests.functional.inference.hf_oracle import TOLERANCE_NATS, hf_logprobs, worst_difference
from tests.functional.mcore.jobs import SHAPE, random_batch
from tests.functional.worker_group import WorkerGroup
from tests.weight_metadata import tensor_meta

pytestmark = [pytest.mark.vllm, pytest.mark.megatron]

JOBS = "tests.functional.mcore.jobs:"
EXPORT_JOBS = "tests.functional.mcore.export_jobs:"
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
PROMPT = [3, 4, 5]


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


@pytest.mark.parametrize(
    ("kind", "layout", "exporting"),
    [
        pytest.param("qwen2", TP2, ["--tensor-parallel=2"], id="untied_tp2"),
        pytest.param("qwen3", PP2, ["--pipeline-parallel=2"], id="tied_pp2"),
        pytest.param("qwen3_moe", EP2, ["--expert-parallel=2"], id="experts_ep2"),
        pytest.param("llama3_rope", TP2, ["--pipeline-parallel=2"], id="scaled_rope_tp2"),
    ],
)
def test_the_exported_checkpoint_of_a_run_is_the_same_model_in_trainer_transformers_and_vllm(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    engine_process_environment: None,
    tmp_path: Path,
    kind: str,
    layout: dict[str, Any],
    exporting: list[str],
) -> None:
    import transformers

    from tests.functional.inference.engine_rig import running_rig_of

    torch.set_num_threads(1)
    run, output, initial = tmp_path / "run", tmp_path / "exported", tiny_model(kind)
    trained = workers.run(EXPORT_JOBS + "leave_run", folder=str(initial), run=str(run), layout=layout)[0]
    # Of several files: 200 kB are less than half of any of these models.
    arguments = [str(run), str(output), "--max-shard-size=200KB", *exporting]
    assert workers.run(EXPORT_JOBS + "export_by_command", arguments=arguments) == [0, 0]
    tensors = {
        name: tensor for path in output.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert len(list(output.glob("*.safetensors"))) > 1
    assert tensors.keys() == trained["policy"].keys()
    assert [
        name for name, tensor in tensors.items() if not torch.equal(tensor, trained["policy"][name])
    ] == []
    # The round trip: a trainer that starts from the folder has, and publishes, the same bits.
    assert workers.run(JOBS + "export_mismatches", folder=str(output), layout=layout) == [[], []]

    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (output, initial)
    ]
    batch = random_batch()
    with running_rig_of(models, output, max_model_len=SHAPE["max_position_embeddings"]) as rig:
        sequences = [
            row[:length].tolist() for row, length in zip(batch.token_ids_BT, batch.length_B, strict=True)
        ]
        scores = rig.loop.run(rig.engine.score(sequences, deadline_s=60))
        for row, (sequence, score) in enumerate(zip(sequences, scores, strict=True)):
            assert score == pytest.approx(hf_logprobs(models[0], sequence), abs=TOLERANCE_NATS)
            mine = trained["logprobs"][row, 1 : len(sequence)]
            response = batch.response_mask_BT[row, 1 : len(sequence)]
            difference = (torch.tensor(score) - mine)[response].abs().max()
            assert float(difference) < TOLERANCE_NATS
        for version, model in enumerate(models):
            if version == 1:
                with rig.refit(FileSource(initial)) as refit:
                    refit.push(version=1)
            for completion in rig.generate(PROMPT, seeds=[1, 2], max_new_tokens=30):
                assert [span.version for span in completion.spans] == [version]
                assert worst_difference(model, PROMPT, completion, version) < TOLERANCE_NATS
