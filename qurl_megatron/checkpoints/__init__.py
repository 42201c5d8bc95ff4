"""Checkpoints of Hugging Face and Megatron: a table of invertible ops, the UAQ fold, conversion."""
