import dataclasses
import shlex
import subprocess

import pytest

from qurl_megatron.cluster.cluster import (
    ClusterConfig,
    ContainerConfig,
    JobConfig,
    NodeConfig,
    SiteConfig,
)
from qurl_megatron.cluster.layout import inside, lay_out, rollout_step, training_step
from qurl_megatron.cluster.script import HERE, Script, render, tool_job, training_job
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from tests.support.slurm_scripts import FOLDER, READY, ROOT, rendered

BIG = ROOT / "launch/recipes/grpo_qwen2.5_32b.toml"
QUICK = ROOT / "launch/recipes/quickstart.toml"


def script(cluster: ClusterConfig, recipe=BIG, *overrides: str) -> str:
    return render(training_job(load(recipe, overrides), cluster), cluster)


def with_job(**values) -> ClusterConfig:
    return ClusterConfig(job=JobConfig(**values))


@pytest.mark.parametrize("name", READY)
def test_the_scripts_that_ship_are_what_render_gives(name):
    assert (FOLDER / name).read_text() == rendered(name), (
        "python -m tests.support.slurm_scripts writes them again"
    )


def test_every_script_in_the_folder_is_one_of_them():
    assert {path.name for path in FOLDER.glob("*.sbatch")} == set(READY)


@pytest.mark.parametrize("name", READY)
def test_bash_reads_the_scripts(name):
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_a_disaggregated_run_is_a_hetjob_and_ends_in_one_call():
    lines = script(with_job()).splitlines()
    first, second = (part.split() for part in " ".join(lines).split("#SBATCH hetjob"))
    assert [w for w in first if w.startswith("--nodes")] == ["--nodes=2"]
    assert [w for w in second if w.startswith(("--nodes", "--ntasks"))] == [
        "--nodes=2",
        "--ntasks-per-node=1",
    ]
    assert lines[-1] == "exec qurl slurm attempt runs/grpo_qwen2.5_32b"


def test_a_site_without_hetjobs_gets_one_component_to_cut_in_two():
    text = script(with_job(layout="split"))
    assert "hetjob" not in text
    assert "#SBATCH --nodes=4\n" in text


def test_only_a_job_with_rollout_nodes_of_its_own_outlives_a_node_and_no_hetjob_can():
    assert "#SBATCH --no-kill\n" in script(with_job(layout="split"))
    assert "--no-kill" not in script(with_job(layout="hetjob"))
    assert "--no-kill" not in script(with_job(layout="split"), QUICK)


def test_a_run_asks_for_a_signal_to_the_supervisor_alone():
    assert "#SBATCH --signal=B:USR1@300\n" in script(with_job(signal_s=300))


def test_a_requeued_job_and_a_chain_are_told_apart():
    requeued, chained = script(with_job()), script(with_job(again="chain"))
    assert "--requeue" in requeued and "singleton" not in requeued
    assert "--no-requeue" in chained and "--dependency=singleton" in chained


def test_chains_of_runs_whose_folders_are_called_alike_do_not_wait_for_each_other():
    cluster = with_job(again="chain")
    names = {
        training_job(load(QUICK, [f"train.run_dir={folder}/run"]), cluster).name
        for folder in ("a", "b")
    }
    assert len(names) == 2


def test_nothing_of_the_submitters_shell_reaches_a_job(monkeypatch):
    monkeypatch.setenv("QURL_API_KEY", "secret-of-mine")
    text = script(with_job())
    assert "#SBATCH --export=NONE\n" in text
    assert "secret-of-mine" not in text


def test_a_percent_sign_in_the_run_folder_is_not_slurms():
    assert "--output=runs/50%%/slurm/job.log\n" in script(
        with_job(), QUICK, "train.run_dir=runs/50%"
    )


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


def test_a_command_reaches_bash_word_by_word(tmp_path):
    words = ("printf", "%s\\n", "a b", "$HOME", "it's", "", "x$PWD", HERE, f"--dir={HERE}")
    job = Script(name="x", output="x", components=(), command=words)
    last = render(dataclasses.replace(job, components=(COMPONENT,)), ClusterConfig())
    said = subprocess.run(
        ["bash", "-c", last.splitlines()[-1]], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    here = [str(tmp_path), f"--dir={tmp_path}"]
    assert said.splitlines() == ["a b", "$HOME", "it's", "", "x$PWD", *here]


COMPONENT = training_job(load(QUICK), ClusterConfig()).components[0]


def test_a_tool_is_one_command_on_one_node_without_gpus():
    words = ["hf_to_megatron.py", "--hf", "a", "--out", "b"]
    text = render(tool_job("convert", words, ClusterConfig()), ClusterConfig())
    assert "--gpus" not in text and "--signal" not in text
    assert text.endswith(" python checkpoints_tools/hf_to_megatron.py --hf a --out b\n")


@pytest.mark.parametrize(
    ("kind", "words", "takes"),
    [
        ("convert", ["quantize", "--backend", "te"], True),
        ("convert", ["quantize", "--backend", "native"], False),
        ("bench", ["loss", "--device", "cuda"], True),
        ("bench", ["quantize"], False),
        ("bench", ["quantize", "--device", "cuda"], True),
        ("bench", ["loss.py", "--only", "ours"], True),
        ("bench", ["quantize", "--device=cuda"], True),
        ("eval", ["aime.jsonl", "--model", "m"], True),
        ("eval", ["aime.jsonl", "--model", "m", "--url", "http://a:1"], False),
    ],
)
def test_a_tool_takes_gpus_only_where_it_uses_them(kind, words, takes):
    text = render(tool_job(kind, words, ClusterConfig()), ClusterConfig())
    assert ("--gpus-per-node=8" in text) == takes


def test_a_study_is_an_array():
    text = render(tool_job("study", ["s.toml", "out"], ClusterConfig(), tasks=9), ClusterConfig())
    assert "#SBATCH --array=0-8\n" in text
    assert "--output=runs/slurm/%x-%A_%a.log\n" in text
    assert text.endswith(" qurl slurm cell s.toml out\n")


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("convert", [], "--kind convert needs a tool"),
        ("convert", ["hf_to_megatrom"], "hf_to_megatrom is unknown; known: "),
        ("bench", ["../cli"], "../cli is unknown; known: "),
    ],
)
def test_an_unknown_tool_is_one_sentence(kind, words, said):
    with pytest.raises(ConfigError) as error:
        tool_job(kind, words, ClusterConfig())
    assert said in str(error.value)


# ---- steps, inside the job


def steps(cluster: ClusterConfig) -> tuple[list[str], list[str]]:
    config = load(BIG)
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    options = {"folder": "logs", "workdir": "/here"}
    return (
        training_step(layout, cluster, ["qurl", "train"], **options),
        rollout_step(layout, cluster, ["qurl", "serve"], **options),
    )


def test_the_steps_of_a_hetjob_are_its_components():
    train, engines = steps(with_job())
    assert "--het-group=0" in train and "--het-group=1" in engines
    assert "--ntasks=16" in train and "--ntasks=2" in engines


def test_the_steps_of_one_allocation_stand_side_by_side():
    train, engines = steps(with_job(layout="split"))
    assert {"--relative=0", "--nodes=2"} <= set(train)
    assert {"--relative=2", "--nodes=2"} <= set(engines)


def test_a_rank_that_fails_ends_the_others_and_an_engine_does_not():
    train, engines = steps(with_job())
    assert "--kill-on-bad-exit=1" in train and "--no-kill" not in train
    assert "--kill-on-bad-exit=0" in engines and "--no-kill" in engines


def test_steps_inherit_what_the_prolog_has_set():
    assert all("--export=ALL" in step for step in steps(with_job()))


def test_a_command_is_put_into_the_container():
    def words(**values) -> str:
        cluster = ClusterConfig(container=ContainerConfig(**values))
        return shlex.join(inside(cluster, ["qurl", "train"], "/here"))

    mounts = ("/data", "/a:/b")
    assert words() == "qurl train"
    assert words(kind="pyxis", image="me/qurl", mounts=mounts) == (
        "--container-image=me/qurl --container-workdir=/here --container-mounts=/data,/a:/b "
        "qurl train"
    )
    assert words(kind="apptainer", image="q.sif", mounts=mounts) == (
        "apptainer exec --nv --bind /data,/a:/b --pwd /here q.sif qurl train"
    )


SITE = SiteConfig(environment={"NCCL_IB_HCA": "mlx5,x"})
NODE = NodeConfig(interfaces=("bond0",))


def test_what_the_site_sets_goes_before_what_a_pyxis_image_sets():
    container = ContainerConfig(kind="pyxis", image="me/qurl")
    words = inside(ClusterConfig(container=container, site=SITE, node=NODE), ["qurl"], "/here")
    assert "--container-env=NCCL_SOCKET_IFNAME,GLOO_SOCKET_IFNAME,NCCL_IB_HCA" in words
    alone = inside(ClusterConfig(container=container), ["qurl"], "/here")
    assert not any(word.startswith("--container-env") for word in alone)


def test_what_the_site_sets_goes_before_what_an_apptainer_image_sets():
    container = ContainerConfig(kind="apptainer", image="q.sif")
    text = script(ClusterConfig(container=container, site=SITE, node=NODE), QUICK)
    for line in ("NCCL_IB_HCA=mlx5,x", "NCCL_SOCKET_IFNAME=bond0"):
        assert f"\nexport {line}\n" in text and f"\nexport APPTAINERENV_{line}\n" in text
    assert "APPTAINERENV" not in script(ClusterConfig(site=SITE), QUICK)


def test_a_file_that_pyxis_would_take_for_a_name_is_refused():
    with pytest.raises(ConfigError, match="container.image=q.sqsh: .* write ./q.sqsh"):
        ContainerConfig(kind="pyxis", image="q.sqsh")
