"""Where a deterministic run can be kept: on processors whose kernels sum in an order that is always the same."""

from __future__ import annotations

from megatron_ppo.config.schema import RunConfig
from megatron_ppo.protocol.errors import ConfigError


def check_determinism(config: RunConfig, *, device_type: str) -> None:
    """Raises: ConfigError for `run.deterministic` on anything but a CPU, where it was shown."""
    if config.run.deterministic and device_type != "cpu":
        raise ConfigError(
            f"run.deterministic: got True; must be false on {device_type}, whose kernels sum in an order that varies"
        )
