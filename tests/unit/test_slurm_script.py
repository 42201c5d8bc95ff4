"""Cluster files; nodes, job scripts and steps, as they follow from a recipe and such a file."""

import re
import shlex
import subprocess

import pytest

from qurl_megatron.cluster.cluster import (
    ClusterConfig,
    ContainerConfig,
    JobConfig,
    NodeConfig,
    SiteConfig,
    load_cluster,
)
from qurl_megatron.cluster.layout import Allocation, Component, inside, lay_out, step
from qurl_megatron.cluster.submit import Script, command_job, render, training_job
from qurl_megatron.config import ParallelConfig, RolloutConfig, load, to_toml
from qurl_megatron.kit.errors import ConfigError
from tests.support.slurm_runs import QUICK
from tests.support.slurm_scripts import FOLDER, READY, ROOT, rendered

BIG = ROOT / "launch/recipes/grpo_qwen2.5_32b.toml"
NODE = NodeConfig(gpus=8, cpus=96, memory_gib=1600)
SITE = SiteConfig(environment={"NCCL_SOCKET_IFNAME": "bond0", "NCCL_IB_HCA": "=a,b c"})


def script(cluster: ClusterConfig, recipe=QUICK, *overrides: str) -> str:
    return render(training_job(load(recipe, overrides), cluster), cluster)


def sglang(**values) -> RolloutConfig:
    return RolloutConfig(backend="sglang", **values)


LAYOUTS = {
    "embedded": ({"tensor": 2}, RolloutConfig(engines=2), (1, 2, 2)),
    "nodes": ({"tensor": 8, "data": 2}, RolloutConfig(), (2, 8, 8)),
    "colocated": (*({"tensor": 8}, sglang(engines=4, engine_tensor=2, colocate=True), (1, 8, 8)),),
    "colocated on each node": (
        *(
            {"tensor": 8, "data": 2},
            sglang(engines=8, engine_tensor=2, colocate=True, each_node=True),
        ),
        (2, 8, 8),
    ),
    "beside": (
        *({"tensor": 2}, sglang(engines=2, engine_tensor=2, engine_first_gpu=2), (1, 2, 6)),
    ),
    "apart": (
        *({"tensor": 8, "data": 2}, sglang(engines=8, engine_tensor=2, rendezvous="engines")),
        *((2, 8, 8), (2, 1, 8), 4),
    ),
    "part of a node": (
        *({"tensor": 2}, sglang(engines=3, engine_tensor=2, rendezvous="engines")),
        *((1, 2, 2), (1, 1, 6), 3),
    ),
    "elsewhere": ({"tensor": 4}, sglang(urls=("http://a:1",)), (1, 4, 4)),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_and_engines_are_cut_into_nodes(case):
    parallel, rollout, training, *apart = case
    layout = Allocation(Component(*training), None)
    if apart:
        layout = Allocation(Component(*training), Component(*apart[0]), apart[1])
    assert lay_out(ParallelConfig(**parallel), rollout, NODE) == layout


@pytest.mark.parametrize(
    ("parallel", "rollout", "words"),
    [
        ({"tensor": 4, "data": 3}, {}, "12 ranks .*node.gpus=8 .*multiple of 8"),
        ({}, {"engines": 6, "engine_tensor": 2, "rendezvous": "e"}, "engines=6 .*multiple of 4"),
        ({}, {"engine_tensor": 3, "rendezvous": "e"}, "engine_tensor=3 .*node.gpus=8; lower it"),
        ({}, {"colocate": True, "rendezvous": "e"}, "leave one of them out"),
        (
            {"tensor": 8, "data": 2},
            {"engines": 3, "each_node": True},
            "3 do not divide over .* 2 nodes",
        ),
        ({"tensor": 8}, {"engines": 2, "engine_first_gpu": 8}, "up to 10 .*rollout.rendezvous"),
        ({"tensor": 4}, {"engines": 2}, "engine_first_gpu=0 .*4 training ranks; set it to 4"),
    ],
)
def test_what_does_not_divide_is_one_sentence_with_the_mend(parallel, rollout, words):
    with pytest.raises(ConfigError, match=words):
        lay_out(ParallelConfig(**parallel), sglang(**rollout), NODE)


def test_cpus_and_memory_go_with_the_gpus():
    whole, quarter, none = Component(2, 8, 8), Component(1, 2, 2), Component(1, 1, 0)
    assert [c.cpus_per_task(NODE) for c in (whole, quarter, none)] == [12, 12, 96]
    assert [c.memory_gib(NODE) for c in (whole, quarter, none)] == [1600, 400, 1600]
    assert Allocation(quarter, whole, engines=4).whole == Component(3, 2, 8)  # room for either


@pytest.mark.parametrize("name", READY)
def test_the_scripts_that_ship_are_what_render_gives_and_bash_reads_them(name):
    assert {path.name for path in FOLDER.glob("*.sbatch")} == set(READY)
    assert (FOLDER / name).read_text() == rendered(name), (
        "python -m tests.support.slurm_scripts writes them again"
    )
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_a_run_with_rollout_nodes_is_one_job_of_all_nodes_and_ends_in_one_call():
    job = JobConfig(signal_s=300, extra=("--exclusive",))
    *options, last = script(ClusterConfig(job=job), BIG).splitlines()
    asked = {"--nodes=4", "--ntasks-per-node=8", "--no-kill", "--requeue", "--exclusive"}
    asked |= {"--signal=B:USR1@300", "--export=NONE"}  # nothing of the submitter's shell
    assert {f"#SBATCH {option}" for option in asked} <= set(options)
    assert last == "exec qurl slurm attempt runs/grpo_qwen2.5_32b"
    assert "#SBATCH --no-kill" not in script(ClusterConfig())  # it has no rollout nodes


def test_a_percent_sign_in_the_run_folder_is_not_slurms():
    text = script(ClusterConfig(), QUICK, "train.run_dir=runs/50%")
    assert "--output=runs/50%%/slurm/job.log\n" in text


@pytest.mark.parametrize("run_dir", ["runs/my run", "runs/my\\nrun", 'runs/\\"x\\"'])
def test_a_run_folder_that_no_sbatch_line_can_carry_is_refused(run_dir):
    with pytest.raises(ConfigError, match="train.run_dir: Slurm takes no log"):
        script(ClusterConfig(), QUICK, f'train.run_dir="{run_dir}"')


def test_the_sites_lines_come_before_the_run_and_in_quotes_where_they_need_them():
    site = SiteConfig(prolog=("module load cuda",), environment={"NCCL_IB_HCA": "=a,b c"})
    text = re.sub("#  .*\n", "", script(ClusterConfig(site=site)))  # the steps, for people
    assert text.endswith(
        "\nset -e\nexport NCCL_IB_HCA='=a,b c'\nmodule load cuda\n\n"
        "# The next line starts these steps; N is the attempt.\n"
        "exec qurl slurm attempt runs/quickstart\n"
    )


def test_a_command_reaches_bash_word_by_word():
    words = ("printf", "%s\\n", "a b", "$HOME", "it's", "", "x$PWD")
    text = render(Script("x", "x", Component(1, 1, 1), words), ClusterConfig())
    bash = ["bash", "-c", text.splitlines()[-1]]
    printed = subprocess.run(bash, capture_output=True, text=True).stdout
    assert printed.splitlines() == list(words[2:])


@pytest.mark.parametrize(("node_gpus", "option"), [(0, []), (2, ["2"]), (None, ["8"])])
def test_a_command_is_one_task_on_one_node_with_the_gpus_it_is_given(node_gpus, option):
    words = ["convert", "--hf", "a", "--out", "b"]
    text = render(command_job(words, ClusterConfig(), node_gpus), ClusterConfig())
    assert re.findall("#SBATCH --gpus-per-node=(.*)", text) == option
    assert "--nodes=1\n" in text and "--signal" not in text
    assert text.endswith(" qurl convert --hf a --out b\n")


def test_an_unknown_command_is_one_sentence():
    with pytest.raises(ConfigError, match="--kind command: train is unknown; known: convert, exp"):
        command_job(["train"], ClusterConfig(), None)


def test_steps_take_their_part_of_the_job_and_a_rank_that_fails_ends_the_others():
    cluster, config = ClusterConfig(), load(BIG)
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    train = step("train", layout.training, cluster, ["qurl"], folder="logs")
    engines = step("engines", layout.rollout, cluster, ["qurl"], first_node=2, together=False)
    assert {"--relative=0", "--nodes=2", "--kill-on-bad-exit=1", "--export=ALL"} <= set(train)
    others = {"--relative=2", "--nodes=2", "--kill-on-bad-exit=0", "--no-kill", "--export=ALL"}
    assert others <= set(engines) and "--no-kill" not in train


def contained(kind: str, image: str, *mounts: str) -> ClusterConfig:
    return ClusterConfig(
        container=ContainerConfig(kind=kind, image=image, mounts=mounts), site=SITE
    )


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (ClusterConfig(site=SITE), "qurl train"),
        (
            contained("pyxis", "me/qurl", "/data", "/a:/b"),
            "--container-image=me/qurl --container-workdir={} --container-mounts=/data,/a:/b "
            "--container-env=NCCL_SOCKET_IFNAME,NCCL_IB_HCA qurl train",
        ),
        (
            contained("apptainer", "q.sif", "/data", "/a:/b"),
            "apptainer exec --nv --bind /data,/a:/b --pwd {} q.sif qurl train",
        ),
    ],
)
def test_a_command_is_put_into_the_container(cluster, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shlex.join(inside(cluster, ["qurl", "train"])) == words.format(tmp_path)


def test_what_the_site_sets_goes_before_what_an_apptainer_image_sets():
    text = script(contained("apptainer", "q.sif"))
    for line in ("NCCL_IB_HCA='=a,b c'", "NCCL_SOCKET_IFNAME=bond0"):
        assert f"\nexport {line}\n" in text and f"\nexport APPTAINERENV_{line}\n" in text
    assert "APPTAINERENV" not in script(ClusterConfig(site=SITE))


@pytest.mark.parametrize("file", sorted((FOLDER / "clusters").glob("*.toml")), ids=lambda f: f.stem)
def test_every_cluster_file_that_ships_is_read_and_written_back_the_same(file, tmp_path):
    cluster, again = load_cluster(file), tmp_path / "again.toml"
    again.write_text(to_toml(cluster))
    assert load_cluster(again) == cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[job]\npartitoin = 'a'", "unknown key job.partitoin; did you mean job.partition?"),
        ("[nodes]\ngpus = 8", "unknown section nodes; did you mean node?"),
        ("[node]\ngpus = 'eight'", "node.gpus must be of type int, got 'eight'"),
        ("[node]\ngpus = 8\ncpus = 4", "node.cpus=4 gives some of node.gpus=8 no CPU; raise it"),
        ("[job]\nlayout = 'split'", "unknown key job.layout"),
        ("[job]\ntime_limit = '24h'", "job.time_limit must be like 24:00:00 or 2-00:00:00"),
        ("[job]\nsignal_s = 30", "job.signal_s must be 60 or more"),
        ("[job]\ntime_limit = '00:10:00'", "job.signal_s=900 leaves nothing of job.time_limit"),
        ("[container]\nkind = 'pyxis'", "container.kind=pyxis and container.image='' contradict"),
        (
            "[container]\nkind = 'pyxis'\nimage = 'q.sqsh'",
            "container.image=q.sqsh: pyxis takes a file only by a path that begins with / or ./; "
            "write ./q.sqsh",
        ),
        ("[container]\nimage = 'a.sif'", "container.kind=none and container.image='a.sif' contr"),
        ("[site]\nshared = ['runs']", "site.shared must be absolute folders, got 'runs'"),
        ("[site.environment]\nA = 1", "site.environment must be strings by variable, got A = 1"),
        ("[site.environment]\nWANDB_API_KEY = 'x'", "leave secrets to files that only you can"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_one_sentence_with_file_and_key(text, said, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_cluster(file)
    assert said in str(error.value)
    assert str(error.value).startswith(f"cluster file {file}: ")


def test_a_cluster_file_that_is_not_there_leads_to_those_that_ship(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; these ship: .*h100"):
        load_cluster(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("limit", "seconds"), [("00:30:00", 1800), ("24:00:00", 86400), ("2-01:00:05", 176405)]
)
def test_a_time_limit_in_seconds(limit, seconds):
    assert JobConfig(time_limit=limit).time_limit_s == seconds
