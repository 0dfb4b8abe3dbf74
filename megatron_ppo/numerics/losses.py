"""Settings of the losses, re-exported for callers of the losses."""

from megatron_ppo.numerics.loss_settings import KLType, PolicyLossSettings, TruncationType, ValueLossSettings

__all__ = ["KLType", "PolicyLossSettings", "TruncationType", "ValueLossSettings"]
