"""What a rank's children inherit: no launcher's variables, and the cores of the job."""

import os
import subprocess
import sys

import pytest

from qurl_megatron.config import RewardConfig
from qurl_megatron.engines.starting import Launch
from qurl_megatron.fleet.process import EngineProcess
from qurl_megatron.kit.children import expandable_segments, job_cores, without_launcher
from qurl_megatron.kit.place import ranks_here
from qurl_megatron.rewards import RewardPool
from tests.support.runs import TORCHRUN

OTHERS = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
    "OMPI_COMM_WORLD_RANK": "0",
    "PMI_RANK": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
KEPT = {
    "PATH": "/usr/bin",
    "PYTHONPATH": "/a",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "NCCL_SOCKET_IFNAME": "ib0",
    "NCCL_CUMEM_ENABLE": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HOME": "/cache",
}


def test_nothing_of_a_rank_is_left_and_all_else_stays():
    assert without_launcher({**TORCHRUN, **OTHERS, **KEPT}) == KEPT


@pytest.mark.parametrize(
    "setting,found",
    [
        ("max_split_size_mb:128", False),
        ("expandable_segments:False", False),
        ("max_split_size_mb:8, expandable_segments: True", True),
    ],
)
def test_expandable_segments_are_recognised(setting, found):
    named = f"PYTORCH_ALLOC_CONF={setting}" if found else None
    assert expandable_segments({"PYTORCH_ALLOC_CONF": setting}) == named


def test_how_many_ranks_are_on_the_leading_ones_machine():
    assert ranks_here({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}) == 8
    assert ranks_here({"WORLD_SIZE": "4"}) == 4
    srun = {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2(x2)"}
    assert ranks_here({**srun, "WORLD_SIZE": "12"}) == 4
    shell = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert ranks_here({**shell, "WORLD_SIZE": "4"}) == 4


@pytest.mark.parametrize(
    "own,fenced,env,expected",
    [
        ({0, 1}, {0, 1, 2, 3}, {"SLURM_JOB_ID": "7"}, {0, 1, 2, 3}),
        ({0, 1}, {0, 1, 2, 3}, {"OMPI_COMM_WORLD_SIZE": "2"}, {0, 1, 2, 3}),
        # By hand: who gives two cores with taskset means them.
        ({0, 1}, {0, 1, 2, 3}, {}, {0, 1}),
        # The job has two of four, and nothing keeps it from the others.
        ({0, 1}, {0, 1, 2, 3}, {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}, {0, 1}),
        ({0}, {0, 1}, {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}, {0, 1}),
    ],
)
def test_children_get_the_cores_of_the_job(own, fenced, env, expected):
    assert job_cores(own, fenced, env) == expected


BOUND = """
import os, sys
from pathlib import Path
from tests.unit.test_children import cores_of_an_engine, cores_of_a_worker
print(len(os.sched_getaffinity(0)), cores_of_an_engine(Path(sys.argv[1])), cores_of_a_worker())
print(len(os.sched_getaffinity(0)))
"""


def cores_of_an_engine(folder) -> int:
    code = "import os; print(len(os.sched_getaffinity(0)), 'RANK' in os.environ)"
    engine = EngineProcess("engine", Launch((sys.executable, "-c", code), {}), folder)
    engine.start()
    engine.popen.wait()
    cores, has_rank = engine.log.read_text().split()
    assert has_rank == "False"
    return int(cores)


def cores_of_a_worker() -> int:
    with RewardPool(RewardConfig(kind="math")) as pool:
        return len(os.sched_getaffinity(pool.workers.workers[0].process.pid))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("batch", [True, False], ids=["by srun", "by hand"])
def test_children_of_a_rank_that_is_bound_to_one_core(batch, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    env = {**os.environ, "RANK": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"SLURM_JOB_ID": "7"} if batch else {}
    done = subprocess.run(
        ["taskset", "-c", str(cores[0]), sys.executable, "-c", BOUND, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    all_of_them = len(cores) if batch else 1
    assert list(map(int, done.stdout.split())) == [1, all_of_them, all_of_them, 1]
