"""Streams and events: their order is kept by the library, which says where there is none."""

import torch

CUDA = 1  # c10::DeviceType::CUDA


def install(lib) -> None:
    stream, event = _stream_class(lib), _event_class(lib)

    def ids(device: int, number: int) -> tuple[int, int, int]:
        return number, device, CUDA

    def given(device: int | None) -> int:
        return lib.current_device() if device is None or device < 0 else device

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        lib.set_device(device_index)
        lib.stream_choose(device_index, stream_id)

    c = torch._C
    c._cuda_getCurrentStream = lambda d: ids(given(d), lib.stream_current(given(d)))
    c._cuda_getDefaultStream = lambda d: ids(given(d), 0)
    c._cuda_getCurrentRawStream = lambda d: lib.stream_current(given(d))
    c._cuda_setStream = set_stream
    c._cuda_synchronize = lambda: lib.device_synchronize(lib.current_device())
    c._CudaStreamBase, c._CudaEventBase = stream, event
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = stream, event


def _stream_class(lib) -> type:
    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **ids):
            if ids:
                return super().__new__(cls, **ids)
            index = torch.cuda._get_device_index(device, optional=True)
            return super().__new__(
                cls, stream_id=lib.stream_new(index), device_index=index, device_type=CUDA
            )

        def wait_event(self, event) -> None:
            event.wait(self)

        def wait_stream(self, stream) -> None:
            lib.stream_wait(
                self.device_index, self.stream_id, stream.device_index, stream.stream_id
            )

        def record_event(self, event=None):
            event = torch.cuda.Event() if event is None else event
            event.record(self)
            return event

        def query(self) -> bool:
            return lib.stream_poll(self.device_index, self.stream_id)

        def synchronize(self) -> None:
            lib.stream_synchronize(self.device_index, self.stream_id)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    return Stream


def _event_class(lib) -> type:
    class Event:
        def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
            self._event = lib.Event()

        def record(self, stream=None) -> None:
            stream = torch.cuda.current_stream() if stream is None else stream
            self._event.record(stream.device_index, stream.stream_id)

        def wait(self, stream=None) -> None:
            stream = torch.cuda.current_stream() if stream is None else stream
            self._event.wait(stream.device_index, stream.stream_id)

        def query(self) -> bool:
            return self._event.poll()

        def synchronize(self) -> None:
            self._event.synchronize()

    return Event
