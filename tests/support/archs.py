"""A small architecture, for tests that compute with sizes alone."""

from qurl_megatron.tensors.arch import Arch

BASE = Arch(
    family="qwen2",
    num_layers=8,
    hidden=24,
    heads=8,
    kv_heads=2,
    head_dim=4,
    intermediate=64,
    vocab=256,
    rms_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position=128,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
)
