import time

from tests.sglang.engines import Case, Server, checkpoints, servers

WATCHED_S = 3.0


def test_a_paused_engine_leaves_the_cores_to_the_trainer(tmp_path):
    case = Case("qwen2", "int8")
    (checkpoint,) = checkpoints(case, tmp_path, ["first"])
    with servers(lambda: Server(checkpoint.folder, case, tmp_path / "one")) as (server,):
        before = server.answers()
        server.client.pause()
        worked = seconds(server)
        time.sleep(WATCHED_S)
        worked = seconds(server) - worked
        server.client.flush()
        server.client.resume()
        assert server.answers() and before
        assert worked < 0.2 * WATCHED_S


def seconds(server) -> float:
    """Of CPU that all of an engine's processes have used."""
    times = [process.cpu_times() for process in server.processes()]
    return sum(each.user + each.system for each in times)
