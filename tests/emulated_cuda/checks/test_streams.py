"""Work on two streams needs an ordering edge wherever both touch the same bytes."""

import gc

import pytest
import torch

EMULATED = {"EMULATED_CUDA_RACES": "raise"}
RACE = "emulated CUDA: race"


@pytest.fixture(autouse=True)
def quiet():
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def on(stream):
    return torch.cuda.stream(stream)


def test_a_read_on_another_stream_without_an_edge_is_a_race():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.mul_(2)
    with on(side), pytest.raises(RuntimeError, match=RACE) as caught:
        x.sum()
    told = str(caught.value)
    for part in ("aten::sum", "aten::mul", f"stream {side.stream_id} of", "default", "16 bytes"):
        assert part in told, part


def test_a_write_over_what_another_stream_reads_is_a_race():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        y = x + 1
    with pytest.raises(RuntimeError, match=RACE):
        x.zero_()
    torch.cuda.current_stream().wait_stream(side)
    assert y.sum().item() == 8


def edges():
    main = torch.cuda.current_stream

    def by_stream(side):
        side.wait_stream(main())

    def by_event(side):
        event = torch.cuda.Event()
        event.record()
        side.wait_event(event)

    def by_event_of_the_current_stream(side):
        event = main().record_event()
        with on(side):
            event.wait()

    def by_generic_event(side):
        event = torch.Event("cuda")
        event.record(main())
        event.wait(side)

    def by_host_of_the_stream(side):
        main().synchronize()

    def by_host_of_the_event(side):
        main().record_event().synchronize()

    def by_query(side):
        assert main().query()

    def by_device(side):
        torch.cuda.synchronize()

    def by_item(side):
        torch.zeros(1, device="cuda").item()

    def through_a_third(side):
        third = torch.cuda.Stream()
        third.wait_stream(main())
        side.wait_stream(third)

    return [one for name, one in locals().items() if callable(one) and name != "main"]


@pytest.mark.parametrize("edge", edges(), ids=lambda edge: edge.__name__)
def test_every_kind_of_edge_orders(edge):
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    x.mul_(2)
    edge(side)
    with on(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    assert x.sum().item() == 12


def test_parts_of_one_storage_are_told_apart():
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[:4].mul_(2)
    with on(side):
        x[4:].mul_(3)
        with pytest.raises(RuntimeError, match=RACE):
            x[3:5].sum()


def test_backward_follows_the_streams_of_forward():
    x, side = torch.ones(4, device="cuda", requires_grad=True), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    (y * y).sum().backward()
    assert x.grad.tolist() == [8, 8, 8, 8]


def test_memory_handed_out_again_while_another_stream_uses_it_is_a_race():
    side = torch.cuda.Stream()
    x = torch.ones(1 << 18, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        x.sum()
    del x
    with pytest.raises(RuntimeError, match=RACE):
        torch.zeros(1 << 18, device="cuda")


def test_record_stream_keeps_memory_from_being_handed_out_again():
    side = torch.cuda.Stream()
    x = torch.ones(1 << 18, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        x.sum()
    x.record_stream(side)
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    del x
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before
    torch.zeros(1 << 18, device="cuda")
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < before
