"""Tokens travel to experts by the library that the recipe names, or the recipe is refused.

The library needs GPUs, so no token travels here.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from qurl_megatron.actor.build import transformer_config
from qurl_megatron.config import ModelConfig, ParallelConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Experts
from tests.support.archs import BASE

ARCH = {**vars(BASE), "experts": Experts(count=8, top_k=2, intermediate=8, norm_topk_prob=True)}
BOTH = SimpleNamespace(Buffer=None, HybridEPBuffer=None)


def built(dispatcher: str, expert: int = 2):
    parallel = ParallelConfig(expert=expert, data=2, expert_dispatcher=dispatcher)
    return transformer_config(type(BASE)(**ARCH), ModelConfig(path="model"), parallel)


@pytest.mark.parametrize("dispatcher", ["deepep", "hybridep"])
def test_megatron_is_told_the_library(dispatcher, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "deep_ep", BOTH)
    config = built(dispatcher)
    assert config.moe_token_dispatcher_type == "flex"
    assert config.moe_flex_dispatcher_backend == dispatcher


def test_without_one_tokens_are_sent_all_to_all_where_experts_are_dealt():
    assert built("alltoall").moe_token_dispatcher_type == "alltoall"
    assert built("alltoall", expert=1).moe_token_dispatcher_type == "allgather"


@pytest.mark.parametrize(
    ("gpu", "library", "message"),
    [
        (False, BOTH, "hybridep needs GPUs, and there is none; leave it out"),
        (True, None, "hybridep needs the library deep_ep"),
        (True, SimpleNamespace(Buffer=None), "needs HybridEPBuffer of the library deep_ep"),
    ],
)
def test_a_machine_that_lacks_something_is_refused(gpu, library, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    with pytest.raises(ConfigError, match=message):
        built("hybridep")
