"""What the Megatron workers run for tests of checkpoints and of where a critic starts. See `jobs`."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.loop.checkpoint_folder import FORMAT_VERSION, INFO_FILE, CheckpointFolder, Retention
from megatron_ppo.mcore import checkpoint as checkpoint_module
from megatron_ppo.mcore import platform
from megatron_ppo.mcore.checkpoint import SUBFOLDER, ModelCheckpoints, load_models, load_weights, save_models
from megatron_ppo.mcore.critic import MegatronCritic
from megatron_ppo.mcore.parallel import ParallelContext, distributed_runtime
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.mcore.settings import OptimizerSettings, SchedulerSettings
from megatron_ppo.protocol.errors import CheckpointError, ConfigError
from tests.functional.mcore.jobs import (
    SHAPE,
    Layout,
    adam_steps,
    build,
    context,
    full_parameters,
    random_batch,
    scored,
    settings,
)


def make_reward_model(*, folder: str, kind: str) -> None:
    """A random Qwen2 with one label: `TokenClassification` has a bias in its head, `SequenceClassification` none."""
    import transformers

    config = transformers.Qwen2Config(**SHAPE, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, f"Qwen2For{kind}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(4.0)
    model.save_pretrained(folder)


def value_difference(*, folder: str, layout: Layout) -> dict[str, float]:
    """Largest |difference| of the critic's values to transformers' scores of the tokens before; and their size."""
    import transformers
    from transformers.modeling_outputs import ModelOutput

    with context(layout) as parallel:
        batch = random_batch()
        mine = MegatronCritic(parallel=parallel, **settings(folder)).values(batch)
        config = transformers.AutoConfig.from_pretrained(folder)
        model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            hidden: ModelOutput = model.model(input_ids=batch.token_ids_BT)
            scores_BT: Tensor = model.score(hidden.last_hidden_state)[..., 0]
        theirs = torch.where(batch.response_mask_BT, scores_BT.roll(1, dims=1), 0.0)
        return {"difference": float((mine - theirs).abs().max()), "size": float(theirs.abs().max())}


def policy_error(*, folder: str) -> str:
    """The message that a policy refuses the folder with."""
    with context({}) as parallel:
        try:
            MegatronPolicy(parallel=parallel, **settings(folder))
        except ConfigError as error:
            return str(error)
    return "no error"


def head_error(*, folder: str, changes: dict[str, Any]) -> str:
    """The message that a critic refuses the folder with, after tensors of its file were replaced or dropped (None)."""
    from safetensors.torch import load_file, save_file

    path = Path(folder) / "model.safetensors"
    kept = {name: tensor for name, tensor in {**load_file(path), **changes}.items() if tensor is not None}
    save_file(kept, path)
    with context({}) as parallel:
        try:
            MegatronCritic(parallel=parallel, **settings(folder))
        except ConfigError as error:
            return str(error)
    return "no error"


STEPS = 2


def pair(folder: str, layout: Layout, **changes: Any) -> dict[str, MegatronPolicy | MegatronCritic]:
    """Policy and critic in one layout."""
    parallel = ParallelContext.create(**layout, timeout_s=60.0)  # type: ignore[arg-type]
    return {kind: build(kind, folder, parallel, **changes) for kind in ("policy", "critic")}


def train_on(models: dict[str, Any], *, first: int, steps: int = STEPS) -> list[dict[str, float]]:
    """`steps` updates of every model; the batches are those of the steps from `first` on."""
    batches = [random_batch(seed=first + step) for step in range(steps)]
    return [model.update([batch]) for batch in batches for model in models.values()]


def outcome(models: dict[str, Any], metrics: list[dict[str, float]]) -> dict[str, Any]:
    """What two ways to the same step must agree on."""
    return {
        "metrics": metrics,
        "parameters": {name: full_parameters(model) for name, model in models.items()},
        "scores": {name: scored(model, random_batch()) for name, model in models.items()},
        "adam_steps": sorted({step for model in models.values() for step in adam_steps(model)}),
    }


def uninterrupted(*, folder: str, layout: Layout, **changes: Any) -> dict[str, Any]:
    """Two steps, then two more."""
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, layout, **changes)
        train_on(models, first=0)
        return outcome(models, train_on(models, first=STEPS))


def save_after_two(*, folder: str, checkpoint: str, layout: Layout, **changes: Any) -> str:
    """Two steps, then a save; the parameters' digest, which the save must not change."""
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, layout, **changes)
        train_on(models, first=0)
        before = models["policy"].parameters_hash()
        save_models(Path(checkpoint), models)
        assert models["policy"].parameters_hash() == before
        return before


def resume_each(
    *, folder: str, checkpoints: list[str], layout: Layout, **changes: Any
) -> list[dict[str, Any]]:
    """Load each checkpoint into models that have been elsewhere, and take two more steps."""
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, layout, **changes)
        train_on(models, first=90, steps=1)
        results = []
        for checkpoint in checkpoints:
            load_models(Path(checkpoint), models)
            results.append(outcome(models, train_on(models, first=STEPS)))
        return results


def drawn() -> dict[str, list[float]]:
    """The next numbers of this rank's generators: torch's, and Megatron's of its own for each tensor rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numbers = {"torch": torch.rand(4).tolist()}
    with get_cuda_rng_tracker().fork():
        numbers["tensor rank"] = torch.rand(4, device=platform.device()).tolist()
    return numbers


def save_in_background(*, folder: str, checkpoints: dict[str, str], layout: Layout) -> dict[str, Any]:
    """Saves of one step, at once and in the background, the latter held back until the models have moved on."""
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, layout)
        train_on(models, first=0)
        torch.manual_seed(1000 + dist.get_rank())
        drawn()  # neither generator is where a seed puts it
        store = ModelCheckpoints(models)
        for path in checkpoints.values():
            Path(path).mkdir(exist_ok=True)
        dist.barrier()
        store.save(Path(checkpoints["synchronous"]))
        may_write = threading.Event()
        with held_back(may_write):
            save = store.begin_save(Path(checkpoints["background"]))
            next_drawn = drawn()
            train_on(models, first=50)
            early = save.is_written()
            files_early = sorted(path.name for path in Path(checkpoints["background"]).rglob("*.distcp"))
            dist.barrier()
            may_write.set()
            deadline = time.monotonic() + 60.0
            while not save.is_written() and time.monotonic() < deadline:
                time.sleep(0.05)
            late = save.is_written()
            save.finish()
        results, drawn_again = {}, {}
        for name, path in checkpoints.items():
            store.load(Path(path))
            drawn_again[name] = drawn()
            results[name] = outcome(models, train_on(models, first=STEPS))
        return {
            "results": results,
            "early": early,
            "files_early": files_early,
            "late": late,
            "drawn": next_drawn,
            "drawn_again": drawn_again,
        }


@contextmanager
def held_back(may_write: threading.Event) -> Iterator[None]:
    """Writers wait for the event before each file."""
    original = platform.write_checkpoint_bucket

    def waiting(writer: Any, bucket: Any) -> list[Any]:
        assert may_write.wait(60.0)
        return original(writer, bucket)

    platform.write_checkpoint_bucket = waiting
    try:
        yield
    finally:
        platform.write_checkpoint_bucket = original


def save_error(
    *, folder: str, checkpoint: str, layout: Layout, in_background: bool, longest_file: int | None
) -> str:
    """The message of a save that has no room; the parameters are left alone.

    Args:
        longest_file: bytes at which the kernel cuts this process's files meanwhile.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, layout)
        store = ModelCheckpoints(models)
        before = models["policy"].parameters_hash()
        try:
            if longest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, limits[1]))
            if in_background:
                store.begin_save(Path(checkpoint)).finish()
            else:
                store.save(Path(checkpoint))
        except CheckpointError as error:
            assert models["policy"].parameters_hash() == before
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "no error"


def load_errors(*, folder: str, checkpoints: dict[str, str], layout: Layout) -> dict[str, str]:
    """Messages of CheckpointError, by checkpoint, and whether the models were left alone."""
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, layout)
        before = models["policy"].parameters_hash()
        messages = {}
        for name, checkpoint in checkpoints.items():
            try:
                load_models(Path(checkpoint), models)
                messages[name] = "no error"
            except CheckpointError as error:
                messages[name] = str(error)
            now = models["policy"].parameters_hash()
            # What is inside a file is only seen while it is read, tensor by tensor.
            assert now == before or name == "shard garbled", name
            before = now
        return messages


def with_other_tensors(*, folder: str, checkpoint: str) -> None:
    """A checkpoint that says of itself what ours says, and whose tensors are not ours."""
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, {})
        described = checkpoint_module._descriptions(models)
        original = checkpoint_module._template

        def renamed(name: str, trained: Any, *, loading: bool) -> dict[str, Any]:
            from megatron.core.dist_checkpointing.dict_utils import nested_values
            from megatron.core.dist_checkpointing.mapping import ShardedTensor

            state = original(name, trained, loading=loading)
            for value in nested_values(state):
                if isinstance(value, ShardedTensor):
                    value.key = value.key.replace("final_layernorm", "last_norm")
            return state

        checkpoint_module._template = renamed
        try:
            save_models(Path(checkpoint), models)
        finally:
            checkpoint_module._template = original
        assert described == checkpoint_module._descriptions(models)


def resume_without(*, folder: str, checkpoint: str, handling: str) -> dict[str, Any]:
    """Save and resume while one of our answers to torch's AdamW is taken away ("" takes none): result or error."""
    from megatron_ppo.mcore import optimizer as optimizer_module

    @contextmanager
    def untouched(chained: Any) -> Iterator[None]:
        yield

    taken: dict[str, tuple[Any, str, Any]] = {
        "initialise_adam_state": (optimizer_module, "initialise_adam_state", lambda optimizer: None),
        "keeping_adam_step": (checkpoint_module, "_keeping_adam_step", untouched),
        "separate_adam_steps": (checkpoint_module, "_separate_adam_steps", lambda optimizer: None),
    }
    originals = []
    if handling:
        module, name, replacement = taken[handling]
        originals.append((module, name, getattr(module, name)))
        setattr(module, name, replacement)
    try:
        with distributed_runtime(timeout_s=60.0):
            models = pair(folder, {})
            # A policy that was never stepped, as after a critic warm-up.
            models["critic"].update([random_batch(seed=0)])
            save_models(Path(checkpoint), models)
            expected = outcome(models, train_on(models, first=STEPS))
            fresh = pair(folder, {})
            load_models(Path(checkpoint), fresh)
            return {"expected": expected, "seen": outcome(fresh, train_on(fresh, first=STEPS)), "error": ""}
    except (AssertionError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def leave_critic(*, folder: str, run: str, value: float) -> None:
    """Train a critic until its values are near `value`, and save it as step 1 of a run, as a run saves one."""
    with distributed_runtime(timeout_s=60.0):
        models = pair(folder, {})
        critic = MegatronCritic(
            parallel=ParallelContext.create(timeout_s=60.0),
            **settings(
                folder,
                optimizer=OptimizerSettings(lr=1e-2),
                scheduler=SchedulerSettings(lr_decay_steps=100),
                train_micro_batch_size=8,
            ),
        )
        models["critic"] = critic
        for step in range(40):
            batch = random_batch(seed=step)
            returns_BT = torch.where(batch.response_mask_BT, value, 0.0)
            critic.update([batch.replace(returns_BT=returns_BT)])
        checkpoints = CheckpointFolder(Path(run) / "checkpoints")
        checkpoints.begin(1)
        save_models(checkpoints.temporary(1) / SUBFOLDER, models)
        info = {
            "format_version": FORMAT_VERSION,
            "step": 1,
            "weight_version": 0,
            "identity": {},
            "metric": None,
            "metric_value": None,
            "prompts": {},
        }
        (checkpoints.temporary(1) / INFO_FILE).write_text(json.dumps(info))
        checkpoints.seal(1)
        checkpoints.publish(1, Retention(keep=1, keep_best=0, metric=None, higher_is_better=True))


def warm_start(*, folder: str, checkpoint: str, layout: Layout, **changes: Any) -> dict[str, Any]:
    """A critic before and after it took over the weights of a checkpoint's, and after one step of its own."""
    with distributed_runtime(timeout_s=60.0):
        parallel = ParallelContext.create(**layout, timeout_s=60.0)  # type: ignore[arg-type]
        critic = MegatronCritic(parallel=parallel, **settings(folder, **changes))
        before = critic.values(random_batch())
        load_weights(Path(checkpoint), "critic", critic)
        after, parameters = critic.values(random_batch()), full_parameters(critic)
        metrics = critic.update([random_batch(seed=7)])
        return {
            "before": before,
            "after": after,
            "parameters": parameters,
            "lr": metrics["train/critic/lr"],
            "adam_steps": adam_steps(critic),
            "values": critic.values(random_batch()),
        }
