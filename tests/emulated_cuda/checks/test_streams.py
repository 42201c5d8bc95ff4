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


def test_two_reads_are_no_race():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.sum()
    with on(side):
        x.sum()


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


def test_an_event_orders_only_what_came_before_its_record():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    event = torch.cuda.current_stream().record_event()
    x.mul_(2)
    side.wait_event(event)
    with on(side), pytest.raises(RuntimeError, match=RACE):
        x.sum()


def test_an_item_on_one_stream_does_not_wait_for_the_other():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with on(side):
        x.mul_(2)
    torch.zeros(1, device="cuda").item()
    with pytest.raises(RuntimeError, match=RACE):
        x.sum()


def test_parts_of_one_storage_are_told_apart():
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[:4].mul_(2)
    with on(side):
        x[4:].mul_(3)
        with pytest.raises(RuntimeError, match=RACE):
            x[3:5].sum()


def test_making_a_view_touches_nothing():
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.mul_(2)
    with on(side):
        assert x[1:3].t().unsqueeze(0).view(-1).shape == (2,)


def test_backward_follows_the_streams_of_forward():
    x, side = torch.ones(4, device="cuda", requires_grad=True), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    (y * y).sum().backward()
    assert x.grad.tolist() == [8, 8, 8, 8]


def test_copies_between_devices_order_the_current_streams_of_both():
    x = torch.ones(4, device="cuda:0")
    y = x.mul_(2).to("cuda:1")
    y.add_(1)
    x.zero_()  # after the copy, which ran on this stream
    assert y.sum().item() == 12


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


def test_memory_of_this_stream_must_be_waited_for_before_another_fills_it():
    side = torch.cuda.Stream()
    torch.ones(1 << 18, device="cuda").sum()
    again = torch.empty(1 << 18, device="cuda")  # the memory of the ones, perhaps still summed
    with on(side), pytest.raises(RuntimeError, match=RACE):
        again.fill_(1)


def test_streams_are_chosen_per_thread_and_device():
    side = torch.cuda.Stream(device=1)
    with on(side):
        assert torch.cuda.current_stream() == side and torch.cuda.current_device() == 1
        assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
    assert torch.cuda.current_device() == 0


def test_timing_needs_events_that_time():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    assert begin.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(torch.cuda.Event())
