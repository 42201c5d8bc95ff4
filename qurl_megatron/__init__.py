"""QuRL on Megatron-Core: reinforcement learning of LLMs with quantized rollouts."""

__version__ = "0.1.0"
