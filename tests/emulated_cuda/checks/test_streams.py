"""Work on two streams needs an ordering edge wherever both touch the same bytes."""

import pytest
import torch

RACE = "emulated CUDA: race"


def main() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def through_a_third(side) -> None:
    third = torch.cuda.Stream()
    third.wait_stream(main())
    side.wait_stream(third)


EDGES = {
    "stream": lambda side: side.wait_stream(main()),
    "event": lambda side: side.wait_event(main().record_event()),
    "host of the stream": lambda side: main().synchronize(),
    "host of the event": lambda side: main().record_event().synchronize(),
    "query": lambda side: main().query(),
    "device": lambda side: torch.cuda.synchronize(),
    "item": lambda side: torch.zeros(1, device="cuda").item(),
    "a third stream": through_a_third,
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_every_kind_of_edge_orders(edge):
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    x.mul_(2)
    edge(side)
    with torch.cuda.stream(side):
        x.add_(1)
    main().wait_stream(side)
    assert x.sum().item() == 12


def test_a_read_on_another_stream_without_an_edge_is_a_race():
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[:4].mul_(2)
    with torch.cuda.stream(side):
        x[4:].mul_(3)  # other bytes of the storage
        with pytest.raises(RuntimeError, match=RACE) as caught:
            x[3:5].sum()
    told = str(caught.value)
    for part in ("aten::sum", "aten::mul", f"stream {side.stream_id} of", "default", "32 bytes"):
        assert part in told, part


def test_a_write_over_what_another_stream_reads_is_a_race():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x + 1
    with pytest.raises(RuntimeError, match=RACE):
        x.zero_()


def test_backward_follows_the_streams_of_forward():
    x, side = torch.ones(4, device="cuda", requires_grad=True), torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        y = x * 2
    main().wait_stream(side)
    (y * y).sum().backward()
    assert x.grad.tolist() == [8, 8, 8, 8]


def test_memory_is_handed_out_again_once_the_streams_of_record_stream_are_done():
    side, active = torch.cuda.Stream(), "active_bytes.all.current"
    for recorded in (False, True):
        x = torch.ones(1 << 18, device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            x.sum()
        before = torch.cuda.memory_stats()[active]
        if recorded:
            x.record_stream(side)
            del x
            assert torch.cuda.memory_stats()[active] == before
            torch.zeros(1 << 18, device="cuda")
        else:
            del x
            with pytest.raises(RuntimeError, match=RACE):
                torch.zeros(1 << 18, device="cuda")
        torch.cuda.synchronize()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_stats()[active] < before
