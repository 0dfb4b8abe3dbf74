"""Jobs on mixture-of-experts models; see `jobs`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_ppo.mcore.settings import OptimizerSettings
from tests.functional.mcore import jobs

# Against every |gradient|, so that Adam's first step is the gradient times lr / epsilon.
EPSILON = 1e4
STEP_PER_GRADIENT = 100.0


def gradients(*, kind: str, folder: str, layout: jobs.Layout, **changes: Any) -> dict[str, Tensor]:
    """The unclipped gradient of one minibatch in the Hugging Face layout, read off one optimizer step.

    Adam is blind to the scale of a gradient unless its epsilon dwarfs it; then the step is proportional to it. That
    shows a wrongly scaled gradient of the experts, which have data-parallel groups of their own.
    """
    step = OptimizerSettings(lr=STEP_PER_GRADIENT * EPSILON, adam_eps=EPSILON, clip_grad=0.0)
    with jobs.context(layout) as parallel:
        model = jobs.build(kind, folder, parallel, optimizer=step, **changes)
        before = jobs.full_parameters(model)
        model.update([jobs.random_batch()])
        after = jobs.full_parameters(model)
        return {name: (before[name] - after[name]) / STEP_PER_GRADIENT for name in before}
