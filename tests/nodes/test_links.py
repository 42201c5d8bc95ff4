"""A node of four whose network is slow is named before a job trains."""

import os
import subprocess

import pytest

from benchmarks.network import CannotMake, network
from qurl_megatron.cluster.examination import judge, read_reports
from qurl_megatron.observe.failures import FOLDER
from tests.nodes.runs import OURS
from tests.support.runs import QURL
from tests.support.slurm_runs import submitted

NAMES = ("a1", "a2", "a3", "a4")
LIMIT_S = 300
SLOW = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "10mbit")


@pytest.mark.parametrize("slow", [[], ["a3"]], ids=["all sound", "one slow"])
def test_a_node_that_is_slow_with_both_neighbours_is_bad_and_they_are_not(slow, tmp_path, capfd):
    run_dir = submitted(tmp_path / "run", "model.path=nowhere")
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    with open(tmp_path / "reports", "w+") as reports:
        try:
            with network(tmp_path, *NAMES) as nodes:
                for node in nodes:
                    if node.name in slow:
                        node.do(*SLOW, "burst", "64kb", "latency", "1s")
                tasks = []
                for number, node in enumerate(nodes):
                    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(number)}
                    slurm |= {"SLURMD_NODENAME": node.name, FOLDER: str(tmp_path)}
                    command = node.command(*QURL, "slurm", "examine", run_dir)
                    env = plain | OURS | slurm
                    tasks.append(subprocess.Popen(command, env=env, stdout=reports))
                codes = [task.wait(LIMIT_S) for task in tasks]
        except CannotMake as error:
            pytest.skip(f"no network namespaces can be made here ({error}); they need root")
        reports.seek(0)
        found = read_reports(reports)
    assert codes == [0] * 4
    bad = judge(found, NAMES, gpus=0)
    assert [*bad] == slow, (bad, found)
    for sentence in bad.values():
        assert sentence.startswith("an all-reduce with either neighbour takes ")
