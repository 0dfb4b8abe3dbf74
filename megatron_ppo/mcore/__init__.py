"""Megatron-Core adapter: the policy and critic that the loop trains. The only package that knows `megatron.core`."""
