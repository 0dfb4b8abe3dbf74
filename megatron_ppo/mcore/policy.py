"""The trained policy: log-probs, updates, and its weights in the Hugging Face layout. Implements loop ports
Policy and WeightSource; driven by the loop on every rank in the same order.

Invariant: scoring and training compute the same function (dropout 0, same kernels, same temperature), so
before the first update of a step the PPO ratio is 1 up to rounding.

Shape legend: B sequences, T token positions (right-padded); S rows that the model sees, L positions of a row on
this rank (see `mcore.sequences`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.residency import WEIGHTS, Part
from megatron_ppo.mcore import platform
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.residence import Residence
from megatron_ppo.mcore.settings import TrainingSettings
from megatron_ppo.mcore.weight_export import export_hf_weights, hf_weight_metadata
from megatron_ppo.numerics.loss_output import LossCounts, LossOutput, share
from megatron_ppo.numerics.loss_settings import PolicyLossSettings
from megatron_ppo.numerics.losses import policy_loss
from megatron_ppo.numerics.masking import trainable_mask
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.weights import TensorMeta

if TYPE_CHECKING:
    from megatron_ppo.mcore.language_head import LanguageHead
    from megatron_ppo.mcore.sequences import Microbatch
    from megatron_ppo.mcore.trained_model import TrainedModel


class MegatronPolicy:
    """A language model trained by the clipped policy-gradient loss.

    Args:
        model: Hugging Face folder (config.json and safetensors) with the initial weights.
        parallel: groups of this model; policy and critic may differ.
        pad_token_id: fills the places of a microbatch that have no token.
        logprob_chunk_size: positions whose logits exist at a time, in training and scoring; None = all of a
            microbatch. Bounds memory; training then computes the output layer twice.
        temperature: of sampling, > 0; log-probs and entropy are those of softmax(logits / temperature).
        reference: keep a second, frozen copy of the initial weights for `reference_logprobs`.
        seed: of Megatron's generators.
    Raises: ConfigError for a model that cannot be mapped or cut, or a bad setting.
    """

    def __init__(
        self,
        *,
        model: str | Path,
        parallel: ParallelContext,
        training: TrainingSettings,
        pad_token_id: int,
        logprob_chunk_size: int | None = None,
        temperature: float = 1.0,
        loss: PolicyLossSettings | None = None,
        reference: bool = False,
        seed: int = 42,
    ) -> None:
        if not temperature > 0.0:
            raise ConfigError(f"the policy's temperature must be > 0, got {temperature}")
        if logprob_chunk_size is not None and logprob_chunk_size < 1:
            raise ConfigError(f"logprob_chunk_size must be >= 1, got {logprob_chunk_size}")
        platform.install()
        # Not at the top: importing megatron.core must come after install().
        from megatron_ppo.mcore.language_head import LanguageHead
        from megatron_ppo.mcore.trained_model import TrainedModel

        self.trained: TrainedModel = TrainedModel(
            Path(model), parallel, training, pad_token_id=pad_token_id, seed=seed, value_head=False
        )
        self._temperature = temperature
        self._loss = PolicyLossSettings() if loss is None else loss
        self._reference = self.trained.frozen_copy() if reference else None

        def head(modules: Sequence[torch.nn.Module]) -> LanguageHead:
            return LanguageHead(modules, self.trained.model, parallel, chunk_size=logprob_chunk_size)

        self._head = head(self.trained.modules)
        self._reference_head = None if self._reference is None else head(self._reference)
        self.reference_residence = Residence("reference", {Part.PARAMETERS: self._reference_parameters})

    @property
    def residence(self) -> Residence:
        """Moves the policy off the device and back; `reference_residence` does that with the frozen copy."""
        return self.trained.residence

    def _reference_parameters(self) -> Iterator[Tensor]:
        for chunk in self._reference or ():
            yield from chunk.parameters()

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        """float32 [B, T] nats with the current weights; 0 outside the response mask. The same on every
        rank.
        """
        return self._score(batch, None, self._head, temperature)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """The same with the frozen initial weights. Raises: ConfigError without reference=True."""
        if self._reference is None or self._reference_head is None:
            raise ConfigError("reference log-probs need a policy with reference=True, got reference=False")
        self.reference_residence.require(WEIGHTS, "a forward pass")
        return self._score(batch, self._reference, self._reference_head, None)

    def scoring_metrics(self) -> dict[str, float]:
        """`train/logprob_...`: how the last pass without gradient was cut into microbatches."""
        return self.trained.scoring_metrics("train/logprob_")

    def update(self, minibatches: Sequence[TrainBatch]) -> dict[str, float]:
        """One optimizer step per minibatch, then one scheduler tick; metrics `train/...` are means over
        minibatches.

        Raises: NonFiniteError, with the offending ordinals, before the optimizer step is applied.
        """
        return self.trained.update(minibatches, self._minibatch_loss, "train")

    def weight_metadata(self) -> tuple[TensorMeta, ...]:
        """Names, shapes and dtypes in the order of `full_weights`; the same on every rank."""
        return hf_weight_metadata(self.trained.model, self.trained.dtype)

    def full_weights(self) -> Iterator[Tensor]:
        """Collective over all ranks, which all run it to its end: gathers one parameter at a time to rank 0, which
        alone gets the tensors.
        """
        self.residence.require(WEIGHTS, "reading the weights")
        self.trained.flush()
        return export_hf_weights(self.trained.chunks, self.trained.weight_map)

    def parameters_hash(self) -> str:
        """Changes if and only if a parameter does; the same on every rank."""
        return self.trained.parameters_hash()

    def _score(
        self,
        batch: TrainBatch,
        modules: Sequence[torch.nn.Module] | None,
        head: LanguageHead,
        temperature: float | None,
    ) -> Tensor:
        used = self._temperature if temperature is None else temperature
        if not used > 0.0:
            raise ValueError(f"temperature must be > 0, got {used}")

        def score(output: Tensor, microbatch: Microbatch) -> Tensor:
            scores = head.scores(output, microbatch.target_ids_SL, temperature=used)
            return microbatch.to_tokens(scores.logprobs_P)

        return self.trained.tokens(batch, score, modules)

    def _minibatch_loss(self, output: Tensor, microbatch: Microbatch, counts: LossCounts) -> LossOutput:
        batch = microbatch.batch
        scores = self._head.scores(
            output, microbatch.target_ids_SL, temperature=self._temperature, entropy=True
        )
        result = policy_loss(
            logprobs_BT=microbatch.to_tokens(scores.logprobs_P),
            old_logprobs_BT=_filled(batch.old_logprobs_BT, "old_logprobs_BT"),
            generation_logprobs_BT=batch.generation_logprobs_BT,
            ref_logprobs_BT=batch.ref_logprobs_BT,
            advantages_BT=_filled(batch.advantages_BT, "advantages_BT"),
            response_mask_BT=batch.response_mask_BT,
            sample_mask_B=batch.sample_mask_B,
            reward_B=batch.reward_B,
            settings=self._loss,
            counts=counts,
        )
        mask_BT = trainable_mask(batch.response_mask_BT, batch.sample_mask_B)
        entropy_BT = microbatch.to_tokens(_filled(scores.entropy_P, "entropy"))
        metrics = {**result.metrics, "train/entropy": share(entropy_BT, mask_BT, counts.valid_tokens)}
        return LossOutput(loss=result.loss, sequence_loss_B=result.sequence_loss_B, metrics=metrics)


def _filled(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the minibatch has no {name}; it must be filled in before an update")
    return tensor
