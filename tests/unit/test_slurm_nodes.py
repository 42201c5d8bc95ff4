"""Reports of nodes, and their verdict; Slurm and NVIDIA's driver are stand-ins."""

import itertools
import json
import os
import re
import socket
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from qurl_megatron.cluster import examination, folder, links
from qurl_megatron.cluster.cluster import ClusterConfig, JobConfig, NodeConfig
from qurl_megatron.cluster.examination import GIB, Report, judge
from qurl_megatron.cluster.layout import lay_out
from qurl_megatron.cluster.verdict import Decision
from qurl_megatron.config.sections import ParallelConfig, RolloutConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.failures import FOLDER
from tests.support.programs import Programs
from tests.support.slurm_runs import submitted

INFINITE = float("inf")


def report(node: str, **changed) -> Report:
    sound = Report(node, [], 2, 2, product_ms=[1.5, 1.52], reduce_ms=0.9, link_ms=5.0)
    return replace(sound, **changed)


def of_devices(count: int) -> Report:
    return Report("", [], count, count, [1.5] * count, reduce_ms=0.25 * count)


ILL = {"faults": ["GPU 1 is ill"]}
ONE_GPU = {"gpus": 1, "devices": 1, "product_ms": [1.5]}
NO_DEVICE = {"devices": 0, "product_ms": [], "reduce_ms": None}
VERDICTS = {
    "sound": ({}, ""),
    "slower by a few per cent": ({"product_ms": [1.5, 1.7], "reduce_ms": 1.2}, ""),
    "ill": (ILL, "GPU 1 is ill"),
    "ill and hung": ({**ILL, "reduce_ms": INFINITE}, "GPU 1 is ill; an all-reduce among"),
    "a GPU is missing": (ONE_GPU, "2 GPUs were granted, the driver shows 1 and torch can use 1"),
    "no GPU for torch": (NO_DEVICE, "2 GPUs were granted, the driver shows 2 and torch can use 0"),
    "a slow GPU": (
        *({"product_ms": [1.5, 2.4]}, "a matrix product on GPU 1 takes 2.4 ms, 1.5 on the job's"),
    ),
    "a slow link": (
        *({"reduce_ms": 2.0}, "an all-reduce among its own devices takes 2 ms, 0.9 on the job's"),
    ),
    "a slow link to others": (
        *(
            {"link_ms": 8.0},
            "an all-reduce with either neighbour takes 8 ms, 5 on the job's others",
        ),
    ),
    "no way to others": (
        *({"link_ms": INFINITE}, "an all-reduce with either neighbour fails, or does not end"),
    ),
    "hung": (
        *({"reduce_ms": INFINITE}, "an all-reduce among its own devices fails, or does not end"),
    ),
}


@pytest.mark.parametrize(("changed", "sentence"), VERDICTS.values(), ids=VERDICTS)
def test_a_node_is_bad_for_what_it_says_alone_or_beside_the_others(changed, sentence):
    names = ("a1", "a2", "a3")
    bad = judge({name: report(name) for name in names} | {"a3": report("a3", **changed)}, names, 2)
    assert list(bad) == ["a3"] * bool(sentence) and bad.get("a3", "").startswith(sentence)


@pytest.mark.parametrize(
    ("reports", "gpus", "bad"),
    [
        ({"a1": report("a1"), "a2": None}, 2, {"a2": "it did not answer within job.examine_s"}),
        ({"a1": Report("a1", []), "a2": Report("a2", [])}, 8, {}),
        ({"a1": Report("a1", [], link_ms=9.0), "a2": Report("a2", [], link_ms=1.0)}, 8, {}),
        ({"a1": Report("a1", [], link_ms=INFINITE), "a2": Report("a2", [])}, 8, {}),
        ({name: Report(name, [], link_ms=INFINITE) for name in ("a1", "a2")}, 8, {}),
        ({"t1": of_devices(8), "r1": of_devices(2), "r2": of_devices(2)}, 2, {}),
    ],
    ids=[
        "no answer",
        "no driver anywhere",
        "CPUs",
        "one came late",
        "none gets through",
        "an all-reduce among other numbers of devices",
    ],
)
def test_nodes_are_compared_with_those_alike(reports, gpus, bad):
    assert judge({node: own for node, own in reports.items() if own}, [*reports], gpus) == bad


class NvmlError(Exception):
    pass


class NotSupported(NvmlError):
    pass


def nvml(count: int = 2, **answers) -> SimpleNamespace:
    """Stands in for nvidia-ml-py: the functions, constants and shapes of its 13.615."""

    def remapped(handle):
        if "remapped" not in answers:
            raise NotSupported
        return answers["remapped"]

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVMLError_NotSupported=NotSupported,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetRemappedRows=remapped,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, since: answers.get("ecc", 0),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(
            total=80 << 30, used=answers.get("used", 600 << 20)
        ),
    )


@pytest.mark.parametrize(
    ("answers", "faults"),
    [
        ({"used": 9 * GIB}, ["has 9.0 GiB in use already: end what holds them, or reset it"]),
        ({"ecc": 7}, ["has uncorrected memory errors: reset it"]),
        ({"remapped": (0, 3, 0, 1)}, ["has no spare rows for bad memory: have it replaced"]),
        ({"remapped": (0, 3, 1, 0)}, ["waits for a reset to replace a bad row of memory"]),
        ({"remapped": (0, 3, 0, 0)}, []),
        ({}, []),  # a kind that does not count errors
    ],
)
def test_what_the_driver_says_against_a_gpu_is_a_sentence(answers, faults):
    assert list(examination.gpu_faults(nvml(1, **answers), 0)) == faults


def test_of_a_node_that_hides_no_gpu_only_those_of_the_step_are_asked():
    env = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert examination.gpu_indices(nvml(8), env) == [4, 5]
    assert examination.gpu_indices(nvml(2), env) == [0, 1]  # the others are hidden


def test_without_a_driver_there_are_no_gpus():
    def missing() -> None:
        raise NvmlError("library not found")

    library = SimpleNamespace(NVMLError=NvmlError, nvmlInit=missing)
    assert examination.gpu_indices(library, {}) == []


def test_the_names_that_are_asked_for_are_those_of_the_library():
    pynvml = pytest.importorskip("pynvml")
    assert set(vars(nvml())) <= set(dir(pynvml))


@pytest.fixture
def own_report(tmp_path, capsys):
    def measure(*overrides: str) -> Report:
        assert examination.measure_node(submitted(tmp_path, *overrides)) == 0
        return Report(**json.loads(capsys.readouterr().out))

    return measure


def test_a_node_measures_itself(own_report, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    own = own_report()
    assert own.node == "a1" and judge({"a1": own}, ["a1"], 8) == {}


def test_a_gpu_that_cannot_be_measured_makes_its_node_bad(own_report, monkeypatch):
    def lost() -> int:
        raise RuntimeError("GPU is lost\nCUDA kernel errors might be reported elsewhere")

    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    library = SimpleNamespace(**vars(nvml()) | {"nvmlDeviceGetCount": lost})
    monkeypatch.setattr(examination, "_nvml", lambda: library)
    own = own_report()
    sentence = {"a1": "it could not be measured: RuntimeError: GPU is lost"}
    assert judge({"a1": own}, ["a1"], 2) == sentence
    assert judge({"a1": own, "a2": report("a2")}, ["a1", "a2"], 2) == sentence


@pytest.mark.parametrize(
    ("ends", "faults"),
    [
        ("exit 0", []),
        ("echo SGLang cannot compile >&2; exit 1", ["SGLang cannot compile"]),
        ("kill -9 $$", ["{python} ended with -9"]),
    ],
)
def test_a_node_whose_engines_could_compile_no_kernel_is_bad(
    ends, faults, own_report, monkeypatch, tmp_path
):
    torch = pytest.importorskip("torch")
    Programs(tmp_path, monkeypatch)("python", ends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(examination, "_product_ms", lambda device: 1.5)
    sglang = ("rollout.backend=sglang", f"rollout.sglang_python={tmp_path}/bin/python")
    own = own_report(*sglang)
    assert own.devices == 1
    assert own.faults == [fault.format(python=f"{tmp_path}/bin/python") for fault in faults]
    assert own_report(*sglang, "rollout.urls=['http://a:1']").faults == []  # not ours


@pytest.mark.parametrize("hangs", [True, False])
def test_an_all_reduce_that_hangs_or_fails_takes_for_ever(hangs, monkeypatch):
    torch = pytest.importorskip("torch")
    release = threading.Event()
    if not hangs:
        release.set()

    def all_reduce(parts) -> None:
        release.wait()
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", all_reduce)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    monkeypatch.setattr(examination, "REDUCE_S", 0.05)
    before = threading.enumerate()
    assert examination._reduce_ms([torch.device("cpu")] * 2) == INFINITE
    release.set()
    for thread in {*threading.enumerate()} - {*before}:
        thread.join()  # while nobody hears of its end
    assert examination._reduce_ms([torch.device("cpu")]) is None


def test_a_node_with_hung_devices_speaks_and_leaves_at_once(own_report, capsys, monkeypatch):
    def leave(code: int) -> None:
        raise SystemExit(code, capsys.readouterr().out)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(examination, "_measure", lambda name, *_: report(name, reduce_ms=INFINITE))
    with pytest.raises(SystemExit) as left:
        own_report()
    code, line = left.value.args
    assert code == 0 and json.loads(line)["reduce_ms"] == INFINITE


@pytest.mark.parametrize("count", range(2, 8))
def test_in_the_ring_every_node_is_in_two_pairs_and_in_none_twice_at_once(count):
    by_node = [links.pairs(own, count) for own in range(count)]
    for own, found in enumerate(by_node):
        turns = [turn for turn, *_ in found]
        assert turns == sorted({*turns}) and len(turns) == min(count - 1, 2)
        for pair in found:
            _, first, second = pair
            assert own in (first, second) and pair in by_node[first] and pair in by_node[second]


@pytest.fixture
def step_of_three(tmp_path, monkeypatch):
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", FOLDER: tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(links, "address_for_others", lambda one_node: "127.0.0.1")
    return tmp_path


def test_links_are_not_measured_where_a_node_has_not_come_in_time_or_stays_away(step_of_three):
    assert links.link_ms([], patience_s=0.0) is None
    links.announce({})
    for number in (0, 2):
        (step_of_three / f"node-{number}.json").write_text('{"devices": 0}')
    assert links._all_nodes(3, patience_s=60.0) == [{"devices": 0}, {}, {"devices": 0}]


def test_a_node_that_reaches_no_neighbour_takes_for_ever(step_of_three, monkeypatch):
    monkeypatch.setattr(links, "LINK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        entry = {"address": "127.0.0.1", "port": silent.getsockname()[1], "devices": 0}
        for number in (0, 2):
            (step_of_three / f"node-{number}.json").write_text(json.dumps(entry))
        assert links.link_ms([], patience_s=60.0) == INFINITE


@pytest.mark.parametrize(
    ("adapters", "lockable", "env", "remark"),
    [
        ([], -1, {}, "sockets between nodes, .*: there is no adapter in /sys/class/infiniband"),
        (["mlx5_0"], -1, {"NCCL_IB_DISABLE": "1"}, "sockets between nodes, .* NCCL_IB_DISABLE is"),
        (["mlx5_0"], -1, {}, "sockets between nodes, .*: libibverbs.* cannot be loaded"),
        ([], -1, {"NCCL_NET_PLUGIN": "aws-ofi"}, "^$"),
    ],
)
def test_why_nccl_takes_sockets_between_nodes_is_a_sentence(
    adapters, lockable, env, remark, monkeypatch
):
    monkeypatch.setattr(examination, "VERBS", "libibverbs-that-nobody-has.so.1")
    assert re.search(remark, examination.network_remark(adapters, lockable, env))


def test_too_little_memory_that_may_be_locked_is_a_sentence(monkeypatch):
    monkeypatch.setattr(examination, "VERBS", "libc.so.6")
    remark = examination.network_remark(["mlx5_0"], 8 << 20, {})
    assert remark.startswith("NCCL will fail between nodes: a process may lock 8192 KiB of memory")
    assert examination.network_remark(["mlx5_0"], -1, {}) == ""


LAYOUT = lay_out(ParallelConfig(), RolloutConfig(), NodeConfig())


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job on node a1 in which ``slurm(program, body)`` makes Slurm's programs."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1")
    make = Programs(tmp_path, monkeypatch)
    make("scontrol", '[ "$2" = hostnames ] && echo "$3" | tr , "\\n"; exit 0')
    return make


def examined(**options) -> dict[str, str]:
    return examination.examine(Path("run"), LAYOUT, ClusterConfig(), **options)


def test_nodes_are_asked_through_srun_and_a_greeting_is_passed_on(slurm, capfd):
    slurm("srun", f"echo welcome to a1; echo '{json.dumps(asdict(report('a1')))}'; echo '[]'")
    assert examined() == {}
    (srun,) = [line for line in slurm.called if line.startswith("srun --job-name=examine")]
    assert "--output" not in srun
    assert "--nodes=1 --ntasks-per-node=1 " in srun
    assert capfd.readouterr().out == "welcome to a1\n[]\n"


def test_a_remark_is_made_once_for_all_nodes_alike_and_makes_none_bad(slurm, capfd):
    remarks = [replace(report(name), remark="no adapter") for name in ("a2", "a1")]
    slurm("srun", "\n".join(f"echo '{json.dumps(asdict(own))}'" for own in remarks))
    assert examined() == {}
    assert capfd.readouterr().out == "qurl: a1, a2: no adapter\n"


def test_where_no_pair_gets_through_that_is_said_and_left_to_the_ranks(slurm, capfd):
    slurm("srun", f"echo '{json.dumps(asdict(report('a1', link_ms=INFINITE)))}'")
    assert examined() == {}
    assert "no two neighbouring nodes could reduce" in capfd.readouterr().out


def test_a_node_that_hangs_is_bad_when_its_time_is_up(slurm):
    slurm("srun", "exec sleep 60")
    assert examined(clock=itertools.count(step=JobConfig().examine_s).__next__).keys() == {"a1"}


def test_an_examination_that_fails_everywhere_is_no_nodes_fault(slurm, capfd):
    slurm("srun", "echo ImportError >&2; exit 1")
    assert examined() == {}
    printed = capfd.readouterr()
    assert "examine: ImportError" in printed.err
    assert "the examination of the nodes failed" in printed.out


def test_without_srun_it_is_one_sentence(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # the system's may have one
    slurm("scontrol", "echo a1")
    with pytest.raises(ConfigError, match="srun cannot be run: .*No such file"):
        examined()


def test_slurm_is_asked_about_the_job_without_the_nodes_and_those_before(slurm, tmp_path):
    script = "#SBATCH --nodes=2\n"
    folder.put(tmp_path / "slurm/job.sbatch", script)
    slurm("scontrol", 'case "$2" in hostnames) echo b9;; *) echo ExcNodeList=b9; esac')
    slurm("sbatch", f"cat > {tmp_path}/asked")
    examination.refuse_exclusion(tmp_path, 5, ["a1"])
    assert (tmp_path / "asked").read_text() == "#SBATCH --exclude=a1,b9\n#SBATCH --nodes=2\n"


def test_after_some_exclusions_it_is_not_the_nodes(tmp_path):
    for _ in range(examination.MOST_EXCLUSIONS):
        begun = folder.open_attempt(tmp_path, job=5)
        folder.write_attempt(tmp_path, replace(begun, decision=Decision.WITHOUT))
    with pytest.raises(ConfigError, match=r"were excluded 3 times already; .*/job\.log says"):
        examination.refuse_exclusion(tmp_path, 5, ["a1"])
