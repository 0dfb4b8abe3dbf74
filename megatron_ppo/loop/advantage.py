"""The advantage estimator of the loop: generalised advantage estimation, as a part that Hydra builds.

Driven once per step, after values and log-probs; its results are never refreshed between epochs. Another
estimator is another class with the methods of `loop.ports.Advantage`.
Invariant: runs the same on every rank (the batch is replicated), and either returns finite advantages for
every token that counts or raises before any update.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.mismatch import check_finite
from megatron_ppo.loop.ports import Metrics
from megatron_ppo.numerics.gae import gae, length_adaptive_lambda, place_terminal_reward, whiten
from megatron_ppo.numerics.kl import reward_kl
from megatron_ppo.numerics.loss_settings import KLType
from megatron_ppo.numerics.masking import select, trainable_mask
from megatron_ppo.numerics.reduce import explained_variance
from megatron_ppo.protocol.errors import ConfigError


class GAE:
    """Advantages for the policy and returns for the critic, from one pass or from two with different λ.

    Args:
        gae_lambda: λ of both passes unless one of the next two says otherwise, in [0, 1].
        gae_gamma: discount per token, in (0, 1].
        gae_lambda_value: λ of the critic's returns; None = gae_lambda.
        gae_lambda_policy: λ of the policy's advantages; None = gae_lambda.
        length_adaptive_alpha: above 0 the policy's λ is 1 - 1 / (α · response length) per sequence, which
            takes precedence over gae_lambda_policy; 0 = off.
        normalize_advantages: whiten the advantages over all tokens of the step; returns are never whitened.
        reward_kl_penalty: β ≥ 0; subtract β · KL(policy || reference) from each token's reward. 0 = off.
        reward_kl_type: estimator of that KL.
    Raises: ConfigError naming `advantage.<key>` for a value out of range.
    Source: arXiv:1506.02438; two λ and length-adaptive λ: VAPO, arXiv:2504.05118.
    """

    def __init__(
        self,
        *,
        gae_lambda: float,
        gae_gamma: float,
        gae_lambda_value: float | None = None,
        gae_lambda_policy: float | None = None,
        length_adaptive_alpha: float = 0.0,
        normalize_advantages: bool = True,
        reward_kl_penalty: float = 0.0,
        reward_kl_type: KLType = "k3",
    ) -> None:
        lambdas = {
            "gae_lambda": gae_lambda,
            "gae_lambda_value": gae_lambda_value,
            "gae_lambda_policy": gae_lambda_policy,
        }
        for key, value in lambdas.items():
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"advantage.{key} must be in [0, 1], got {value}")
        if not 0.0 < gae_gamma <= 1.0:
            raise ConfigError(f"advantage.gae_gamma must be in (0, 1], got {gae_gamma}")
        if not length_adaptive_alpha >= 0.0:
            raise ConfigError(f"advantage.length_adaptive_alpha must be >= 0, got {length_adaptive_alpha}")
        if not reward_kl_penalty >= 0.0:
            raise ConfigError(f"advantage.reward_kl_penalty must be >= 0, got {reward_kl_penalty}")
        self._lambda_value = gae_lambda if gae_lambda_value is None else gae_lambda_value
        self._lambda_policy = gae_lambda if gae_lambda_policy is None else gae_lambda_policy
        self._alpha = length_adaptive_alpha
        self._gamma = gae_gamma
        self._normalize = normalize_advantages
        self._reward_kl_penalty = reward_kl_penalty
        self._reward_kl_type: KLType = reward_kl_type

    def apply(self, batch: TrainBatch) -> TrainBatch:
        """The batch with `advantages_BT` and `returns_BT`, float32, 0 at tokens that do not count.

        Raises: ValueError when every token is masked out, or values or log-probs that it needs are missing;
            NonFiniteError, with the ordinals, when a reward or a value is NaN or infinite.
        """
        if batch.values_BT is None:
            raise ValueError("values_BT must be set before advantages can be estimated, got None")
        mask_BT = trainable_mask(batch.response_mask_BT, batch.sample_mask_B)
        if not bool(mask_BT.any()):
            raise ValueError(
                f"no token of the {len(batch)} sequences counts: all are masked out (overlong filtering, "
                "log-prob error threshold or loss masks), and an empty batch must not be trained on"
            )
        value_BT = select(batch.values_BT, mask_BT, name="values_BT")
        reward_BT = self._token_rewards(batch, mask_BT)
        check_finite(reward_BT, batch.ordinal_B, name="reward")
        check_finite(value_BT, batch.ordinal_B, name="values_BT")

        lambda_policy: float | Tensor = self._lambda_policy
        if self._alpha > 0.0:
            lambda_policy = length_adaptive_lambda(mask_BT, alpha=self._alpha)
        advantage_BT, return_BT = gae(
            reward_BT, value_BT, mask_BT, discount=self._gamma, gae_lambda=lambda_policy
        )
        if self._alpha > 0.0 or self._lambda_value != self._lambda_policy:
            _, return_BT = gae(
                reward_BT, value_BT, mask_BT, discount=self._gamma, gae_lambda=self._lambda_value
            )
        if self._normalize:
            advantage_BT = whiten(advantage_BT, mask_BT)
        return batch.replace(advantages_BT=advantage_BT, returns_BT=return_BT)

    def metrics(self, batch: TrainBatch) -> Metrics:
        """Statistics of an applied batch over the tokens that count.

        `train/advantages/{mean,max,min}` (whitened where that is on), `train/returns/mean`, and
        `train/critic/explained_var_before_update`, with the values from before this step's critic updates.

        Raises: ValueError if `apply` has not run.
        """
        if batch.advantages_BT is None or batch.returns_BT is None or batch.values_BT is None:
            raise ValueError("advantages_BT, returns_BT and values_BT must be set; run apply first")
        mask_BT = trainable_mask(batch.response_mask_BT, batch.sample_mask_B)
        advantage = batch.advantages_BT[mask_BT].double()
        return {
            "train/advantages/mean": float(advantage.mean()),
            "train/advantages/max": float(advantage.max()),
            "train/advantages/min": float(advantage.min()),
            "train/returns/mean": float(batch.returns_BT[mask_BT].double().mean()),
            "train/critic/explained_var_before_update": explained_variance(
                batch.values_BT, batch.returns_BT, mask_BT
            ),
        }

    def _token_rewards(self, batch: TrainBatch, mask_BT: Tensor) -> Tensor:
        """[B, T] reward units; the terminal reward, less the KL penalty of every token."""
        reward_BT = place_terminal_reward(batch.reward_B, mask_BT)
        if self._reward_kl_penalty == 0.0:
            return reward_BT
        if batch.old_logprobs_BT is None or batch.ref_logprobs_BT is None:
            raise ValueError("a KL penalty in the reward needs old_logprobs_BT and ref_logprobs_BT, got None")
        old_BT = select(batch.old_logprobs_BT, mask_BT, name="old_logprobs_BT")
        ref_BT = select(batch.ref_logprobs_BT, mask_BT, name="ref_logprobs_BT")
        return reward_BT - self._reward_kl_penalty * reward_kl(old_BT, ref_BT, self._reward_kl_type)
