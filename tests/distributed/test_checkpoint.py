"""Saved and loaded, a policy goes on as if nothing had happened, in another layout too."""

import contextlib
import errno
import functools
import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.checkpoints.integrity import RECORD, all_damage, write_record
from qurl_megatron.checkpoints.places import folders
from qurl_megatron.config import OptimizerConfig, ParallelConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import free
from qurl_megatron.training.state import STATE, TrainState, latest, set_aside
from tests.support import critics
from tests.support.disks import contents, fill, flip, small_disk
from tests.support.models import tiny_checkpoint
from tests.support.policies import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    assert_goes_on,
    build,
    improve_at,
    joined,
    load_and_go_on,
    recipe,
    save_then_go_on,
    whole,
)
from tests.support.ranks import run_on_ranks, run_with_stand_in

ROUNDING = {"float32": 1e-5, "bfloat16": 1e-3}
"""Of weights after a step in another layout."""


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "before, after, exact",
    [
        (dict(tensor=2), dict(tensor=2), True),
        (dict(tensor=2, data=2), dict(tensor=2, data=2), True),
        (dict(tensor=2, pipeline=2), dict(tensor=1), False),
        (dict(data=2), dict(tensor=2), False),
        (dict(context=2), {}, False),
    ],
)
def test_a_loaded_policy_takes_the_same_next_step(
    dtype, before, after, exact, backend, qwen2, tmp_path
):
    saving, loading = (recipe(qwen2, layout, dtype=dtype) for layout in (before, after))
    rounding = 0.0 if exact else ROUNDING[dtype]
    assert_goes_on(saving, loading, backend, tmp_path, rounding=rounding)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
@pytest.mark.parametrize(
    "before, after",
    [
        ("EP2 x DP4", "EP2 x DP4"),
        ("EP2 x PP2", "EP2 x TP2"),
        ("EP2 x CP2", "alone"),
        ("TP2", "EP2 x PP2"),
        pytest.param("EP2 x DP4", "EP2 x CP2", marks=pytest.mark.thorough),
        pytest.param("alone", "EP2 x DP2", marks=pytest.mark.thorough),
    ],
)
def test_experts_go_on_on_other_ranks(dtype, before, after, backend, tmp_path):
    layouts = {**LAYOUTS, **EXPERT_LAYOUTS, "alone": {}}
    model = tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    saving, loading = (recipe(model, layouts[name], dtype=dtype) for name in (before, after))
    rounding = 0.0 if before == after else ROUNDING[dtype]
    assert_goes_on(saving, loading, backend, tmp_path, rounding=rounding)


def load_with_another_optimizer(device, config, run_dir):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        checkpoint.load(latest(run_dir), policy)
        for group in policy.optimizer.param_groups:
            # Two updates are done: one of warm-up, and one of the eight that are left.
            assert group["lr"] == pytest.approx(5e-4 * 7 / 8)
            assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
        improve_at(policy, config, 2)
        assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4 * 5 / 8)


def test_a_schedule_goes_on_bit_by_bit_and_a_changed_optimizer_takes_effect(qwen2, tmp_path):
    """Not what the optimizer saved of itself."""
    cosine = OptimizerConfig(lr=1e-3, warmup_steps=1, schedule="cosine", decay_steps=8)
    config = replace(recipe(qwen2, {}, dtype="bfloat16"), optimizer=cosine)
    assert_goes_on(config, config, "gloo", tmp_path)
    other = replace(cosine, lr=5e-4, schedule="linear", beta1=0.8, beta2=0.9, eps=1e-6)
    changed = replace(config, optimizer=other)
    run_on_ranks(load_with_another_optimizer, 1, "gloo", tmp_path, changed, tmp_path / "run")


def build_both(config, ranks):
    critic = critics.build(config, ranks)
    critic.folder = config.model.path
    return build(config, ranks), critic


def go_on_with_both(policy, critic, config, out):
    """A second step of both; their weights, the critic's under its own prefix."""
    improve_at(policy, config, 2)
    critics.learn(critic, 1)
    learned = joined(critics.named(critic))
    weights = whole(policy) | {f"critic.{name}": value for name, value in learned.items()}
    if policy.ranks.leads:
        torch.save(weights, out)


def save_both_then_go_on(device, config, run_dir, out):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy, critic = build_both(config, ranks)
        improve_at(policy, config, 1)
        critics.learn(critic, 0)
        saved = whole(policy)
        checkpoint.save(run_dir, policy, TrainState(step=1), keep=1, critic=critic)
        if ranks.leads:
            torch.save(saved, run_dir / "saved.pt")
        go_on_with_both(policy, critic, config, out)


def load_both_and_go_on(device, config, run_dir, out):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy, critic = build_both(config, ranks)
        checkpoint.load(latest(run_dir), policy, critic)
        go_on_with_both(policy, critic, config, out)


@pytest.mark.parametrize(
    "before, after, dtype",
    [
        (dict(tensor=2, data=2), dict(tensor=2, data=2), "bfloat16"),
        pytest.param(
            *(dict(tensor=2, pipeline=2), dict(data=2), "float32"),
            marks=pytest.mark.thorough("nccl"),
        ),
    ],
)
def test_a_loaded_critic_takes_the_same_next_step(before, after, dtype, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    saving, loading = (recipe(folder, layout, dtype=dtype) for layout in (before, after))
    bodies, rounding = (save_both_then_go_on, load_both_and_go_on), 0.0 if before == after else 1e-5
    assert_goes_on(saving, loading, backend, tmp_path, rounding=rounding, bodies=bodies)
    assert any("critic." in name for name in torch.load(tmp_path / "a.pt"))


def test_a_run_with_a_critic_converts_to_the_policy_alone(backend, tmp_path):
    from qurl_megatron.checkpoints import job
    from qurl_megatron.checkpoints.huggingface import HfReader
    from qurl_megatron.checkpoints.inspect import inspect
    from qurl_megatron.checkpoints.source import open_checkpoint
    from qurl_megatron.checkpoints.to_huggingface import to_huggingface

    config = recipe(tiny_checkpoint(tmp_path / "model", "qwen2"), dict(tensor=2), dtype="bfloat16")
    run = tmp_path / "run"
    run_on_ranks(save_both_then_go_on, 2, backend, tmp_path, config, run, tmp_path / "a.pt")
    described = inspect(open_checkpoint(run))
    assert "a critic, which no conversion takes along" in described
    job.run(to_huggingface(open_checkpoint(run), tmp_path / "hf"))
    masters, converted = torch.load(run / "saved.pt"), HfReader(tmp_path / "hf")
    assert converted.stored.keys() == masters.keys()
    (file,) = latest(run).glob("__0_0.distcp")
    flip(file)
    with pytest.raises(ConfigError, match=f"{file} has changed since .*; copy the checkpoint"):
        job.run(to_huggingface(open_checkpoint(run), tmp_path / "hf2"))
    assert "__0_0.distcp has changed" in all_damage(latest(run))[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{file} has .* bytes where .* were written; copy the"):
        open_checkpoint(run)
    # The 7 tensors of a layer, all layers' in one; embedding, last norm and output layer.
    assert f"bfloat16 ({7 + 3} tensors)" in described
    for name, value in masters.items():
        assert torch.equal(converted.whole(name).float(), value.to(torch.bfloat16).float()), name


def load_across(device, config, larger, with_critic, without):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy, critic = build_both(config, ranks)
        with pytest.raises(ConfigError, match="has a critic, and algo.advantage needs none"):
            checkpoint.load(latest(with_critic), policy)
        with pytest.raises(ConfigError, match="has no critic, and algo.advantage needs one"):
            checkpoint.load(latest(without), policy, critic)
        with pytest.raises(ConfigError, match="cannot be loaded into this model"):
            checkpoint.load(latest(without), build(larger, ranks))


def test_a_checkpoint_of_another_model_or_with_another_critic_is_refused(backend, tmp_path):
    config = recipe(tiny_checkpoint(tmp_path / "model", "qwen2"), {})
    larger = recipe(tiny_checkpoint(tmp_path / "large", "qwen2", intermediate_size=128), {})
    a, b = tmp_path / "a", tmp_path / "b"
    run_on_ranks(save_both_then_go_on, 1, backend, tmp_path, config, a, tmp_path / "a.pt")
    run_on_ranks(save_then_go_on, 1, backend, tmp_path, config, b, tmp_path / "b.pt")
    run_on_ranks(load_across, 1, backend, tmp_path, config, larger, a, b)


PARTS = ("__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "hf/config.json", STATE)


def pretend_checkpoint(run_dir, step):
    """The files of a checkpoint, without a model in them."""
    folder = run_dir / f"checkpoints/step_{step:06d}"
    (folder / "hf").mkdir(parents=True)
    TrainState(step=step).write(folder)
    for name in PARTS[:-1]:
        (folder / name).write_bytes(name.encode() * (1000 + step))
    write_record(folder, {})
    return folder


DAMAGES = {
    "has changed since it was written": flip,
    "bytes where": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "is missing": lambda path: path.unlink(),
}


@contextlib.contextmanager
def said_into(path):
    """What rank 0 prints; a forked rank's own stdout is that of the first test."""
    with path.open("a") as file, contextlib.redirect_stdout(file):
        yield


def damage_and_look(device, root):
    from qurl_megatron.training.newest import newest_whole

    with megatron_runtime(ParallelConfig(tensor=2)) as ranks, said_into(root / "said"):
        for number, (part, (what, damage)) in enumerate(
            (part, damage) for part in PARTS for damage in DAMAGES.items()
        ):
            run = root / f"run-{number}"
            if ranks.leads:
                older, newer = (pretend_checkpoint(run, step) for step in (2, 4))
                damage(newer / part)
                left = contents(newer)
            dist.barrier()
            path, state = newest_whole(run, ranks)
            assert (path.name, state) == ("step_000002", TrainState(step=2)), (part, what)
            if ranks.leads:
                assert contents(run / "checkpoints/step_000004.damaged") == left, (part, what)
                assert folders(run) == [older]
                flip(older / part)
            dist.barrier()
            with pytest.raises(ConfigError, match=f"no checkpoint in .* is whole: .*{part}"):
                newest_whole(run, ranks)
            if ranks.leads:
                assert folders(run) == [older], "nothing is touched where nothing is whole"
        if ranks.leads:
            (pretend_checkpoint(root / "old", 4) / RECORD).unlink()
        dist.barrier()
        assert newest_whole(root / "old", ranks)[0].name == "step_000004"


def test_a_damaged_cut_or_missing_file_of_a_checkpoint_is_named_and_an_older_one_taken(tmp_path):
    """One without checksums is taken as it is."""
    run_on_ranks(damage_and_look, 2, "gloo", tmp_path, tmp_path)
    said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == len(PARTS) * len(DAMAGES)
    for line, (part, what) in zip(said, ((p, w) for p in PARTS for w in DAMAGES), strict=True):
        assert f"step_000004/{part} " in line and (what in line or part == STATE), line
        assert "set aside as step_000004.damaged, and the run goes on from step_000002" in line


def look_at_what_cannot_be_read(device, run):
    from qurl_megatron.checkpoints import integrity
    from qurl_megatron.training.newest import newest_whole

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with megatron_runtime(ParallelConfig(tensor=2)) as ranks, pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:  # whose node has lost the file system
            patch.setattr(integrity, "sum_of", fail)
        with pytest.raises(ConfigError, match="step_000004/.* cannot be read .Input/output error"):
            newest_whole(run, ranks)
        patch.undo()
        if ranks.leads:
            (run / "checkpoints/step_000004" / RECORD).unlink()
            (run / "checkpoints/step_000004" / RECORD).mkdir()
        dist.barrier()
        with pytest.raises(ConfigError, match=f"step_000004/{RECORD} cannot be read"):
            newest_whole(run, ranks)


def test_a_disk_that_fails_on_one_rank_stops_all_and_sets_nothing_aside(tmp_path):
    kept = [pretend_checkpoint(tmp_path / "run", step) for step in (2, 4)]
    run_on_ranks(look_at_what_cannot_be_read, 2, "gloo", tmp_path, tmp_path / "run")
    assert folders(tmp_path / "run") == kept


def look_at_a_newer_one(device, run, part):
    from qurl_megatron.training.newest import newest_whole

    with (
        megatron_runtime(ParallelConfig()) as ranks,
        pytest.raises(ConfigError, match=f"step_000004/{part} .* this version does not know"),
    ):
        newest_whole(run, ranks)


@pytest.mark.parametrize("part", [STATE, RECORD])
def test_what_a_newer_version_wrote_is_refused_and_not_set_aside(part, tmp_path):
    older, newer = (pretend_checkpoint(tmp_path, step) for step in (2, 4))
    text = json.loads((newer / part).read_text())
    change = {"moments": "bfloat16"} if part == STATE else {"format": "qurl-files-2"}
    (newer / part).write_text(json.dumps(text | change))
    if part == STATE:
        write_record(newer, {})  # whole
    run_on_ranks(look_at_a_newer_one, 1, "gloo", tmp_path, tmp_path, part)
    assert folders(tmp_path) == [older, newer]


def begin_with_damage(device, run, damaged):
    from qurl_megatron.training.newest import refuse_damaged_together

    with megatron_runtime(ParallelConfig(tensor=2)) as ranks:
        refuse_damaged_together({"model.path": str(run), "algo.reference": str(run.parent)}, ranks)
        for part in PARTS:
            path = {"model.path": str(damaged / part.replace("/", "-"))}
            with pytest.raises(ConfigError, match=f"{part} has changed since .*; copy the check"):
                refuse_damaged_together(path, ranks)


def test_a_run_does_not_begin_with_weights_that_have_changed(tmp_path):
    """Named is a run; what has no record is taken as it is."""
    for part in (None, *PARTS):
        run = tmp_path / "damaged" / part.replace("/", "-") if part else tmp_path / "run"
        older, newest = (pretend_checkpoint(run, step) for step in (2, 4))
        for folder in (older, newest):
            (folder / "metadata.json").touch()
        flip(older / "common.pt")  # which is not what the run would begin with
        if part:
            flip(newest / part)
    run_on_ranks(begin_with_damage, 2, "gloo", tmp_path, tmp_path / "run", tmp_path / "damaged")


def test_a_damaged_checkpoint_of_the_same_step_is_not_written_over(tmp_path):
    for name in ("step_000004.damaged", "step_000004.damaged-2"):
        assert set_aside(pretend_checkpoint(tmp_path, 4)).name == name
    assert latest(tmp_path) is None


def save_where_there_is_no_room(device, config, run_dir, disk):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        checkpoint.save(run_dir, policy, TrainState(step=1), keep=2)
        used = sum(f.stat().st_size for f in run_dir.rglob("*") if f.is_file())
        for leave in (used // 2, 0):
            if ranks.leads:
                fill(disk, leave=leave)
            checkpoint.free = (lambda path: 1 << 40) if leave else free  # it was there a moment ago
            with pytest.raises(ConfigError) as error:
                checkpoint.save(run_dir, policy, TrainState(step=2), keep=2)
            said = str(error.value)
            assert "checkpoints/step_000002 cannot be written (No space left on device): " in said
            assert "MB are needed" in said and "step_000001 stays the newest checkpoint" in said
            assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000001"]
            if ranks.leads:
                (disk / "filler").unlink()
        checkpoint.save(run_dir, policy, TrainState(step=2), keep=2)


def test_a_disk_that_is_full_at_a_checkpoint_is_told_on_every_rank_and_the_old_one_stays(
    qwen2, tmp_path
):
    config = recipe(qwen2, dict(tensor=2), dtype="bfloat16")
    with small_disk(tmp_path / "disk", "16m") as disk:
        places = (disk / "run", disk)
        run_on_ranks(save_where_there_is_no_room, 2, "gloo", tmp_path, config, *places)


@pytest.mark.parametrize(
    ("run_ranks", "step"), [(run_on_ranks, 0), (run_with_stand_in, 0), (run_with_stand_in, 2)]
)
def test_every_adam_goes_on_from_a_checkpoint_before_its_first_step_and_after(
    run_ranks, step, qwen2, tmp_path
):
    """Transformer Engine's makes its state in its first step."""
    config = recipe(qwen2, dict(data=2), dtype="bfloat16")
    save = functools.partial(save_then_go_on, step=step)
    load = functools.partial(load_and_go_on, step=step, used=True)
    how = {"bodies": (save, load), "runners": (run_ranks, run_ranks)}
    assert_goes_on(config, config, "gloo", tmp_path, **how)
