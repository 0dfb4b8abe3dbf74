"""RunConfig: the whole configuration as one frozen tree. Every key has a type, a unit and a purpose.

Composed by `megatron_ppo.config.compose`; rules between sections are in `megatron_ppo.config.checks`.
Invariant: importing this module, or anything in this package, loads no torch, ray, vllm or megatron.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from megatron_ppo.config.algorithm_sections import (
    AdvantageSection,
    AlgorithmSection,
    LossSection,
    ScheduleSection,
    ValueLossSection,
)
from megatron_ppo.config.base import Section, setting
from megatron_ppo.config.model_sections import CriticSection, PolicySection
from megatron_ppo.config.system_sections import (
    ChaosSection,
    CheckpointSection,
    ClusterSection,
    CollectorSection,
    InferenceSection,
    RefitSection,
    RunSection,
    TelemetrySection,
    WatchdogSection,
)
from megatron_ppo.config.task_sections import Data, GateSection, RewardSection, ValidationSection


class RunConfig(Section):
    """Configuration of one run."""

    run: RunSection = setting(doc="Identity and length of the run.")
    schedule: ScheduleSection = setting(doc="Staleness.", default_factory=ScheduleSection)
    algorithm: AlgorithmSection = setting(doc="Batch sizes and masks.", default_factory=AlgorithmSection)
    advantage: AdvantageSection = setting(doc="Advantage estimation.", default_factory=AdvantageSection)
    loss: LossSection = setting(doc="Policy loss.", default_factory=LossSection)
    value_loss: ValueLossSection = setting(doc="Critic loss.", default_factory=ValueLossSection)
    policy: PolicySection = setting(doc="The trained policy.")
    critic: CriticSection = setting(doc="The value model.", default_factory=CriticSection)
    inference: InferenceSection = setting(doc="The vLLM group.")
    refit: RefitSection = setting(doc="Weight transfer.", default_factory=RefitSection)
    collector: CollectorSection = setting(doc="Generation control.", default_factory=CollectorSection)
    data: Data = setting(doc="Prompts.")
    reward: RewardSection = setting(doc="Reward function.", default_factory=RewardSection)
    validation: ValidationSection = setting(doc="Held-out scoring.", default_factory=ValidationSection)
    checkpoint: CheckpointSection = setting(doc="Saving.", default_factory=CheckpointSection)
    telemetry: TelemetrySection = setting(doc="Metrics and logs.", default_factory=TelemetrySection)
    cluster: ClusterSection = setting(doc="Processes and time limits.", default_factory=ClusterSection)
    watchdog: WatchdogSection = setting(
        doc="Deadlines of the stages of a step.", default_factory=WatchdogSection
    )
    gates: dict[str, GateSection] = setting(
        doc="Conditions on the finished run by name. A null in an overlay removes one.", default_factory=dict
    )
    chaos: ChaosSection = setting(doc="Fault injection.", default_factory=ChaosSection)

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_gates(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("gates"), dict | None):
            return values
        gates = values.get("gates") or {}
        return {**values, "gates": {name: gate for name, gate in gates.items() if gate is not None}}

    def resolved(self) -> dict[str, Any]:
        """Plain nested dict under the YAML names, for the run directory and the digest."""
        return self.model_dump(mode="json", by_alias=True)
