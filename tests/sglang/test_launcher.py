"""An engine that a rank under torchrun starts."""

import time

from qurl_megatron.engines.sglang.starting_sglang import engine_launch
from qurl_megatron.fleet.process import EngineProcess, port_file, stop
from tests.sglang.engines import PYTHON, START_S, Case, start_of
from tests.support.models import tiny_checkpoint
from tests.support.runs import TORCHRUN


def test_an_engine_starts_under_torchrun(tmp_path, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    model = tiny_checkpoint(tmp_path / "model", "qwen2")
    port = port_file(tmp_path, "engine")
    start = start_of(model, Case("qwen2", "none"), "key", empty=True)
    launch = engine_launch(start, PYTHON, port)
    engine = EngineProcess("engine", launch, tmp_path)
    engine.start()
    try:
        end = time.monotonic() + START_S
        while engine.port() is None:
            assert engine.exited() is None, engine.exited()
            assert time.monotonic() < end, engine.last_line()
            time.sleep(0.1)
    finally:
        stop([engine], 10.0)
