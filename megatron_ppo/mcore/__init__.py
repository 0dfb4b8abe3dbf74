"""Megatron-Core adapter: the policy and critic that the loop trains. Only here is `megatron.core` known."""
