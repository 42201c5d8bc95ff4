import dataclasses
import os
import re
import shlex
import subprocess

import pytest

from qurl_megatron.cluster.cluster import (
    ClusterConfig,
    ContainerConfig,
    JobConfig,
    SiteConfig,
)
from qurl_megatron.cluster.layout import inside, lay_out, step
from qurl_megatron.cluster.submit import Script, command_job, render, training_job
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from tests.support.slurm_scripts import FOLDER, READY, ROOT, rendered

BIG = ROOT / "launch/recipes/grpo_qwen2.5_32b.toml"
QUICK = ROOT / "launch/recipes/quickstart.toml"
SITE = SiteConfig(environment={"NCCL_SOCKET_IFNAME": "bond0", "NCCL_IB_HCA": "mlx5,x"})


def script(cluster: ClusterConfig, recipe=BIG, *overrides: str) -> str:
    return render(training_job(load(recipe, overrides), cluster), cluster)


def with_job(**values) -> ClusterConfig:
    return ClusterConfig(job=JobConfig(**values))


@pytest.mark.parametrize("name", READY)
def test_the_scripts_that_ship_are_what_render_gives_and_bash_reads_them(name):
    assert (FOLDER / name).read_text() == rendered(name), (
        "python -m tests.support.slurm_scripts writes them again"
    )
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_every_script_in_the_folder_is_one_of_them():
    assert {path.name for path in FOLDER.glob("*.sbatch")} == set(READY)


def test_a_run_with_rollout_nodes_is_one_job_of_all_nodes_and_ends_in_one_call():
    lines = script(with_job()).splitlines()
    assert {"#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=8"} <= set(lines)
    assert lines[-1] == "exec qurl slurm attempt runs/grpo_qwen2.5_32b"


@pytest.mark.parametrize(
    ("job", "recipe", "present", "absent"),
    [
        ({}, BIG, ["--no-kill", "--requeue"], []),
        ({}, QUICK, [], ["--no-kill"]),  # it has no rollout nodes
        ({"signal_s": 300}, BIG, ["--signal=B:USR1@300"], []),
        ({"extra": ("--exclusive",)}, BIG, ["--exclusive"], []),
    ],
)
def test_options_follow_from_the_cluster_file(job, recipe, present, absent):
    lines = script(with_job(**job), recipe).splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert set(present) <= options and not set(absent) & options


def test_nothing_of_the_submitters_shell_reaches_a_job(monkeypatch):
    monkeypatch.setenv("QURL_API_KEY", "secret-of-mine")
    text = script(with_job())
    assert "#SBATCH --export=NONE\n" in text
    assert "secret-of-mine" not in text


def test_a_percent_sign_in_the_run_folder_is_not_slurms():
    text = script(with_job(), QUICK, "train.run_dir=runs/50%")
    assert "--output=runs/50%%/slurm/job.log\n" in text


@pytest.mark.parametrize("run_dir", ["runs/my run", "runs/my\\nrun", 'runs/\\"x\\"'])
def test_a_run_folder_that_no_sbatch_line_can_carry_is_refused(run_dir):
    with pytest.raises(ConfigError, match="train.run_dir: Slurm takes no log"):
        script(with_job(), QUICK, f'train.run_dir="{run_dir}"')


def test_the_sites_lines_come_before_the_run_and_in_quotes_where_they_need_them():
    site = SiteConfig(prolog=("module load cuda",), environment={"NCCL_IB_HCA": "=a,b c"})
    text = script(dataclasses.replace(with_job(), site=site), QUICK)
    assert text.endswith(
        "\nset -e\nexport NCCL_IB_HCA='=a,b c'\nmodule load cuda\n\n"
        "exec qurl slurm attempt runs/quickstart\n"
    )


def test_a_command_reaches_bash_word_by_word():
    words = ("printf", "%s\\n", "a b", "$HOME", "it's", "", "x$PWD")
    nodes = training_job(load(QUICK), ClusterConfig()).nodes
    text = render(Script("x", "x", nodes, words), ClusterConfig())
    bash = ["bash", "-c", text.splitlines()[-1]]
    printed = subprocess.run(bash, capture_output=True, text=True).stdout
    assert printed.splitlines() == list(words[2:])


# ---- commands


@pytest.mark.parametrize(("node_gpus", "option"), [(0, None), (2, "2"), (None, "8")])
def test_a_command_is_one_task_on_one_node_with_the_gpus_it_is_given(node_gpus, option):
    words = ["convert", "--hf", "a", "--out", "b"]
    text = render(command_job(words, ClusterConfig(), node_gpus), ClusterConfig())
    assert re.findall("--gpus-per-node=(.*)", text) == [option] * (option is not None)
    assert "--nodes=1\n" in text and "--signal" not in text
    assert text.endswith(" qurl convert --hf a --out b\n")


def test_an_unknown_command_is_one_sentence():
    with pytest.raises(ConfigError, match="--kind command: train is unknown; known: convert, exp"):
        command_job(["train"], ClusterConfig(), None)


# ---- steps, inside the job


def test_steps_take_their_part_of_the_job_and_a_rank_that_fails_ends_the_others():
    cluster, config = with_job(), load(BIG)
    allocation = lay_out(config.parallel, config.rollout, cluster.node)
    train = step("train", allocation.training, cluster, ["qurl"], folder="logs")
    engines = step("engines", allocation.rollout, cluster, ["qurl"], first_node=2, together=False)
    assert {"--relative=0", "--nodes=2", "--kill-on-bad-exit=1", "--export=ALL"} <= set(train)
    assert {
        "--relative=2",
        "--nodes=2",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--export=ALL",
    } <= set(engines)
    assert "--no-kill" not in train


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({}, "qurl train"),
        (
            {"kind": "pyxis", "image": "me/qurl", "mounts": ("/data", "/a:/b")},
            "--container-image=me/qurl --container-workdir=/here --container-mounts=/data,/a:/b "
            "qurl train",
        ),
        (
            {"kind": "apptainer", "image": "q.sif", "mounts": ("/data", "/a:/b")},
            "apptainer exec --nv --bind /data,/a:/b --pwd /here q.sif qurl train",
        ),
    ],
)
def test_a_command_is_put_into_the_container(container, words, monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    cluster = ClusterConfig(container=ContainerConfig(**container))
    assert shlex.join(inside(cluster, ["qurl", "train"])) == words


def test_what_the_site_sets_goes_before_what_a_pyxis_image_sets():
    container = ContainerConfig(kind="pyxis", image="me/qurl")
    words = inside(ClusterConfig(container=container, site=SITE), ["qurl"])
    assert "--container-env=NCCL_SOCKET_IFNAME,NCCL_IB_HCA" in words


def test_what_the_site_sets_goes_before_what_an_apptainer_image_sets():
    container = ContainerConfig(kind="apptainer", image="q.sif")
    text = script(ClusterConfig(container=container, site=SITE), QUICK)
    for line in ("NCCL_IB_HCA=mlx5,x", "NCCL_SOCKET_IFNAME=bond0"):
        assert f"\nexport {line}\n" in text and f"\nexport APPTAINERENV_{line}\n" in text
    assert "APPTAINERENV" not in script(ClusterConfig(site=SITE), QUICK)


def test_a_file_that_pyxis_would_take_for_a_name_is_refused():
    with pytest.raises(ConfigError, match="container.image=q.sqsh: .* write ./q.sqsh"):
        ContainerConfig(kind="pyxis", image="q.sqsh")
