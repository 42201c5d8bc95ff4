"""The trained models on Megatron-Core: policy, critic, reference, and the ranks that hold them."""

from qurl_megatron.config.env import keep_out_without_gpu

keep_out_without_gpu()  # before a module of this package imports Megatron
