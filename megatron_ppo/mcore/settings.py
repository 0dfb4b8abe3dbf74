"""What a caller chooses about a model's training, in the config's names. Checked at construction; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_ppo.data.microbatch_plan import BatchPolicy
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.accelerators import TransformerImpl

Precision = Literal["fp32", "bf16"]
DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]
RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """Which communication of the distributed optimizer runs beside computation. Changes no result.

    Attributes:
        overlap_grad_reduce: buckets of gradients are reduced while the backward pass goes on.
        overlap_param_gather: updated parameters are gathered by the next forward pass, bucket by bucket, instead of
            at the end of the optimizer step.
        ddp_bucket_size: parameters per bucket; None is Megatron's choice (at least 40 million).
    """

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    ddp_bucket_size: int | None = None

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ConfigError(
                "overlap_param_gather: got True; needs overlap_grad_reduce=true, got False: without it all parameters "
                "are one bucket, and the gather could overlap with nothing"
            )
        if self.ddp_bucket_size is not None and self.ddp_bucket_size < 1:
            raise ConfigError(f"ddp_bucket_size must be >= 1 or null, got {self.ddp_bucket_size}")
        if self.ddp_bucket_size is not None and not self.overlap_grad_reduce:
            raise ConfigError(
                f"ddp_bucket_size: got {self.ddp_bucket_size}; must be null with overlap_grad_reduce=false, which "
                "reduces all gradients at once"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSettings:
    """Activations that the backward pass computes again instead of keeping them. Changes no result.

    Attributes:
        granularity: None = keep all; full = keep only the inputs of layers; selective = recompute `modules`.
        method: of full. uniform: every unit of `num_layers` layers keeps its input only; block: only the first
            `num_layers` layers of each chunk are recomputed.
        num_layers: of full, >= 1; uniform needs it to divide the layers of a chunk.
        modules: of selective: core_attn, layernorm, mlp, moe.
    """

    granularity: RecomputeGranularity | None = None
    method: RecomputeMethod | None = None
    num_layers: int | None = None
    modules: tuple[RecomputeModule, ...] = ()

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("granularity", self.granularity, get_args(RecomputeGranularity)),
            ("method", self.method, get_args(RecomputeMethod)),
            *(("modules", module, get_args(RecomputeModule)) for module in self.modules),
        ):
            if value is not None and value not in allowed:
                raise ConfigError(f"recompute.{name} must be one of {', '.join(allowed)}, got {value!r}")
        full, selective = self.granularity == "full", self.granularity == "selective"
        for name, given, wanted in (
            ("method", self.method is not None, full),
            ("num_layers", self.num_layers is not None, full),
            ("modules", bool(self.modules), selective),
        ):
            if given != wanted:
                needs = "must be set" if wanted else "must not be set"
                raise ConfigError(
                    f"recompute.{name}: got {getattr(self, name)!r}; {needs} with "
                    f"recompute.granularity={self.granularity or 'null'}"
                )
        if len(set(self.modules)) != len(self.modules):
            raise ConfigError(f"recompute.modules: got {list(self.modules)}; names one of them twice")
        if self.num_layers is not None and self.num_layers < 1:
            raise ConfigError(f"recompute.num_layers must be >= 1, got {self.num_layers}")

    def check_layers(self, layers: int) -> None:
        """Raises: ConfigError if `num_layers` does not fit a pipeline chunk of `layers` layers."""
        if self.num_layers is None:
            return
        if self.num_layers > layers:
            raise ConfigError(
                f"recompute.num_layers: got {self.num_layers}; must be <= {layers}, the layers of a pipeline chunk"
            )
        if self.method == "uniform" and layers % self.num_layers:
            raise ConfigError(
                f"recompute.num_layers: got {self.num_layers}; must divide {layers}, the layers of a pipeline chunk, "
                "with recompute.method=uniform"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How a model is trained, whatever its loss; policy and critic have one each.

    Attributes:
        train_batches, score_batches: how passes with and without gradient are cut into microbatches: by a number of
            sequences, or by a token budget, padded or packed. Neither changes a result, only memory and speed.
            Lengths are rounded up further where the layout needs it.
        precision: of parameters and activations; gradients and the optimizer are float32 in both.
        transformer_impl: whose layers; auto is Transformer Engine's where it can be used.
        moe_aux_loss_coeff: of the load-balancing loss of a mixture of experts; 0 = off.
    """

    optimizer: OptimizerSettings
    scheduler: SchedulerSettings
    train_batches: BatchPolicy
    score_batches: BatchPolicy
    precision: Precision = "fp32"
    transformer_impl: TransformerImpl = "auto"
    overlap: OverlapSettings = field(default_factory=OverlapSettings)
    recompute: RecomputeSettings = field(default_factory=RecomputeSettings)
    moe_aux_loss_coeff: float = 0.0

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            allowed = ", ".join(get_args(Precision))
            raise ConfigError(f"precision must be one of {allowed}, got {self.precision!r}")
