"""Streams and events."""

import torch


def install(lib) -> None:
    cuda = 1  # c10::DeviceType::CUDA

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **ids):
            if ids:
                return super().__new__(cls, **ids)
            index = torch.cuda._get_device_index(device, optional=True)
            return super().__new__(cls, device=torch.device("cuda", index))

        def wait_event(self, event) -> None:
            pass

        def wait_stream(self, stream) -> None:
            pass

        def record_event(self, event=None):
            event = Event() if event is None else event
            event.record(self)
            return event

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def _as_parameter_(self):
            import ctypes

            return ctypes.c_void_p(self.cuda_stream)

        @staticmethod
        def priority_range():
            return (0, -5)

    class Event:
        """Knows when it was recorded."""

        def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
            self.timing, self.at = enable_timing, None

        def record(self, stream=None) -> None:
            import time

            self.at = time.perf_counter()

        def wait(self, stream=None) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end) -> float:
            assert self.timing and end.timing, "both events need enable_timing=True"
            return 1000 * (end.at - self.at)

    def ids(device: int, stream: int = 0):
        return stream, lib.current_device() if device is None or device < 0 else device, cuda

    chosen: dict[int, int] = {}
    c = torch._C
    c._cuda_getCurrentStream = lambda d: ids(d, chosen.get(ids(d)[1], 0))
    c._cuda_getDefaultStream = lambda d: ids(d)
    c._cuda_getCurrentRawStream = lambda d: chosen.get(d, 0)

    def set_stream(stream_id, device_index, device_type) -> None:
        lib.set_device(device_index)
        chosen[device_index] = stream_id

    c._cuda_setStream = set_stream
    c._CudaStreamBase, c._CudaEventBase = Stream, Event
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event
