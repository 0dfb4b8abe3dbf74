"""vLLM's parameters of the two kinds of requests: sampling a response, and scoring a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from megatron_ppo.protocol.trajectory import SamplingSettings


def sampling_params(
    sampling: SamplingSettings, *, seed: int, stop_token_ids: Sequence[int]
) -> SamplingParams:
    """One response, token ids and log-probs only, at its end."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        seed=seed,
        logprobs=0,
        stop_token_ids=list(stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Log-probs of a prompt's own tokens at temperature 1, computed afresh."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
