"""A deterministic run is refused where it was not shown to be one."""

from __future__ import annotations

import pytest

from megatron_ppo.app.determinism import check_determinism
from megatron_ppo.config.compose import load
from megatron_ppo.protocol.errors import ConfigError

WORDS = [
    "+experiment=cpu_smoke",
    "schedule.max_trajectory_age_steps=0",
    "schedule.warmup_generation_lead_steps=null",
]


def test_it_is_kept_on_a_cpu_and_refused_elsewhere() -> None:
    config = load([*WORDS, "run.deterministic=true"])
    check_determinism(config, device_type="cpu")
    with pytest.raises(ConfigError, match=r"run\.deterministic: got True; must be false on cuda"):
        check_determinism(config, device_type="cuda")
    check_determinism(load(WORDS), device_type="cuda")
