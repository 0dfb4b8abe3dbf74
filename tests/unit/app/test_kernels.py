"""What models run on is decided before anything starts, and a wish that cannot be met is refused there."""

from __future__ import annotations

import pytest

from megatron_ppo.app.kernels import choose_kernels
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.accelerators import GRADIENT_KERNEL, Accelerators, Package
from tests.unit.config.composed import changed, experiment


def found(*, engine: str = "") -> Accelerators:
    """A CUDA machine with both packages; `engine` is what is wrong with Transformer Engine."""
    apex = Package(version="0.1", problem="")
    return Accelerators(
        cuda=True,
        transformer_engine=Package(version="2.20.2", problem=engine),
        apex=apex,
        gradient_kernel=apex,
        apex_adam=apex,
    )


def test_each_model_chooses_for_itself() -> None:
    config = changed({"critic.transformer_impl": "local", "policy.precision": "bf16"})
    chosen = choose_kernels(config, cuda=True, found=found())
    assert (chosen["policy"].layers, chosen["critic"].layers) == ("transformer_engine", "local")
    assert "flash" in chosen["policy"].choices["attention"].used
    assert GRADIENT_KERNEL in chosen["critic"].choices["gradient accumulation"].why


def test_this_cpu_runs_on_the_fallbacks() -> None:
    chosen = choose_kernels(experiment("cpu_smoke"), cuda=False)
    assert {kernels.layers for kernels in chosen.values()} == {"local"}
    assert not any(kernels.gradient_accumulation_fusion for kernels in chosen.values())


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_transformer_engine_that_is_asked_for_and_absent_is_refused_by_key(model: str) -> None:
    config = changed({f"{model}.transformer_impl": "transformer_engine"})
    with pytest.raises(
        ConfigError, match=rf"^{model}\.transformer_impl: got 'transformer_engine'.*no CUDA device"
    ):
        choose_kernels(config, cuda=False)
    with pytest.raises(ConfigError, match=rf"^{model}\.transformer_impl: .*undefined symbol"):
        choose_kernels(config, cuda=True, found=found(engine="undefined symbol"))
