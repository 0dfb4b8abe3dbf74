"""What policy and critic run on, decided and recorded before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module

from megatron_ppo.config.schema import RunConfig
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.accelerators import Accelerators, Kernels, probe, select

logger = logging.getLogger(__name__)


def choose_kernels(
    config: RunConfig, *, cuda: bool, found: Accelerators | None = None
) -> Mapping[str, Kernels]:
    """By model. The same on every rank of one environment.

    Args:
        found: the optional packages; by default those of this environment, imported where there is CUDA.
    Raises: ConfigError where a model asks for what cannot be used here.
    """
    accelerators = found or probe(cuda=cuda, load=import_module)
    chosen: dict[str, Kernels] = {}
    for name, section in (("policy", config.policy), ("critic", config.critic)):
        try:
            chosen[name] = select(
                accelerators, transformer_impl=section.transformer_impl, precision=section.precision
            )
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from error
        lines = "; ".join(f"{part}: {text}" for part, text in chosen[name].described().items())
        logger.info("the %s runs on %s", name, lines)
    return chosen
