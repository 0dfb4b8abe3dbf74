"""The trained critic: values and updates. Implements the loop port Critic; driven by the loop like the
policy.

Its backbone starts as a Hugging Face folder, by default the policy's. Its scalar head (weight and bias) starts at zero,
or as `score` of a reward or value model's folder.

Value convention: entry j is the value of the state *before* token j, so the model's output at j - 1.

Shape legend: B sequences, T token positions (right-padded); S rows that the model sees, L positions of a row on
this rank (see `mcore.sequences`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.mcore import platform
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.residence import Residence
from megatron_ppo.mcore.settings import TrainingSettings
from megatron_ppo.numerics.loss_output import LossCounts, LossOutput
from megatron_ppo.numerics.loss_settings import ValueLossSettings
from megatron_ppo.numerics.value_losses import value_loss

if TYPE_CHECKING:
    from megatron_ppo.mcore.sequences import Microbatch
    from megatron_ppo.mcore.trained_model import TrainedModel


class MegatronCritic:
    """A language model with a scalar head, trained by the (clipped) squared error of its values.

    Args: as `MegatronPolicy`; `model` is the folder whose backbone it starts from.
    Raises: ConfigError for a model that cannot be mapped or cut, or a bad setting.
    """

    def __init__(
        self,
        *,
        model: str | Path,
        parallel: ParallelContext,
        training: TrainingSettings,
        pad_token_id: int,
        value_loss: ValueLossSettings | None = None,
        seed: int = 42,
    ) -> None:
        platform.install()
        # Not at the top: importing megatron.core must come after install().
        from megatron_ppo.mcore.trained_model import TrainedModel

        self.trained: TrainedModel = TrainedModel(
            Path(model), parallel, training, pad_token_id=pad_token_id, seed=seed, value_head=True
        )
        self._loss = ValueLossSettings() if value_loss is None else value_loss

    @property
    def residence(self) -> Residence:
        """Moves the critic off the device and back."""
        return self.trained.residence

    def values(self, batch: TrainBatch) -> Tensor:
        """float32 [B, T] reward units; 0 outside the response mask. The same on every rank."""
        return self.trained.tokens(batch, _values_before_tokens)

    def scoring_metrics(self) -> dict[str, float]:
        """`train/critic/value_...`: how the last pass without gradient was cut into microbatches."""
        return self.trained.scoring_metrics("train/critic/value_")

    def update(self, minibatches: Sequence[TrainBatch]) -> dict[str, float]:
        """One optimizer step per minibatch, then one scheduler tick; metrics are `train/critic/...`.

        Raises: NonFiniteError, with the offending ordinals, before the optimizer step is applied.
        """
        return self.trained.update(minibatches, self._minibatch_loss, "train/critic")

    def parameters_hash(self) -> str:
        """Changes if and only if a parameter does; the same on every rank."""
        return self.trained.parameters_hash()

    def _minibatch_loss(self, output_SL1: Tensor, microbatch: Microbatch, counts: LossCounts) -> LossOutput:
        batch = microbatch.batch
        if batch.values_BT is None or batch.returns_BT is None:
            raise ValueError(
                "the minibatch has no values_BT or returns_BT; they must be filled in before an update"
            )
        return value_loss(
            values_BT=_values_before_tokens(output_SL1, microbatch),
            old_values_BT=batch.values_BT,
            returns_BT=batch.returns_BT,
            response_mask_BT=batch.response_mask_BT,
            sample_mask_B=batch.sample_mask_B,
            settings=self._loss,
            counts=counts,
        )


def _values_before_tokens(output_SL1: Tensor, microbatch: Microbatch) -> Tensor:
    """[B, T]; the output at j - 1 moved to j. Entry 0 has no state before it: 0."""
    return microbatch.to_tokens(output_SL1[..., 0])
