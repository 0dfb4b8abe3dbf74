"""Configuration: Hydra composes, pydantic decides, `_target_` builds. No torch, ray, vllm."""
