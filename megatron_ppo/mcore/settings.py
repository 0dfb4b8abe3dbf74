"""What a caller chooses about optimization, in the config's names. Checked at construction; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_ppo.protocol.errors import ConfigError

Precision = Literal["fp32", "bf16"]
DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW.

    Attributes:
        lr: peak learning rate.   min_lr: where decaying schedules end.
        clip_grad: the gradient is scaled down to this global L2 norm; 0 = off.
    """

    lr: float
    min_lr: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        if not self.lr > 0.0:
            raise ConfigError(f"optimizer.lr must be > 0, got {self.lr}")
        if not 0.0 <= self.min_lr <= self.lr:
            raise ConfigError(f"optimizer.min_lr must be in [0, lr={self.lr}], got {self.min_lr}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("weight_decay", "clip_grad"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"optimizer.{name} must be >= 0, got {getattr(self, name)}")
        if not self.adam_eps > 0.0:
            raise ConfigError(f"optimizer.adam_eps must be > 0, got {self.adam_eps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Learning rate over ticks, one tick per epoch of updates.

    Attributes:
        lr_decay_steps: ticks until `min_lr`, warm-up included; the run's horizon.
        lr_warmup_steps: ticks of linear warm-up from `lr_warmup_init`.
    """

    lr_decay_steps: int
    lr_decay_style: DecayStyle = "constant"
    lr_warmup_steps: int = 0
    lr_warmup_init: float = 0.0

    def __post_init__(self) -> None:
        if self.lr_decay_style not in get_args(DecayStyle):
            allowed = ", ".join(get_args(DecayStyle))
            raise ConfigError(
                f"scheduler.lr_decay_style must be one of {allowed}, got {self.lr_decay_style!r}"
            )
        if self.lr_decay_steps < 1:
            raise ConfigError(f"scheduler.lr_decay_steps must be >= 1, got {self.lr_decay_steps}")
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise ConfigError(
                f"scheduler.lr_warmup_steps must be in [0, lr_decay_steps={self.lr_decay_steps}), "
                f"got {self.lr_warmup_steps}"
            )
        if not self.lr_warmup_init >= 0.0:
            raise ConfigError(f"scheduler.lr_warmup_init must be >= 0, got {self.lr_warmup_init}")
