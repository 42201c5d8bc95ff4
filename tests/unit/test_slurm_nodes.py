"""What nodes say of themselves, and what is made of it; Slurm and NVIDIA's driver are stand-ins."""

import json
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qurl_megatron.cli import main
from qurl_megatron.config.sections import ParallelConfig, RolloutConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.slurm import examination, folder, gpus, measure
from qurl_megatron.slurm.addresses import reachable
from qurl_megatron.slurm.bad_nodes import GIB, Report, judge
from qurl_megatron.slurm.cluster import ClusterConfig, JobConfig, NodeConfig
from qurl_megatron.slurm.examination import Found, tell_apart
from qurl_megatron.slurm.gpus import GpuState
from qurl_megatron.slurm.layout import lay_out
from qurl_megatron.slurm.measure import as_json, from_json
from tests.programs import Programs

# -- the verdict -----------------------------------------------------------------------------------

SOUND = GpuState(0, 0, 600 << 20, 0, remap_failed=False, remap_pending=False, clock=1980)


def report(node: str, **changed) -> Report:
    said = Report(
        node=node,
        at=1000.0,
        gpus=[replace(SOUND, index=index) for index in range(2)],
        devices=2,
        product_ms=[1.5, 1.52],
        reduce_ms=0.9,
        shm=100 * GIB,
        tmp=100 * GIB,
        heard_at=1000.3,
    )
    return replace(said, **changed)


def judged(**changed) -> dict[str, str]:
    """Of three nodes, of which the last says something else."""
    names = ("a1", "a2", "a3")
    reports = {name: report(name) for name in names} | {"a3": report("a3", **changed)}
    return judge(reports, dict.fromkeys(names, 2))


def with_gpu(**changed) -> dict:
    return {"gpus": [SOUND, replace(SOUND, index=1, **changed)]}


def test_sound_nodes_are_not_bad():
    assert judged() == {}
    assert judged(product_ms=[1.5, 1.7], reduce_ms=1.2, **with_gpu(clock=1755)) == {}


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (with_gpu(processes=1, used=9 * GIB), "GPU 1 is in use by another process: end it there"),
        (with_gpu(used=9 * GIB), "GPU 1 has memory in use that no process owns: reset it"),
        (with_gpu(uncorrected=2), "GPU 1 has uncorrected memory errors: reset it"),
        (with_gpu(remap_failed=True), "GPU 1 has no spare rows for bad memory: have it replaced"),
        (with_gpu(remap_pending=True), "GPU 1 waits for a reset to replace a bad row of memory"),
        (with_gpu(held_back=("heat",), clock=900), "GPU 1 is held back by heat"),
        (with_gpu(clock=1200), "GPU 1 runs at 1200 MHz, the job's others at 1980"),
        (
            {"gpus": [SOUND], "devices": 1},
            "2 GPUs were granted, the driver shows 1 and torch can use 1",
        ),
        (
            {"gpus": None, "devices": 0},
            "2 GPUs were granted, the driver shows 0 and torch can use 0",
        ),
        (
            {"product_ms": [1.5, 2.4]},
            "a matrix product on GPU 1 takes 2.4 ms, 1.5 on the job's others",
        ),
        (
            {"reduce_ms": 2.0},
            "an all-reduce among its own devices takes 2 ms, 0.9 on the job's others",
        ),
        ({"reduce_ms": float("inf")}, "an all-reduce among its own devices does not end"),
        ({"shm": GIB // 16}, "/dev/shm has 0.06 GiB free, and 1 are needed"),
        ({"tmp": 0}, "/tmp has 0.00 GiB free, and 1 are needed"),
        ({"at": 1060.3}, "its clock is +60 s off; have it follow a time server"),
        ({"folder": "x cannot be written"}, "x cannot be written"),
    ],
)
def test_a_node_is_bad_for_what_it_says_alone_or_beside_the_others(said, sentence):
    assert judged(**said) == {"a3": sentence}


def test_all_that_is_wrong_with_a_node_is_said():
    (sentence,) = judged(tmp=0, **with_gpu(uncorrected=1)).values()
    assert sentence.count(";") == 1


def test_a_node_that_does_not_answer_is_bad():
    said = judge({"a1": report("a1")}, {"a1": 2, "a2": 2})
    assert said == {"a2": "it did not answer within job.examine_s"}


def test_of_two_nodes_the_slower_is_bad():
    pair = {"a1": report("a1"), "a2": report("a2", product_ms=[2.4, 2.4])}
    assert list(judge(pair, {"a1": 2, "a2": 2})) == ["a2"]


def test_where_no_node_has_a_driver_gpus_are_not_asked_for():
    plain = {"gpus": None, "devices": 0, "product_ms": [0.3]}
    nodes = {"a1": report("a1", **plain), "a2": report("a2", **plain | {"product_ms": [2.0]})}
    assert judge(nodes, {"a1": 8, "a2": 8}) == {}
    nodes["a2"] = replace(nodes["a2"], product_ms=[90.0])
    (sentence,) = judge(nodes, {"a1": 8, "a2": 8}).values()
    assert sentence.startswith("a matrix product on its CPU takes 90 ms")


def test_a_node_without_gpus_for_torch_does_not_make_its_sound_peer_bad():
    blind = report("a1", gpus=[SOUND], devices=0, product_ms=[0.2], reduce_ms=0.01)
    sound = report("a2", gpus=[SOUND], devices=1, product_ms=[1.5], reduce_ms=None)
    said = judge({"a1": blind, "a2": sound}, {"a1": 1, "a2": 1})
    assert said == {"a1": "1 GPUs were granted, the driver shows 1 and torch can use 0"}


def with_devices(node: str, count: int, reduce_ms: float) -> Report:
    own = [replace(SOUND, index=index) for index in range(count)]
    return report(node, gpus=own, devices=count, product_ms=[1.5] * count, reduce_ms=reduce_ms)


def test_an_all_reduce_is_compared_among_nodes_with_as_many_devices():
    counts = {"t1": 8, "r1": 2, "r2": 2}
    reports = {
        "t1": with_devices("t1", 8, 2.0),
        "r1": with_devices("r1", 2, 0.9),
        "r2": with_devices("r2", 2, 0.9),
    }
    assert judge(reports, counts) == {}
    hangs = reports | {"t1": with_devices("t1", 8, float("inf"))}
    assert judge(hangs, counts) == {"t1": "an all-reduce among its own devices does not end"}


def test_a_wrong_clock_of_the_first_node_makes_no_other_bad():
    ahead = {name: report(name, heard_at=1060.3) for name in ("a1", "a2", "a3")}
    assert judge(ahead, dict.fromkeys(ahead, 2)) == {}
    ahead["a1"] = report("a1", at=1060.0, heard_at=1060.3)  # the first node hears itself
    assert list(judge(ahead, dict.fromkeys(ahead, 2))) == ["a1"]


def test_of_two_clocks_nobody_knows_which_is_wrong():
    pair = {"a1": report("a1"), "a2": report("a2", at=1060.0)}
    assert judge(pair, dict.fromkeys(pair, 2)) == {}


@pytest.mark.parametrize(
    ("bad", "training", "rollout", "found"),
    [
        ([], ["t1"], ["r1", "r2"], Found({})),
        (["r1"], ["t1"], ["r1", "r2"], Found({"r1": "slow"}, engines=("r2",))),
        (["t1"], ["t1"], [], Found({"t1": "slow"}, needed=("t1",))),
        (
            ["t1", "r1"],
            ["t1"],
            ["r1", "r2"],
            Found({"t1": "slow", "r1": "slow"}, needed=("t1", "r1")),
        ),
        (["r1"], ["t1"], ["r1"], Found({"r1": "slow"}, needed=("r1",))),
    ],
    ids=["none", "one of the engines'", "a trainer's", "both", "all engines'"],
)
def test_a_run_goes_on_without_some_engines_and_without_no_rank(bad, training, rollout, found):
    assert tell_apart(dict.fromkeys(bad, "slow"), training, rollout) == found


@pytest.mark.parametrize(("training", "rollout"), [(["a1", "a2"], []), (["a1"], ["a2"])])
def test_where_all_nodes_are_bad_it_is_what_they_share(training, rollout):
    found = tell_apart(dict.fromkeys(("a1", "a2"), "/dev/shm is small"), training, rollout)
    assert found.needed == ("a1", "a2")
    assert found.shared.startswith("all 2 nodes are bad, so none is excluded: ")
    assert "container and site.prolog in the cluster file" in found.shared
    assert "wrong with a1: /dev/shm is small" in found.shared


# -- what a node says ------------------------------------------------------------------------------


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
        NVML_CLOCK_SM=1,
        nvmlClocksThrottleReasonHwSlowdown=0x8,
        nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetRemappedRows=remapped,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, since: answers.get("ecc", 0),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: answers.get("processes", []),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 << 30, used=600 << 20),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: answers.get("reasons", 0x4),
        nvmlDeviceGetClockInfo=lambda handle, kind: 1980,
    )


def test_what_the_driver_says_becomes_plain_data():
    said = nvml(1, remapped=(0, 3, 1, 0), ecc=7, processes=[SimpleNamespace(pid=4711)])
    (found,) = gpus.read(said, {})
    assert found == GpuState(0, 1, 600 << 20, 7, remap_failed=False, remap_pending=True)


def test_a_kind_of_gpu_that_does_not_count_errors_has_none():
    assert gpus.read(nvml(1), {}) == [replace(SOUND, clock=0)]


def test_of_a_node_that_hides_no_gpu_only_those_of_the_step_are_asked():
    found = gpus.read(nvml(8), {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert [gpu.index for gpu in found] == [4, 5]
    found = gpus.read(nvml(2), {"CUDA_VISIBLE_DEVICES": "4,5"})  # the others are hidden
    assert [gpu.index for gpu in found] == [0, 1]


def test_without_a_driver_there_are_no_gpus():
    def missing() -> None:
        raise NvmlError("library not found")

    assert gpus.read(SimpleNamespace(NVMLError=NvmlError, nvmlInit=missing), {}) is None


def test_a_power_cap_is_sound_and_heat_is_not():
    assert gpus.clocks(nvml(reasons=0x4), 0) == (1980, ())
    assert gpus.clocks(nvml(reasons=0x4 | 0x20 | 0x40), 0) == (1980, ("heat",))


def test_the_names_that_are_asked_for_are_those_of_the_library():
    pynvml = pytest.importorskip("pynvml")
    assert set(vars(nvml())) <= set(dir(pynvml))


def test_what_a_node_says_is_read_as_it_was_said():
    said = report("a1")
    assert from_json(as_json(said)) == said
    assert from_json(as_json(replace(said, gpus=None))).gpus is None
    for line in ("module cuda loaded", "[]", '{"node": 1}'):
        with pytest.raises((ValueError, TypeError)):
            from_json(line)


def test_a_node_measures_itself_and_is_heard_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    (tmp_path / measure.CANARY).touch()
    assert measure.examine(tmp_path) == 0
    heard, seen = from_json(capsys.readouterr().out), from_json((tmp_path / "a1.json").read_text())
    assert heard == replace(seen, at=heard.at)
    assert judge({"a1": heard}, {"a1": 8}) == {}


def test_a_node_that_cannot_write_the_folder_is_heard_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    monkeypatch.setattr(measure, "_measure", report)
    (tmp_path / measure.CANARY).touch()
    (tmp_path / "a1.json").mkdir()
    assert measure.examine(tmp_path) == 0
    said = from_json(capsys.readouterr().out)
    assert "a1.json cannot be written (Is a directory)" in said.folder
    assert list(judge({"a1": said}, {"a1": 2})) == ["a1"]


def test_a_gpu_that_cannot_be_measured_makes_its_node_bad(tmp_path, capsys, monkeypatch):
    def lost() -> int:
        raise RuntimeError("GPU is lost\nCUDA kernel errors might be reported elsewhere")

    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    monkeypatch.setattr(
        measure, "_nvml", lambda: SimpleNamespace(**vars(nvml()) | {"nvmlDeviceGetCount": lost})
    )
    (tmp_path / measure.CANARY).touch()
    assert measure.examine(tmp_path) == 0
    said = from_json(capsys.readouterr().out)
    sentence = {"a1": "it could not be measured: RuntimeError: GPU is lost"}
    assert judge({"a1": said}, {"a1": 2}) == sentence
    assert judge({"a1": said, "a2": report("a2")}, {"a1": 2, "a2": 2}) == sentence


def test_devices_that_hang_are_waited_for_together(monkeypatch):
    torch = pytest.importorskip("torch")
    declared, release = measure.REDUCE_S, threading.Event()
    work = SimpleNamespace(wait=lambda: release.wait(2))
    group = SimpleNamespace(allreduce=lambda _: work)
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", lambda *_: group)
    monkeypatch.setattr(measure, "REDUCE_S", 0.1)
    began = time.monotonic()
    assert measure._reduce_ms([torch.device("cpu")] * 8) == float("inf")
    took = time.monotonic() - began
    release.set()
    assert took < 0.6
    assert measure.WAIT.total_seconds() > declared


def test_a_node_with_hung_devices_speaks_and_leaves_at_once(tmp_path, capsys, monkeypatch):
    def leave(code: int) -> None:
        raise SystemExit(code, capsys.readouterr().out)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(measure, "_measure", lambda name: report(name, reduce_ms=float("inf")))
    (tmp_path / measure.CANARY).touch()
    with pytest.raises(SystemExit) as left:
        measure.examine(tmp_path)
    code, said = left.value.args
    assert code == 0 and from_json(said).reduce_ms == float("inf")


def test_a_person_who_names_no_attempts_folder_is_told_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.setattr(measure, "_measure", report)
    for folder_of_no_job in (tmp_path / "nowhere", tmp_path):
        began = time.monotonic()
        assert main(["slurm", "examine", str(folder_of_no_job)]) == 2
        assert time.monotonic() - began < 5
        said = capsys.readouterr().err
        assert f"{folder_of_no_job}/canary does not exist: `qurl slurm examine` runs inside" in said


def test_the_jobs_own_call_waits_for_what_another_node_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setattr(measure, "_measure", report)
    late = threading.Timer(0.2, (tmp_path / measure.CANARY).touch)
    late.start()
    assert measure.examine(tmp_path) == 0
    assert from_json(capsys.readouterr().out).folder == ""


# -- the supervisor --------------------------------------------------------------------------------

LAYOUT = lay_out(ParallelConfig(), RolloutConfig(), NodeConfig())


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job on node a1 in which ``slurm(program, body)`` makes Slurm's programs."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1")
    make = Programs(tmp_path, monkeypatch)
    make("scontrol", '[ "$2" = hostnames ] && echo "$3" | tr , "\\n"; exit 0')
    make("sbatch", "cat >&2")
    return make


def examined(run_dir, **job) -> Found:
    (run_dir / "slurm/attempts/1").mkdir(parents=True, exist_ok=True)
    return examination.examine(run_dir, 1, LAYOUT, ClusterConfig(job=JobConfig(**job)))


def says(run_dir, said: Report) -> str:
    """Shell lines of a node that is heard, and whose file is seen."""
    line = as_json(said).strip()
    return f"echo welcome to a1; echo '{line}'; touch {run_dir}/slurm/attempts/1/nodes/a1.json"


def heard_now(**changed) -> Report:
    return report("a1", at=measure.now(), heard_at=None, **changed)


def test_nodes_are_asked_through_srun_and_a_greeting_is_passed_on(slurm, tmp_path, capfd):
    slurm("srun", says(tmp_path, heard_now()))
    assert examined(tmp_path) == Found({})
    called = (tmp_path / "called").read_text()
    assert "srun --job-name=examine" in called and "--output" not in called
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 " in called
    assert capfd.readouterr().out == "welcome to a1\n"
    written = json.loads((tmp_path / "slurm/attempts/1/nodes/verdict.json").read_text())
    assert written == {"bad": {}, "needed": [], "job": 5}


def test_a_node_that_hangs_is_bad_when_its_time_is_up(slurm, tmp_path):
    slurm("srun", "exec sleep 60")
    began = time.monotonic()
    assert examined(tmp_path, examine_s=1).needed == ("a1",)
    assert time.monotonic() - began < 5


def test_an_examination_that_fails_everywhere_is_no_nodes_fault(slurm, tmp_path, capfd):
    slurm("srun", "echo ImportError >&2; exit 1")
    assert examined(tmp_path) == Found({})
    said = capfd.readouterr()
    assert "examine: ImportError" in said.err and "the examination of the nodes failed" in said.out


def test_a_node_whose_file_is_not_seen_is_bad(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(
        examination,
        "wait_until_seen",
        lambda path, why, key: measure.wait_until_seen(path, why, key=key, seconds=0),
    )
    slurm("srun", f"echo '{as_json(heard_now()).strip()}'")
    assert "a1.json is not visible" in examined(tmp_path).bad["a1"]


def test_a_lone_node_that_cannot_be_measured_is_bad(slurm, tmp_path):
    slurm("srun", says(tmp_path, heard_now(failed="it could not be measured: GpuIsLost")))
    assert examined(tmp_path).bad == {"a1": "it could not be measured: GpuIsLost"}


def test_without_srun_it_is_one_sentence(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # the system's may have one
    slurm("scontrol", "echo a1")
    with pytest.raises(ConfigError, match="srun cannot be run: .*No such file"):
        examined(tmp_path)


def test_without_time_for_it_nothing_is_asked(slurm, tmp_path):
    assert examined(tmp_path, examine_s=0) == Found({})
    assert not (tmp_path / "called").exists()


def test_slurm_is_asked_about_the_job_without_the_nodes_and_those_before(
    slurm, tmp_path, capfd, monkeypatch
):
    folder.put(
        tmp_path / "slurm/job.sbatch", "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=2"
    )
    slurm("scontrol", 'case "$2" in hostnames) echo b9;; *) echo ExcNodeList=b9; esac')
    slurm("sbatch", "cat > asked; grep -q exclude=a1,b9 asked")
    monkeypatch.chdir(tmp_path)
    examination.refuse_exclusion(tmp_path, 5, ["a1"])
    assert (tmp_path / "asked").read_text().count("#SBATCH --exclude=a1,b9\n#SBATCH --nodes=") == 2
    slurm("sbatch", "echo 'Requested node configuration is not available' >&2; exit 1")
    with pytest.raises(ConfigError, match="test-only refused .* is not available"):
        examination.refuse_exclusion(tmp_path, 5, ["a1"])


def test_after_some_exclusions_it_is_not_the_nodes(slurm, tmp_path):
    folder.write_submitted(tmp_path, folder.Submitted([5], ""))
    for number in range(1, examination.MOST + 2):
        record = {"bad": {"a1": "slow"}, "needed": ["a1"], "job": 5}
        folder.put(
            folder.attempt_folder(tmp_path, number) / "nodes/verdict.json", json.dumps(record)
        )
    with pytest.raises(ConfigError, match="were excluded 3 times already; look at .*/nodes"):
        examination.refuse_exclusion(tmp_path, 5, ["a1"])


@pytest.mark.parametrize("text", ["", "[]", '{"needed": ["a1"]}'])
def test_a_damaged_verdict_is_named(text, tmp_path):
    folder.put(folder.attempt_folder(tmp_path, 1) / "nodes/verdict.json", text)
    with pytest.raises(ConfigError, match=r"nodes/verdict.json is damaged"):
        examination.refuse_exclusion(tmp_path, 5, ["a1"])


@pytest.mark.parametrize(
    ("known", "address"),
    [("10.0.0.5", "10.0.0.5"), ("127.0.0.1", "127.0.0.1"), ("nowhere.invalid", None)],
    ids=["an address", "one machine", "a name that does not resolve"],
)
def test_a_node_is_reached_at_the_address_that_the_controller_has(known, address, slurm):
    slurm("scontrol", f"echo NodeName=a1 Arch=x86_64 NodeAddr={known} Port=6818")
    found = reachable("a1")
    assert found == address if address else "." in found
