"""Captures refuse to wait and run nothing; replays run what was captured, where it was captured."""

import pytest
import torch

EMULATED = {"EMULATED_CUDA_POISON": "1"}


def captured(body, **options) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        body()
    return graph


def test_a_capture_runs_nothing_and_each_replay_all_of_it():
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    results = []

    def body() -> None:
        doubled = 2 * x
        total.add_(doubled.view(3))
        results.append(doubled + 1)

    graph = captured(body)
    assert total.tolist() == [0, 0, 0]
    assert results[0].isnan().all()
    graph.replay()
    x.fill_(5)  # in place: the next replay sees it
    graph.replay()
    assert total.tolist() == [12, 12, 12]
    assert results[0].tolist() == [11, 11, 11]


def test_a_tensor_that_took_the_place_of_a_captured_one_is_not_seen():
    held, out = {"weight": torch.ones(2, device="cuda")}, torch.zeros(2, device="cuda")
    graph = captured(lambda: out.copy_(held["weight"]))
    held["weight"] = torch.full((2,), 7.0, device="cuda")
    graph.replay()
    assert out.tolist() == [1, 1]


WAITS = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "cpu": lambda x: x.cpu(),
    "upload": lambda x: x.copy_(torch.ones(3)),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "device": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("case", WAITS)
def test_a_capture_refuses_what_makes_the_host_wait(case):
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing|not permitted"):
        captured(lambda: WAITS[case](x))
    assert not torch.cuda.is_current_stream_capturing()
    assert x.sum().item() == 3  # waiting is allowed again


def test_the_default_stream_cannot_be_captured():
    with pytest.raises(RuntimeError, match="non-default stream"):
        captured(lambda: None, stream=torch.cuda.default_stream())


def test_a_pool_is_shared_and_gone_with_its_last_graph():
    x, pool = torch.ones(3, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [captured(lambda: x.add_(1), pool=pool) for _ in range(2)]
    assert graphs[0].pool() == graphs[1].pool()
    del graphs
    with pytest.raises(RuntimeError, match="are gone"):
        captured(lambda: x.add_(1), pool=pool)
