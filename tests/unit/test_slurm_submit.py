"""From the command line to the queue; sbatch and its like are small scripts here."""

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from qurl_megatron.checkpoints.integrity import write_record
from qurl_megatron.cli import main
from qurl_megatron.cluster import checks, commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig, ContainerConfig, JobConfig, load_cluster
from qurl_megatron.config import RunConfig, load
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.training.state import claim
from tests.support.models import tiny_checkpoint
from tests.support.programs import Programs
from tests.support.slurm_scripts import FOLDER, ROOT

QUICK = ROOT / "launch/recipes/quickstart.toml"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A shared folder with a cluster file; the model's lies beside it, and is shared as well."""
    monkeypatch.chdir(tmp_path)
    shares(tmp_path, tmp_path.parent)
    return tmp_path


def shares(here: Path, *folders: Path) -> None:
    """Write the cluster file: these are what all nodes see."""
    listed = json.dumps([str(folder) for folder in folders])
    (here / "cluster.toml").write_text(f"[site]\nshared = {listed}\n")


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Programs:
    """A Slurm that takes everything."""
    programs = Programs(tmp_path, monkeypatch)
    programs("sbatch", f"cat > {tmp_path}/script; echo 41")
    programs("squeue", "")
    programs("scancel", "")
    programs("scontrol", "echo PartitionName=main Default=YES MaxTime=UNLIMITED")
    return programs


def submit(model: Path, *words: str) -> int:
    overrides = [f"model.path={model}", "parallel.tensor=2", "train.run_dir=run", *words]
    return main(["slurm", "submit", str(QUICK), *overrides, "--cluster", "cluster.toml"])


def refused(capsys, model: Path, *words: str) -> str:
    """The sentence with which a run is refused."""
    assert submit(model, *words) == 2
    return capsys.readouterr().err


def test_a_submitted_run_leaves_all_that_its_job_will_read(here, slurm, model, capsys):
    assert submit(model) == 0
    own = here / "run/slurm"
    assert folder.recipe(here / "run").parallel.tensor == 2
    assert (own / "job.sbatch").read_text() == (here / "script").read_text()
    assert json.loads((own / "job.json").read_text())["job"] == 41
    assert [path.name for path in own.glob(".*")] == []
    printed = capsys.readouterr().out
    assert "job 41; run folder run" in printed
    assert "tail -F run/slurm/job.log run/slurm/latest/train-0.log" in printed


def test_a_dry_run_writes_and_submits_nothing(here, slurm, model, capsys):
    assert submit(model, "--dry-run") == 0
    assert "nothing was submitted" in capsys.readouterr().out
    assert slurm.called == ["sbatch --test-only", "scontrol --oneliner show partition"]
    assert not (here / "run").exists()


def test_a_run_whose_job_is_in_the_queue_is_not_submitted_again(here, slurm, model, capsys):
    assert submit(model) == 0
    slurm("squeue", "echo '41|PENDING||N/A|N/A|'")
    error = refused(capsys, model)
    assert "run has job 41 in the queue (PENDING)" in error and "`qurl slurm cancel run`" in error


def test_a_job_that_slurm_refuses_leaves_no_trace(here, slurm, model, capsys):
    slurm("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert "sbatch --test-only refused (1): invalid partition\n" in refused(capsys, model)
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("state", "called"),
    [("RUNNING", "scancel --batch --signal=TERM 41"), ("PENDING", "scancel 41")],
)
def test_a_running_job_saves_and_a_waiting_one_leaves(state, called, here, slurm, model):
    assert submit(model) == 0
    slurm("squeue", f"echo '41|{state}||N/A|N/A|'")
    assert main(["slurm", "cancel", "run"]) == 0
    assert slurm.called[-1] == called


CONVERT = ["--kind", "command", "--cluster", "cluster.toml", "--", "quantize", "--model", "m"]


def test_a_tool_is_submitted_with_a_log_of_its_own(here, slurm, capsys):
    assert main(["slurm", "submit", *CONVERT]) == 0
    assert "job 41; its log is runs/slurm/quantize-41.log" in capsys.readouterr().out
    assert (here / "runs/slurm").is_dir()


def test_each_run_of_a_study_that_is_neither_done_nor_queued_is_a_job(here, slurm, model, capsys):
    own = json.dumps([f"model.path={model}", "train.steps=7"])
    (here / "study.toml").write_text(
        f'recipe = "{QUICK}"\noverrides = {own}\nseeds = [0, 1, 2]\n'
        '[methods.acr]\noverrides = ["parallel.tensor=2"]\n'
    )
    runs = [here / f"out/runs/acr-int8-seed-{seed}" for seed in (0, 1, 2)]
    done = runs[0] / "checkpoints/step_000007"
    done.mkdir(parents=True)
    (done / "state.json").write_text('{"step": 7}')
    folder.write_job(runs[1], 40)
    slurm("squeue", "echo '40|PENDING||N/A|N/A|'")
    words = ["--kind", "study", "--cluster", "cluster.toml", "study.toml", "out"]
    assert main(["slurm", "submit", *words]) == 0
    printed = capsys.readouterr().out
    assert "acr-int8-seed-0: it is done\nacr-int8-seed-1: job 40 is in the queue\n" in printed
    assert "acr-int8-seed-2:\nnodes: 1 with 2 training ranks\n" in printed
    assert folder.recipe(runs[2]).train.seed == 2 and folder.job(runs[2]) == 41


def test_the_script_is_printed_without_any_check(here, slurm, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["slurm", "render", str(QUICK), "--cluster", "cluster.toml"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


RECIPES = sorted((ROOT / "launch/recipes").glob("*.toml"))
PLANNED = [path for path in RECIPES if "sglang" in path.read_text()]


@pytest.mark.parametrize("recipe", PLANNED, ids=lambda path: path.stem)
def test_the_overrides_of_a_plan_can_be_pasted(recipe, here, slurm, monkeypatch, capsys):
    """They are one shell's words, and submit, render and show make the same of them."""
    monkeypatch.setattr(checks, "free", lambda path: 1 << 60)
    config = load(recipe)
    shape = ROOT / "launch/models/DeepSeek-R1-Distill-Qwen-1.5B"  # of what a stage begins with
    if (named := ROOT / "launch/models" / Path(config.model.path).name).exists():
        shape = named
    shutil.copytree(shape, config.model.path)
    Path(config.model.path, "model.safetensors").write_text("weights")
    for path in (config.data.path, config.data.eval_path):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("prompts")
    given, gpus = ["algo.clip_high=0.3"], 32 if re.search("14b|3[02]b", recipe.stem) else 8
    given_gpus = ["--gpus", str(gpus), "--up-to", "0", "--top", "1"]
    assert main(["plan", str(recipe), *given, *given_gpus]) == 0
    out = capsys.readouterr().out
    words = [str(recipe), *shlex.split(out.rpartition("as overrides: ")[2])]
    assert set(given) < set(words)
    cluster = ["--cluster", "cluster.toml"]
    assert main(["slurm", "submit", *words, *cluster, "--dry-run"]) == 0
    nodes = capsys.readouterr().out.splitlines()[0]
    assert sum(map(int, re.findall(r"(?:: |, )(\d+) with", nodes))) == gpus // 8, nodes
    for command in (["slurm", "render", *words, *cluster], ["show", *words]):
        assert main(command) == 0
        assert load(recipe, words[1:]).train.run_dir in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.path=nowhere"], "`qurl train RECIPE train.steps=0`, called here once, makes it"),
        (["model.path=Qwen/None", "warmstart.steps=0"], "`hf download OWNER/NAME --revision COM"),
        (['data.task=""', "data.path=x.jsonl"], "data.path=x.jsonl: x.jsonl cannot be read (No"),
        (["reward.kind=", "reward.function=own.py:score"], "own.py cannot be read (No such"),
        (["train.run_dir=/elsewhere/run"], "which lies in none of site.shared="),
        (["parallel.data=6", "train.micro_batch=8", "data.prompts_per_step=60"], "12 ranks"),
        (["parallel.tensor=8"], "parallel.tensor=8"),
    ],
)
def test_what_would_fail_in_the_first_minute_is_said_at_once(
    overrides, sentence, here, slurm, model, capsys
):
    assert sentence in refused(capsys, model, *overrides)
    assert slurm.called == []


CHECKPOINTS = [("model.path={}",), ("algo.kl_coef=0.1", "algo.reference={}")]


def elsewhere(model: Path, here: Path, words: tuple[str, ...]) -> tuple[Path, list[str]]:
    """A copy of the model that nothing but its damage makes unfit, and the words that name it."""
    copy = here / "other"
    shutil.copytree(model, copy)
    return copy, [word.format(copy) for word in words]


@pytest.mark.parametrize("words", CHECKPOINTS, ids=lambda w: w[-1])
def test_every_checkpoint_of_the_recipe_must_be_known_readable_and_whole(
    words, here, slurm, model, capsys
):
    copy, named = elsewhere(model, here, words)
    assert submit(model, *named, "--dry-run") == 0
    for file in ("model.safetensors", "config.json"):
        (copy / file).rename(copy / "aside")
        (copy / file).symlink_to("/proc/self/mem")  # whose first bytes are an input/output error
        assert f"{named[-1]}: {copy}/{file} cannot be read (Input/" in refused(
            capsys, model, *named
        )
        (copy / "aside").replace(copy / file)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    error = refused(capsys, model, *named)
    assert f"{named[-1]}: {copy}/model.safetensors.index.json names model-2" in error
    (copy / "config.json").write_text('{"model_type": "mamba"}')
    assert "mamba" in refused(capsys, model, *named)


def megatron_checkpoint(model: Path, folder: Path) -> Path:
    """The files of a Megatron checkpoint that are looked at before the queue, and their record."""
    shutil.copytree(model, folder / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (folder / name).write_text("weights")
    write_record(folder, {})
    return folder


def test_a_file_that_a_megatron_checkpoint_lacks_is_named(here, slurm, model, capsys):
    given = megatron_checkpoint(model, here / "megatron")
    assert submit(given, "--dry-run") == 0
    (given / "__0_0.distcp").write_text("weig")
    error = refused(capsys, given)
    assert f"model.path={given}: {given}/__0_0.distcp has 4 bytes where 7 were written" in error


def test_the_checkpoint_that_a_run_goes_on_from_must_be_readable(here, slurm, model, capsys):
    newest = megatron_checkpoint(model, here / "run/checkpoints/step_000003")
    (newest / "state.json").write_text('{"step": 3}')
    (newest / "__0_0.distcp").write_text("weig")  # ranks set it aside, and take an older one
    assert submit(model, "--dry-run") == 0
    (newest / "__0_0.distcp").unlink()
    (newest / "__0_0.distcp").symlink_to("/proc/self/mem")
    error = refused(capsys, model)
    assert "train.run_dir=run: run/checkpoints/step_000003/__0_0.distcp cannot be read" in error


@pytest.mark.parametrize(
    "words",
    [
        ("model.path={}/other",),
        ("algo.kl_coef=0.1", "algo.reference={}/other"),
        ('data.task=""', "data.path={}/prompts.jsonl"),
        ("data.eval_path={}/prompts.jsonl",),
        ("reward.kind=", "reward.function={}/own.py:score"),
        ("rollout.backend=sglang", "rollout.rendezvous=run/engines", "sync.dir={}"),
    ],
    ids=lambda words: words[-1],
)
def test_what_the_recipe_names_must_lie_where_all_nodes_see_it(
    words, here, slurm, model, tmp_path_factory, capsys
):
    local = tmp_path_factory.mktemp("local")
    shutil.copytree(model, local / "other")
    (local / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (local / "own.py").write_text("def score(**fields): return 1.0")
    shares(here, here, model.parent, local)
    named = [word.format(local) for word in words]
    assert submit(model, *named, "--dry-run") == 0
    shares(here, here, model)
    error = refused(capsys, model, *named)
    assert f"{named[-1].removesuffix(':score')} is {local}" in error
    assert "which lies in none of site.shared=" in error


@pytest.mark.parametrize("words", [("sync.dir=/dev/shm",), ("algo.name=ppo",)])
def test_what_no_other_node_or_no_rank_reads_may_lie_anywhere(words, here, slurm, model):
    shares(here, here, model)
    assert submit(model, *words, "--dry-run") == 0


def test_a_working_folder_that_is_not_shared_is_told_of(
    here, slurm, model, monkeypatch, tmp_path_factory, capsys
):
    away = tmp_path_factory.mktemp("away")
    shares(away, here, model)
    monkeypatch.chdir(away)
    assert submit(model, f"train.run_dir={here}/run", "--dry-run") == 0
    assert f"the working folder, {away}, lies in none of site.shared" in capsys.readouterr().out


def test_a_recipe_that_fits_one_gpu_is_refused_on_a_smaller_one():
    config = load(ROOT / "launch/recipes/grpo_qwen2.5_14b.toml")
    big = load_cluster(FOLDER / "clusters/h100.toml")
    assert " of 80 GiB on the fullest GPU" in checks.check_memory(config, big)
    small = replace(big, node=replace(big.node, gpu_gib=40))
    with pytest.raises(ConfigError, match="node.gpu_gib: .* GiB do not fit in 40 in phase"):
        checks.check_memory(config, small)


def test_a_file_system_without_locks_is_named(here, slurm, model, monkeypatch, capsys):
    def flock(file, how) -> None:
        if os.fstat(file.fileno()).st_dev == os.stat(without_locks).st_dev:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    without_locks = here
    said = "/run cannot be written (Function not implemented): its file system has no locks; have "
    assert said.removeprefix("/") in refused(capsys, model)
    with pytest.raises(ConfigError, match=re.escape(said)):
        claim(here / "run", quick(model))
    without_locks, home = Path("/dev/shm"), here / "home"
    home.mkdir()
    (home / ".cache").symlink_to(without_locks)
    monkeypatch.setenv("HOME", str(home))
    assert "or set SGLANG_JIT_CACHE_DIR to a" in refused(
        capsys, model, "rollout.backend=sglang", "rollout.colocate=true"
    )


def test_room_for_the_checkpoints_to_come(tmp_path, monkeypatch, model):
    config = load(QUICK, [f"model.path={model}", f"train.run_dir={tmp_path}"])
    arch = checks.check_model(config)
    size = checks.checkpoint_bytes(config, arch)
    monkeypatch.setattr(checks, "free", lambda path: 3 * size)
    assert "a checkpoint" in checks.check_disk(config, arch)
    monkeypatch.setattr(checks, "free", lambda path: 3 * size - 1)
    with pytest.raises(ConfigError, match="checkpoint.keep=2 and one on its way"):
        checks.check_disk(config, arch)


def contained(image: str) -> ClusterConfig:
    return ClusterConfig(container=ContainerConfig(kind="apptainer", image=image))


def quick(model: Path, *words: str) -> RunConfig:
    return load(QUICK, [f"model.path={model}", "train.run_dir=run", *words])


SHORT = {"PartitionName": "short", "MaxTime": "04:00:00"}
REFUSED = {
    "container.image=/images/qurl.sqsh does not exist": lambda _: checks.check_container(
        contained("/images/qurl.sqsh")
    ),
    "container.image=qurl.sif does not exist": lambda _: checks.check_container(
        contained("qurl.sif")
    ),
    "site.shared is missing in the cluster file": lambda model: checks.check_shared(
        "train.run_dir", model, ClusterConfig()
    ),
    "job.time_limit=24:00:00 is more than MaxTime=04:00:00 of partition short.*lower it": (
        lambda _: checks.check_limits(JobConfig(time_limit="24:00:00"), SHORT)
    ),
    "is not in train.run_dir=run, .*=auto": lambda model: checks.check_engines(
        quick(model, "rollout.rendezvous=shared")
    ),
    "unset it here, and have site.prolog read it": lambda model: checks.check_engines(
        quick(model, 'rollout.urls=["http://a:1"]')
    ),
}


@pytest.mark.parametrize(("sentence", "check"), REFUSED.items(), ids=REFUSED)
def test_each_check_says_what_stands_in_the_way(sentence, check, model, monkeypatch):
    monkeypatch.setenv("QURL_API_KEY", "secret")  # of this shell, and no job inherits it
    with pytest.raises(ConfigError, match=sentence):
        check(model)
    checks.check_engines(quick(model, "rollout.rendezvous=run/engines"))


@pytest.mark.parametrize("said", ["17", "17;cluster"])
def test_the_id_of_a_submitted_job(said, slurm):
    slurm("sbatch", f"cat >/dev/null; echo '{said}'")
    assert commands.submit("") == 17


def test_an_answer_without_an_id_is_one_sentence(slurm):
    slurm("sbatch", "cat >/dev/null; echo Submitted")
    with pytest.raises(ConfigError, match="said 'Submitted' in place of a job id"):
        commands.submit("")


def test_variables_of_the_shell_do_not_overrule_the_script(slurm, monkeypatch):
    monkeypatch.setenv("SBATCH_EXPORT", "ALL")
    slurm("sbatch", 'cat >/dev/null; [ -z "$SBATCH_EXPORT" ] && echo 1')
    assert commands.submit("") == 1


def test_a_job_is_found_in_the_queue_with_what_is_known_of_its_times(slurm):
    lines = "7|PENDING|Priority|N/A|N/A|\\n5|RUNNING|None|2026-11-22T09:00:00|Unknown|n[1-2]\\n"
    slurm("squeue", f"printf '{lines}'")
    assert commands.queued(7) == commands.Queued("PENDING", "Priority", "")
    began = datetime(2026, 11, 22, 9).timestamp()
    assert commands.queued(5) == commands.Queued("RUNNING", "", "n[1-2]", began)
    assert commands.queued(6) is None


def test_the_facts_of_a_partition_are_those_of_the_default_one_where_none_is_named(slurm):
    one, other = "PartitionName=a Default=NO MaxTime=1-00:00:00", "PartitionName=b Default=YES"
    slurm("scontrol", f'case "$4" in "") echo {one}; echo {other};; *) echo {one}; esac')
    assert commands.partition_facts("")["PartitionName"] == "b"
    assert commands.partition_facts("a")["MaxTime"] == "1-00:00:00"
