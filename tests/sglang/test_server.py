"""The server process: it ends with whoever started it."""

import psutil

from tests.sglang.engines import Case, Server, checkpoints, servers
from tests.waiting import PATIENCE_S


def test_when_standard_input_closes_every_process_of_the_server_ends(tmp_path):
    case = Case("llama", "none")
    (version,) = checkpoints(case, tmp_path, ["first"])
    with servers(lambda: Server(version.folder, case, tmp_path / "server")) as (server,):
        running = server.processes()
        assert len(running) > 2
        running[-1].suspend()  # a stuck one goes too
        server.popen.stdin.close()
        _, alive = psutil.wait_procs(running[1:], timeout=PATIENCE_S)
        server.popen.wait(PATIENCE_S)
    assert not alive
