"""Reports of nodes, and their verdict; Slurm and NVIDIA's driver are stand-ins."""

import json
from dataclasses import replace

import pytest

from qurl_megatron.cluster import examination, folder
from qurl_megatron.cluster.cluster import ClusterConfig, JobConfig, NodeConfig
from qurl_megatron.cluster.examination import Examination, Report, judge, slow_gpus, tell_apart
from qurl_megatron.cluster.layout import lay_out
from qurl_megatron.cluster.verdict import Decision
from qurl_megatron.config.sections import ParallelConfig, RolloutConfig
from qurl_megatron.kit.errors import ConfigError
from tests.support.programs import Programs


def report(node: str, **changed) -> Report:
    return replace(Report(node, [], gpus=2), **changed)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, None),
        ({"faults": ["GPU 1 is ill", "GPU 0 is slow"]}, "GPU 1 is ill; GPU 0 is slow"),
        ({"gpus": 1}, "2 GPUs were granted, and torch can use 1"),
        ({"faults": ["it could not be measured"], "gpus": 0}, "it could not be measured"),
    ],
)
def test_a_node_is_bad_for_what_it_says_or_for_gpus_that_it_lacks(changed, sentence):
    names = ("a1", "a2", "a3")
    reports = {name: report(name) for name in names} | {"a3": report("a3", **changed)}
    assert judge(reports, names, 2) == ({"a3": sentence} if sentence else {})


def test_a_gpu_is_slow_beside_the_others_of_its_node():
    assert list(slow_gpus([])) == [] == list(slow_gpus([1.5, 1.52, 1.7]))
    expected = ["a matrix product on GPU 2 takes 2.4 ms, 1.52 on the others"]
    assert list(slow_gpus([1.5, 1.52, 2.4])) == expected


def test_a_node_that_does_not_answer_is_bad():
    bad = judge({"a1": report("a1")}, ["a1", "a2"], 2)
    assert bad == {"a2": "it did not answer within job.examine_s"}


def test_where_no_node_has_a_driver_gpus_are_not_asked_for():
    assert judge({"a1": Report("a1", []), "a2": Report("a2", [])}, ["a1", "a2"], 8) == {}


@pytest.mark.parametrize(
    ("bad", "training", "rollout", "engines", "needed"),
    [
        ([], ["t1"], ["r1", "r2"], None, ()),
        (["r1"], ["t1"], ["r1", "r2"], ("r2",), ()),
        (["t1"], ["t1"], [], None, ("t1",)),
        (["t1", "r1"], ["t1"], ["r1", "r2"], None, ("t1", "r1")),
        (["r1"], ["t1"], ["r1"], None, ("r1",)),
    ],
    ids=["none", "one of the engines'", "a trainer's", "both", "all engines'"],
)
def test_a_run_goes_on_without_some_engines_and_without_no_rank(
    bad, training, rollout, engines, needed
):
    faults = dict.fromkeys(bad, "slow")
    assert tell_apart(faults, training, rollout) == Examination(faults, engines, needed)


@pytest.mark.parametrize(("training", "rollout"), [(["a1", "a2"], []), (["a1"], ["a2"])])
def test_where_all_nodes_are_bad_it_is_what_they_share(training, rollout):
    verdict = tell_apart(dict.fromkeys(("a1", "a2"), "/dev/shm is small"), training, rollout)
    assert verdict.needed == ("a1", "a2")
    assert "container and site.prolog in the cluster file" in verdict.shared
    assert "a1: /dev/shm is small" in verdict.shared


# -- a node's report -------------------------------------------------------------------------------


def own_report(capsys) -> Report:
    assert examination.measure_node() == 0
    return Report(**json.loads(capsys.readouterr().out))


def test_a_node_measures_itself(capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    own = own_report(capsys)
    assert own.node == "a1" and judge({"a1": own}, ["a1"], 8) == {}


def test_a_gpu_that_cannot_be_measured_makes_its_node_bad(capsys, monkeypatch):
    def lost() -> int:
        raise RuntimeError("GPU is lost\nCUDA kernel errors might be reported elsewhere")

    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    monkeypatch.setattr("torch.cuda.is_available", lost)
    own = own_report(capsys)
    sentence = {"a1": "it could not be measured: RuntimeError: GPU is lost"}
    assert judge({"a1": own}, ["a1"], 2) == sentence
    assert judge({"a1": own, "a2": report("a2")}, ["a1", "a2"], 2) == sentence


# -- the supervisor --------------------------------------------------------------------------------

LAYOUT = lay_out(ParallelConfig(), RolloutConfig(), NodeConfig())


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job on node a1 in which ``slurm(program, body)`` makes Slurm's programs."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1")
    make = Programs(tmp_path, monkeypatch)
    make("scontrol", '[ "$2" = hostnames ] && echo "$3" | tr , "\\n"; exit 0')
    return make


def examined(**job) -> Examination:
    return examination.examine(LAYOUT, ClusterConfig(job=JobConfig(**job)))


def test_nodes_are_asked_through_srun_and_a_greeting_is_passed_on(slurm, capfd):
    slurm("srun", f"echo welcome to a1; echo '{report('a1').as_json()}'; echo '[]'")
    assert examined() == Examination({})
    (srun,) = [line for line in slurm.called if line.startswith("srun --job-name=examine")]
    assert "--output" not in srun
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 " in srun
    assert capfd.readouterr().out == "welcome to a1\n[]\n"


def test_a_node_that_hangs_is_bad_when_its_time_is_up(slurm):
    slurm("srun", "exec sleep 60")
    assert examined(examine_s=1).needed == ("a1",)


def test_an_examination_that_fails_everywhere_is_no_nodes_fault(slurm, capfd):
    slurm("srun", "echo ImportError >&2; exit 1")
    assert examined() == Examination({})
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
    slurm("sbatch", "echo 'Requested node configuration is not available' >&2; exit 1")
    with pytest.raises(ConfigError, match="test-only refused .* is not available"):
        examination.refuse_exclusion(tmp_path, 5, ["a1"])


def test_after_some_exclusions_it_is_not_the_nodes(tmp_path):
    for _ in range(examination.MOST):
        begun = folder.open_attempt(tmp_path, job=5)
        folder.write_attempt(tmp_path, replace(begun, decision=Decision.WITHOUT.value))
    with pytest.raises(ConfigError, match=r"were excluded 3 times already; .*/job\.log says"):
        examination.refuse_exclusion(tmp_path, 5, ["a1"])
