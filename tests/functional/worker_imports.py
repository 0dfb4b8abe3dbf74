"""What every worker of `worker_group` needs, imported once, in the process that they are forked from."""

from __future__ import annotations

import gc

import transformers.models.qwen2.modeling_qwen2  # noqa: F401

from megatron_ppo.mcore import platform

platform.install()
# The workers' full collections of garbage then leave it alone, see `worker_group`.
gc.collect()
gc.freeze()
