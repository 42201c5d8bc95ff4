"""What a rank finds in its environment, and what it makes of what launchers put there."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor import megatron
from qurl_megatron.kit import launch, place
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.undertaker import bury
from tests.support.leftovers import Footprint
from tests.support.waiting import PATIENCE_S, wait_until

SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123",
}


@pytest.fixture
def environment(monkeypatch):
    """An environment of its own, without a launcher's variables; nothing in it outlasts a test."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        plain.pop(name, None)
    for name in ("MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        plain.pop(name, None)
    monkeypatch.setattr(os, "environ", plain)
    return plain


def meet(folder: Path, told: multiprocessing.SimpleQueue, **env: str) -> None:
    """As a rank of an srun step; tells the sum over the ranks, and where they met."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({**SLURM, "GLOO_SOCKET_IFNAME": "lo", **env})
    assert place.place_under_launcher(2)
    with place.mustered(folder, key="train.run_dir"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
        mine = torch.tensor([float(env.get("VALUE", "1"))])
        dist.all_reduce(mine)
        at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        told.put((mine.item(), at))
        dist.barrier()
        dist.destroy_process_group()


def meet_all(folder: Path, ranks: list[dict[str, str]]) -> list[tuple[float, tuple[str, int]]]:
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    started = [context.Process(target=meet, args=(folder, told), kwargs=env) for env in ranks]
    for rank in started:
        rank.start()
    for rank in started:
        rank.join(PATIENCE_S)
        rank.kill()
    assert [rank.exitcode for rank in started] == [0] * len(ranks)
    return sorted(told.get() for _ in ranks)


def test_under_srun_two_steps_of_one_job_meet_in_one_folder_each_at_a_port_of_its_own(tmp_path):
    """As two jobs do whose runs, by mistake, share one: nothing of the others is ever read."""
    left = tmp_path / ".meet-123-1-0-0.json"  # by a step that was killed before Slurm's restart
    left.write_text('{"address": "127.0.0.1", "port": 1}')
    with socket.create_server(("127.0.0.1", 20_123)):  # where a port made of the job's id would be
        ranks = [
            {"SLURM_STEP_ID": step, "SLURM_PROCID": rank, "SLURM_RESTART_COUNT": "1", "VALUE": step}
            for rank in ("1", "0")
            for step in ("1", "7")
        ]
        (first, at), (same, also), (second, elsewhere), _ = meet_all(tmp_path, ranks)
    assert (first, same, second) == (2.0, 2.0, 14.0)
    assert at == also != elsewhere
    assert list(tmp_path.iterdir()) == [left]


def test_a_given_meeting_point_stays(environment, tmp_path):
    environment |= {**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "7"}
    assert place.place_under_launcher(2)
    with place.mustered(tmp_path, key="train.run_dir"):
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.9", "7")
    assert list(tmp_path.iterdir()) == []


def test_ranks_whose_folder_is_not_shared_are_told_so(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(place, "PATIENCE_S", 0.0)
    environment |= SLURM
    place.place_under_launcher(2)
    with (
        pytest.raises(ConfigError, match=r"\.meet-.* not visible .* set train.run_dir to a folder"),
        place.mustered(tmp_path, key="train.run_dir"),
    ):
        pass


@pytest.fixture
def network(monkeypatch):
    """A node that its /etc/hosts calls 127.0.1.1, with interfaces and routes as a test says."""

    def make(interfaces: dict[str, str], routes: dict[str, str], own: str | None = "127.0.1.1"):
        def look_up(name, *_, **__):
            if name != "node1" or own is None:
                raise OSError("no such name")
            return [(socket.AF_INET, 0, 0, "", (own, 0))]

        def own_address(goal):
            if goal not in routes:
                raise OSError("no route")
            return routes[goal]

        addresses = {}
        for name, address in {"lo": "127.0.0.1", **interfaces}.items():
            addresses[name] = [SimpleNamespace(family=socket.AF_INET, address=address)]
        monkeypatch.setattr(socket, "gethostname", lambda: "node1")
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(place, "own_address", own_address)

    return make


TWO = {"eth0": "10.0.0.5", "ib0": "10.9.0.5"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node0"}
OUT = {"192.0.2.1": "10.0.0.5"}
REACHED = {
    "towards rank 0's node": (TWO, {"node0": "10.9.0.5"}, "127.0.1.1", {}, "ib0"),
    "on rank 0's own node": (TWO, {"node0": "127.0.0.1", **OUT}, "127.0.1.1", {}, "eth0"),
    "no name, one interface": ({"ib0": "10.9.0.5"}, {}, None, {}, "ib0"),
    "one node": (TWO, OUT, "127.0.1.1", {"LOCAL_WORLD_SIZE": "2"}, None),
    "a name that others can use": (TWO, OUT, "10.0.0.5", {}, None),
    "the site's interface": (TWO, OUT, "127.0.1.1", {"GLOO_SOCKET_IFNAME": "ib7"}, "ib7"),
}


@pytest.mark.parametrize(
    ("interfaces", "routes", "own", "given", "chosen"), REACHED.values(), ids=REACHED
)
def test_a_node_that_calls_itself_a_loopback_is_reached_by_its_interface(
    interfaces, routes, own, given, chosen, environment, network
):
    network(interfaces, routes, own)
    environment |= {**TORCHRUN, **given}
    assert place.place_under_launcher(2)
    assert environment.get("GLOO_SOCKET_IFNAME") == chosen


@pytest.mark.parametrize(
    ("own", "given", "address"),
    [("10.0.0.5", "", "10.0.0.5"), (None, "", "10.9.0.5"), ("10.0.0.5", "ib0", "10.9.0.5")],
    ids=["its name's", "no name", "the interface of the site"],
)
def test_rank_0_tells_an_address_that_others_reach(own, given, address, environment, network):
    network(TWO, {"192.0.2.1": "10.9.0.5"}, own)
    environment["GLOO_SOCKET_IFNAME"] = given
    assert place.address_for_others(one_node=False) == address


def test_a_node_without_a_network_is_enough_for_ranks_of_its_own(environment, network):
    network({}, {})
    assert place.address_for_others(one_node=True) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"node1, resolves to 127.0.1.1.*GLOO_SOCKET_IFNAME"):
        place.address_for_others(one_node=False)


@pytest.mark.parametrize(
    "harmless", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"TORCHELASTIC_MAX_RESTARTS": "0"}]
)
def test_torchruns_restarts_need_a_store_for_each_attempt(harmless, environment, network):
    network({"eth0": "10.0.0.5"}, {}, own="10.0.0.5")
    environment |= {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(ConfigError, match=r"=3 keeps .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        place.place_under_launcher(2)
    environment |= harmless
    assert place.place_under_launcher(2)


def test_a_taken_meeting_point_is_one_sentence(environment, monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {**TORCHRUN, "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setitem(os.environ, name, value)
        environment["MASTER_PORT"] = port
        with pytest.raises(ConfigError, match=rf"port {port}, where the ranks .*set MASTER_PORT"):
            megatron._meet(torch.device("cpu"))


def write_environment(folder) -> int:
    dist.init_process_group("gloo")  # as the environment says
    assert dist.get_world_size() == 2
    heard = {
        one.laddr.ip
        for one in psutil.net_connections("tcp")
        if one.status == "LISTEN" and one.laddr.port == int(os.environ["MASTER_PORT"])
    }
    assert heard == {"127.0.0.1"}, heard
    dist.barrier()  # who leaves sooner hangs up on one that has not met all of them yet
    dist.destroy_process_group()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
    return 0


@pytest.fixture
def light(monkeypatch):
    """The fork server of this process, which the first test to need it starts, has torch alone."""
    monkeypatch.setattr(launch, "PRELOAD", ["torch.distributed"])


@pytest.mark.parametrize("gpus", [["/dev/nvidia0"], []], ids=["spawned", "forked"])
def test_ranks_share_the_cores_and_inherit_no_launcher(gpus, light, tmp_path, monkeypatch):
    monkeypatch.setattr(launch.glob, "glob", lambda _: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(10))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a launcher further out")
    try:
        assert launch.launch(write_environment, (tmp_path,), 2) == 0
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "TORCHELASTIC_RUN_ID" not in found
        assert (found["LOCAL_RANK"], found["GLOO_SOCKET_IFNAME"]) == (str(rank), "lo")
        if gpus:  # a fork server's children have the environment that it began with
            assert found["OMP_NUM_THREADS"] == "5"


NO_TORCH = """
import sys
from qurl_megatron.fleet import client
from qurl_megatron.kit import launch
from qurl_megatron.training import start
if __name__ == "__main__":
    launch.PRELOAD = []
    launch.glob.glob = lambda _: []
    assert launch.launch(int, (), 1) == 0
    assert "torch" not in sys.modules
"""


def test_what_only_starts_ranks_or_looks_at_engines_needs_no_torch(tmp_path):
    (tmp_path / "launcher.py").write_text(NO_TORCH)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(tmp_path / "launcher.py")], env=env, check=True)


IMPORTING = """
import sys
from qurl_megatron.kit import launch
if __name__ == "__main__":
    launch.PRELOAD = ["slow"]
    launch.glob.glob = lambda _: []
    try:
        launch.launch(int, (), 1)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_while_the_ranks_are_being_imported_is_heard_without_a_traceback(tmp_path):
    (tmp_path / "launcher.py").write_text(IMPORTING)
    (tmp_path / "slow.py").write_text("open('begun', 'w').close()\nimport time\ntime.sleep(600)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "launcher.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        wait_until(lambda: (tmp_path / "begun").exists() or launcher.poll() is not None)
        assert launcher.poll() is None
        os.killpg(launcher.pid, signal.SIGINT)
        said = launcher.communicate(timeout=PATIENCE_S)[1]  # until the fork server too has left
    assert (launcher.returncode, said) == (130, "")


def die_in_a_collective(number: int) -> int:
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    try:
        dist.barrier()
    except RuntimeError as error:
        launch.tell(f"a peer is gone: {error}")
        return 1
    return 0


def fail_alike(rank: str) -> int:
    dist.init_process_group("gloo")
    if os.environ["RANK"] == rank:
        launch.tell("qurl: data.path=/nowhere does not exist")
        os._exit(2)
    try:
        dist.barrier()
    except RuntimeError as error:
        launch.tell(str(error))
    return 1


def test_a_signal_that_is_repeated_behind_the_ranks_does_not_end_their_launcher():
    before, ending = {number: signal.getsignal(number) for number in launch.stopping()}, []
    signal.signal(signal.SIGTERM, lambda number, _frame: ending.append(number))
    try:
        with launch._forwarded([]) as passed:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert passed == {signal.SIGTERM} and not ending


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal_in_one_sentence(number, light, capfd):
    code = launch.launch(die_in_a_collective, (number,), 2, lost=lambda death: f"{death} today")
    assert code == 128 + number
    assert capfd.readouterr().err == f"qurl: rank 1 was killed by {number.name} today\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_on_any_rank_is_one_sentence(rank, light, capfd):
    assert launch.launch(fail_alike, (rank,), 2) == 2
    assert capfd.readouterr().err == "qurl: data.path=/nowhere does not exist\n"


def end_first_though_another_failed(aborted: bool, said: Path) -> int:
    if os.environ["RANK"] == "1":
        launch.tell("qurl: the GPU is out of memory")
        said.touch()
        time.sleep(0.2)
        os._exit(2)
    wait_until(said.exists)
    if aborted:
        os.abort()
    launch.tell("a peer is gone")
    os._exit(1)


@pytest.mark.parametrize("aborted", [True, False])
def test_the_first_to_say_why_gives_the_exit_code_whoever_ends_first(
    aborted, light, capfd, tmp_path
):
    """NCCL aborts ranks that waited; others fail because a peer is gone."""
    args = aborted, tmp_path / "said"
    assert launch.launch(end_first_though_another_failed, args, 2) == 2
    assert capfd.readouterr().err.endswith("qurl: the GPU is out of memory\n")


def fail_alone(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os._exit(fail_alike("0"))


def test_under_srun_too_a_mistake_is_one_sentence_and_no_frames_of_torch(capfd):
    """Rank 0 keeps the store there, and takes it along."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=fail_alone, args=(rank, port)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
    assert [rank.exitcode for rank in ranks] == [2, 1]
    assert capfd.readouterr().err == "qurl: data.path=/nowhere does not exist\n"


@pytest.fixture
def shared():
    """A folder in memory; the ranks of a test put files there, and are to take it with them."""
    folder = Path(tempfile.mkdtemp(prefix="qurl-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def settle_in(shared: Path, folder: Path) -> int:
    """Have all that a rank has: children in its group and in others, forked and not, and files."""
    if os.environ["RANK"] == "0":
        (shared / "bucket").write_text("weights")
        bury(shared)
    bury(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    subprocess.Popen(["sleep", "600"])
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
    return 0


LAUNCHER = """
import sys
from pathlib import Path
from qurl_megatron.actor import megatron
from qurl_megatron.kit import launch
from qurl_megatron.kit.undertaker import bury
from tests.support.leftovers import Footprint
from tests.unit.test_launch import settle_in
if __name__ == "__main__":
    launch.PRELOAD = ["tests.unit.test_launch"]
    launch.glob.glob = lambda _: sys.argv[1].split()
    sys.exit(launch.launch(settle_in, (Path(sys.argv[2]), Path(sys.argv[3])), 2))
"""


@pytest.fixture
def launched(request, shared, tmp_path):
    """The launcher of two ranks that have settled in, what is known of it, and the ranks."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    footprint = Footprint()
    env = {**footprint.env, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    arguments = [request.param, str(shared), str(tmp_path)]
    launcher = subprocess.Popen(
        [sys.executable, str(script), *arguments], env=env, stderr=subprocess.PIPE, text=True
    )
    paths = [tmp_path / "0", tmp_path / "1"]
    there = lambda: all(path.exists() and path.read_text() for path in paths)  # noqa: E731
    wait_until(
        lambda: there() or launcher.poll() is not None, 3 * PATIENCE_S
    )  # it imports Megatron
    assert there()
    # Launcher and ranks, and of each of these an undertaker and three children.
    assert len(footprint.look()) >= 1 + 2 * (1 + 1 + 3)
    yield launcher, footprint, [int(path.read_text()) for path in paths]
    for process in footprint.processes():
        process.kill()
    launcher.wait()


@pytest.mark.parametrize("launched", ["", "/dev/nvidia0"], ids=["forked", "spawned"], indirect=True)
def test_all_ends_with_a_launcher_that_is_killed(launched, shared):
    launcher, footprint, _ = launched
    launcher.kill()
    launcher.wait()
    assert footprint.left() == []
    assert not shared.exists()


@pytest.mark.parametrize(
    "launched",
    ["", pytest.param("/dev/nvidia0", marks=pytest.mark.thorough)],
    ids=["forked", "spawned"],
    indirect=True,
)
def test_all_ends_with_a_rank_that_is_killed(launched, shared):
    launcher, footprint, (rank, _) = launched
    os.kill(rank, signal.SIGKILL)
    assert launcher.communicate(timeout=PATIENCE_S)[1] == "qurl: rank 0 was killed by SIGKILL\n"
    assert launcher.returncode == 128 + signal.SIGKILL
    assert footprint.left() == []
    assert not shared.exists()


@pytest.mark.parametrize("launched", [""], ids=["forked"], indirect=True)
def test_all_ends_with_a_fork_server_that_is_killed(launched):
    launcher, footprint, (rank, _) = launched
    os.kill(psutil.Process(rank).ppid(), signal.SIGKILL)
    said = launcher.communicate(timeout=PATIENCE_S)[1]
    assert said.endswith(" was lost, for the process that forked it was killed\n")
    assert launcher.returncode == launch.NO_CODE
    assert footprint.left() == []
