"""Sections of the machinery: run, inference group, refit, collector, checkpoints, telemetry, cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from megatron_ppo.config.base import MAX_SEED, BuiltSection, Section, setting, target_field
from megatron_ppo.protocol.faults import FaultKind, FaultPlan


class RunSection(Section):
    """Identity and length of the run."""

    name: str = setting(
        doc="Name of the experiment; part of the run directory.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
    )
    seed: int = setting(42, "Seed that all randomness of the run is derived from.", ge=0, le=MAX_SEED)
    deterministic: bool = setting(
        False,
        "Weights and metrics are a function of the configuration, bit for bit, also through resumes: each step's "
        "requests are submitted together, in the order of the prompts, and run alone. Needs age 0, one engine and a "
        "CPU; costs the overlap of generation with validation and saves.",
    )
    max_num_steps: int = setting(doc="Training steps.", unit="steps", ge=1)
    max_num_epochs: int = setting(
        -1,
        "Passes over the training prompts. Only -1, endless, at every age: prompts are cycled until max_num_steps.",
        unit="epochs",
    )
    dir: str | None = setting(
        None, "Folder that holds the runs of this experiment. null is outputs/<run.name>."
    )
    resume: str = setting(
        "auto",
        "auto continues the newest unfinished run of this name and configuration, never starts a new one, a "
        "path continues that run.",
        min_length=1,
    )

    @property
    def directory(self) -> Path:
        """`dir`, or its default."""
        return Path(self.dir) if self.dir is not None else Path("outputs") / self.name


class InferenceSection(BuiltSection):
    """The dedicated vLLM group."""

    target: Literal["megatron_ppo.inference.engine.VllmEngine"] = target_field(
        "megatron_ppo.inference.engine.VllmEngine"
    )
    backend: Literal["vllm"] = setting("vllm", "Inference engine.")
    asynchronous: bool = setting(
        True, "vLLM's AsyncLLM. A synchronous engine cannot take weights while it runs."
    )
    colocated: bool = setting(
        False, "Share processes with the trainer. Generation and training could not overlap."
    )
    replicas: int = setting(1, "Engines.", unit="engines", ge=1)
    tensor_parallel_size: int = setting(1, "Ranks of one engine.", unit="ranks", ge=1)
    engine_core: Literal["process", "thread"] = setting(
        "process",
        "Where vLLM's EngineCore runs. thread starts faster on a CPU but cannot be killed on its own.",
    )
    temperature: float = setting(
        1.0, "Sampling temperature; the trainer divides its logits by the same.", gt=0.0
    )
    top_p: float = setting(1.0, "Must be 1: truncated sampling biases the importance weights.")
    top_k: int = setting(0, "Must be 0 (off), for the same reason.")
    max_new_tokens: int = setting(doc="Response limit.", unit="tokens", ge=1)
    max_model_len: int | None = setting(
        None,
        "Prompt + response limit of the engine. null is just enough, and one more for scoring.",
        unit="tokens",
        ge=1,
    )
    max_num_seqs: int = setting(64, "Requests that one engine runs at once.", unit="requests", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "Number format of the engine.")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = setting(
        "auto", "Number format of the KV cache. FP8 needs age 0: its scales belong to one weight version."
    )
    kv_cache_memory_bytes: int | None = setting(
        128 * 2**20,
        "Memory of the KV cache of one rank. null leaves it to vLLM, which takes nearly all of a GPU.",
        unit="bytes",
        ge=2**20,
    )
    enforce_eager: bool = setting(True, "No graph capture and no compilation; faster to start.")
    request_deadline_s: float = setting(
        120.0, "A group that takes longer is aborted and retried.", unit="s", gt=0.0
    )
    start_timeout_s: float = setting(600.0, "Longest start of an engine.", unit="s", gt=0.0)
    max_engine_restarts: int = setting(
        5,
        "How often an engine that died is built again in one process of the run; a further death ends the run. 0: the "
        "first one does.",
        unit="restarts of one engine",
        ge=0,
    )
    liveness_deadline_s: float = setting(
        30.0,
        "An engine is asked every few seconds for a sign of life, which its core and its workers give between two of "
        "their steps; not while weights are transferred. Longest wait for one answer; longer than any step, also the "
        "first ones, which may compile.",
        unit="s",
        gt=0.0,
    )
    liveness_misses: int = setting(
        3,
        "Unanswered questions in a row after which an engine hangs: its processes are killed, and it is built again "
        "like one that died. After a failed publication one is enough. 0 asks nothing.",
        unit="questions",
        ge=0,
    )
    engine: dict[str, JsonValue] = setting(doc="Further arguments of vLLM's engine.", default_factory=dict)

    def engine_kwargs(self, *, max_model_len: int) -> dict[str, Any]:
        """Constructor keywords of one engine besides the model folder.

        Args:
            max_model_len: the derived limit, in tokens.
        """
        names = (
            "dtype",
            "max_num_seqs",
            "tensor_parallel_size",
            "engine_core",
            "kv_cache_memory_bytes",
            "enforce_eager",
        )
        further = {**self.engine, "kv_cache_dtype": self.kv_cache_dtype}
        return {
            **self.model_dump(include=set(names)),
            "max_model_len": max_model_len,
            "extra_engine_args": further,
        }


class RefitSection(BuiltSection):
    """Making the inference weights equal the policy's."""

    target: Literal["megatron_ppo.refit.broadcast.BroadcastRefit"] = target_field(
        "megatron_ppo.refit.broadcast.BroadcastRefit"
    )
    backend: Literal["auto", "gloo", "nccl"] = setting(
        "auto", "Transport. auto is nccl on CUDA and gloo on a CPU."
    )
    bucket_bytes: int = setting(
        32 * 2**20,
        "Staging memory of the sender; a broadcast carries a half of it while the other half is filled.",
        unit="bytes",
        ge=1024,
    )
    verify_checksum: bool = setting(
        False, "Engines compare a 64-bit checksum of every tensor with the sender's before they load it."
    )
    timeout_s: float = setting(120.0, "Longest wait for any member of the group.", unit="s", gt=0.0)
    straggler_patience_s: float | None = setting(
        60.0,
        "How long a publication waits for an engine to pause while another one is ready. After that it goes on without "
        "the slow one, which takes no new requests, finishes those that run, and is given the then current version "
        "when it has paused; if it has not within refit.timeout_s, it is killed and built again. null waits for all.",
        unit="s",
        gt=0.0,
    )
    max_retries: int = setting(
        1,
        "Further attempts of a publication that failed or timed out, each over a fresh group; the engines stay paused. "
        "Attempts that an engine's death has broken are not counted.",
        unit="attempts",
        ge=0,
    )
    probe: bool = setting(True, "After each publish, compare engine and trainer log-probs on fixed tokens.")
    probe_tolerance_nats: float = setting(
        1e-4, "Largest difference that the probe allows.", unit="nats", gt=0.0
    )
    probe_sequences: int = setting(4, "Sequences that the probe scores.", unit="sequences", ge=1)


class CollectorSection(Section):
    """The process that keeps generating."""

    max_concurrent_groups: int | None = setting(
        None,
        "Groups in flight at once. null fills the engines: replicas * max_num_seqs / G.",
        unit="groups",
        ge=1,
    )
    max_retries: int = setting(
        2, "Further attempts for a group whose generation or scoring failed.", unit="attempts", ge=0
    )
    retry_backoff_s: float = setting(0.5, "Wait before the first retry; it doubles.", unit="s", ge=0.0)
    scorer_threads: int = setting(
        1,
        "Groups that may be scored at once; as many processes with reward.isolation=process.",
        unit="threads",
        ge=1,
    )
    scoring_deadline_s: float = setting(
        60.0, "Longest scoring of a group. With reward.isolation=process it is killed then.", unit="s", gt=0.0
    )


class CheckpointSection(Section):
    """When to save, and what to keep."""

    period: int = setting(
        10,
        "Completed steps between checkpoints; the last step is saved as well. 0 is none.",
        unit="steps",
        ge=0,
    )
    keep: int = setting(2, "Newest checkpoints to keep.", unit="checkpoints", ge=1)
    keep_best: int = setting(
        1, "Best checkpoints by `metric` to keep besides the newest.", unit="checkpoints", ge=0
    )
    metric: str | None = setting(
        "validation/accuracy",
        "Metric that ranks checkpoints. null ranks none.",
        pattern=r"^(train|validation)/.+$",
    )
    higher_is_better: bool = setting(True, "Whether a larger metric is better.")
    async_save: bool = setting(
        False,
        "Copy the models at the step boundary and write them while training goes on. Needs host memory for one copy "
        "of each rank's part until it is written.",
    )
    on_save_error: Literal["stop", "warn"] = setting(
        "stop",
        "When a checkpoint cannot be written (disk full): stop ends the run, warn says so and tries again after every "
        "step until it succeeds. The previous checkpoint stays valid either way.",
    )
    load_replay_buffer: bool = setting(
        True, "On resume, train on the stored groups; false generates them again."
    )
    drop_incomplete_targets_on_restore: bool = setting(
        False,
        "Only false: a resume completes the steps whose groups were partly stored. true would discard them.",
    )


class TelemetrySection(Section):
    """What is written and shown."""

    tensorboard: bool = setting(True, "Write TensorBoard events.")
    record_trajectories: bool = setting(False, "Append every trained trajectory to trajectories.jsonl.")
    display: Literal["auto", "live", "plain"] = setting(
        "auto", "Progress on rank 0. auto is live on a terminal, otherwise plain lines."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = setting("INFO", "Level of the log files.")


class ClusterSection(Section):
    """Processes, devices and the limits of every wait."""

    world_size: int | None = setting(
        None, "Trainer ranks. null is WORLD_SIZE as torchrun sets it.", unit="ranks", ge=1
    )
    model_cache_dir: str = setting(
        "~/.cache/megatron_ppo/models", "Folder of the models that recipes prepare."
    )
    node_ip_address: str = setting(
        "127.0.0.1", "Address that the refit group listens on. Engines on other hosts must reach it."
    )
    ray_address: str | None = setting(
        None,
        "host:port of a Ray cluster that stands already, for engines on other hosts: they take its GPUs. null starts "
        "one for this run, on loopback, with the GPUs that the trainer ranks of this host leave.",
        pattern=r"^[^\s:]+:[0-9]+$",
    )
    offload_models: Literal["auto", "always", "never"] = setting(
        "auto",
        "Keep policy and critic in host memory except while they are used, so that they share the trainer's GPUs. "
        "auto is always on CUDA and never on a CPU, where it would only copy.",
    )
    object_store_bytes: int = setting(128 * 2**20, "Ray's object store.", unit="bytes", ge=80 * 2**20)
    process_group_timeout_s: float = setting(
        600.0, "Longest collective between trainer ranks.", unit="s", gt=0.0
    )
    prepare_timeout_s: float = setting(
        900.0, "Longest preparation of the initial model by rank 0.", unit="s", gt=0.0
    )
    groups_timeout_s: float = setting(
        600.0, "Longest wait of the learner for a step's groups.", unit="s", gt=0.0
    )
    shutdown_timeout_s: float = setting(
        30.0, "Longest orderly stop of a part before it is killed.", unit="s", gt=0.0
    )


class WatchdogSection(Section):
    """How long a stage of the training loop may last before the run is taken for stuck.

    A stage that lasts longer ends the run with a diagnosis: the signs of life of every process, the open prompts and
    the stacks. The wait for groups has its limit in cluster.groups_timeout_s.
    """

    enabled: bool = setting(True, "Whether stuck stages end the run.")
    scoring_s: float = setting(
        1800.0, "Longest pass over a step's batch: values, log-probs or advantages.", unit="s", gt=0.0
    )
    training_s: float = setting(3600.0, "Longest epoch of one model.", unit="s", gt=0.0)
    refit_s: float = setting(
        1800.0, "Longest transfer of new weights, with its probe and repetitions.", unit="s", gt=0.0
    )
    validation_s: float = setting(1800.0, "Longest validation.", unit="s", gt=0.0)
    checkpoint_s: float = setting(3600.0, "Longest save.", unit="s", gt=0.0)
    other_s: float = setting(1800.0, "Longest time between these.", unit="s", gt=0.0)


class ChaosSection(Section):
    """Faults that the run injects into itself, to prove that it survives them. All off; not for real training.

    The same seed strikes the same events. A kind that is on has to happen at least once, or the run fails.
    """

    seed: int = setting(0, "Seed of the decisions which events are struck.", ge=0, le=MAX_SEED)
    kill_engine: float = setting(
        0.0, "Rate per step: kill the process of an engine while it generates.", ge=0.0, le=1.0
    )
    fail_generation: float = setting(0.0, "Rate per attempt: lose the responses to a prompt.", ge=0.0, le=1.0)
    hang_reward: float = setting(
        0.0,
        "Rate per attempt: the reward function does not return. Needs reward.isolation=process; each costs "
        "collector.scoring_deadline_s.",
        ge=0.0,
        le=1.0,
    )
    raise_reward: float = setting(0.0, "Rate per attempt: the reward function raises.", ge=0.0, le=1.0)
    delay_refit_s: float = setting(
        0.0, "Hold up every publication for up to so long, the engines paused.", unit="s", ge=0.0
    )
    fail_refit: float = setting(
        0.0, "Rate per attempt: a publication fails after all bytes have arrived.", ge=0.0, le=1.0
    )

    def plan(self) -> FaultPlan:
        """The decisions."""
        rates = {kind: float(getattr(self, kind.config_key)) for kind in FaultKind}
        rates[FaultKind.DELAY_REFIT] = float(self.delay_refit_s > 0.0)
        return FaultPlan(seed=self.seed, rates=rates, max_refit_delay_s=self.delay_refit_s)
