"""Whole runs that lose engines or room on the disk, with embedded engines and real processes."""

import json
import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import QuantConfig, SyncConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.wire.files import FilesSender
from tests.support.disks import exhaust_names, fill, small_disk
from tests.support.fake_engine import FakeEngine
from tests.support.models import tiny_checkpoint
from tests.support.policies import build, recipe
from tests.support.publishing import adopting
from tests.support.ranks import run_on_ranks
from tests.support.runs import Run, make_recipe


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("fleet"))


def test_a_run_goes_on_while_any_engine_can_come_back_and_then_saves_itself(tiny):
    run = Run(tiny, "healing", "rollout.max_restarts=1")
    with run.process():
        run.wait(lambda: run.step() >= 2)
        run.kill(0)
        run.wait(lambda: run.happened("engine-0 joined") == 2)
        since = run.step()
        run.wait(lambda: run.step() >= since + 4)  # it has its restart back
        killed = {index: run.engine(index) for index in (0, 1)}
        run.kill(0, 1)

        def killed_again() -> bool:
            for index in [i for i in killed if run.engine(i) not in (None, killed[i])]:
                run.kill(index)  # before it serves anything, whichever comes first
                del killed[index]
            return not killed

        run.wait(killed_again)
        assert run.ended() == 1
        assert not run.left()
    assert re.search(
        r"^qurl: .*engine-0 .*exited with status -9.*engine-1 .*exited with status -9.*"
        r"step (\d+) is saved, start again to go on from it$",
        run.stderr(),
    )
    assert run.stderr().count("\n") == 1
    (saved,) = run.saved()
    assert saved == run.step()

    again = Run(tiny, "healing", "rollout.max_restarts=1", f"train.steps={saved + 2}")
    again.finish()
    assert f"resuming {run.dir} after step {saved}" in again.stdout()
    run.assert_whole(saved + 2)
    report = (run.dir / "report.html").read_text()
    for event in ("engine-0 died", "engine-0 joined", "engine-0 gave up", "engine-1 gave up"):
        assert event in report, event


def fill_until_it_ends(run: Run, disk: Path) -> None:
    with run.process() as process:
        run.wait(lambda: run.step() >= 2)
        while process.poll() is None:
            fill(disk)
            time.sleep(0.01)
        assert run.ended() == 2
        assert not run.left()


def test_a_run_whose_disk_fills_up_saves_itself_and_goes_on_when_there_is_room(tiny, tmp_path):
    with small_disk(tmp_path / "disk", "8m") as disk:
        options = ("rollout.engines=1", "sync.transport=files", f"sync.dir={disk}")
        run = Run(tiny, "full", *options)
        fill_until_it_ends(run, disk)  # old versions are deleted meanwhile
        assert re.search(
            # A bucket, or where the last one did fit, an engine's receipt. What is free is what the
            # file that was half written has given back.
            rf"^qurl: {disk}/\S+ cannot be written \(No space left on device\): "
            r"(\S+ MB are needed, )?\d\.\d MB are free; .*sync\.dir.*; "
            r"step \d+ is saved, start again",
            run.stderr(),
        )
        assert run.stderr().count("\n") == 1
        (saved,) = run.saved()
        assert saved == run.step() >= 2

        (disk / "filler").unlink()
        again = Run(tiny, "full", *options, f"train.steps={saved + 2}")
        again.finish()
        assert run.step() == saved + 2


def test_a_run_that_can_log_no_more_saves_itself_and_says_what_is_missing(tiny, tmp_path):
    checkpoints, versions = tmp_path / "checkpoints", tmp_path / "versions"
    checkpoints.mkdir()
    with small_disk(tiny.parent / "unlogged", "8m") as disk:
        (disk / "checkpoints").symlink_to(checkpoints)
        options = ("rollout.engines=1", f"sync.dir={versions}", "train.save_rollouts=false")
        run = Run(tiny, "unlogged", *options)
        fill_until_it_ends(run, disk)  # the page that a log ends in has room for a while
        assert re.fullmatch(
            rf"qurl: {disk}/\w+\.jsonl cannot be written \(No space left on device\): "
            r"\d\.\d MB are free; free some, or set train\.run_dir to a folder with more; "
            r"step \d+ is saved, start again to go on from it\n",
            run.stderr(),
        )
        (saved,) = run.saved()
        (disk / "filler").unlink()
        again = Run(tiny, "unlogged", *options, f"train.steps={saved + 2}")
        again.finish()
        assert f"resuming {run.dir} after step {saved}" in again.stdout()
        assert run.step() == saved + 2


def refused(publisher, version: int) -> str:
    try:
        publisher.publish(version)
    except ConfigError as error:
        return str(error)
    return "nothing"


def publish_where_there_is_no_room(device, config, disk, other, out):
    from qurl_megatron.publish.publisher import Publisher

    with megatron_runtime(config.parallel) as ranks, ExitStack() as stack:
        policy = build(config, ranks)
        fleet = None
        if ranks.leads:
            engine = stack.enter_context(FakeEngine(embedded=True))
            fleet = stack.enter_context(adopting(engine, scheme="int8", log_dir=out))
        sync = SyncConfig(bucket_mb=1.0)
        name = f"rank{ranks.rank}"
        sender = FilesSender(disk / "versions", name, leads=ranks.leads)
        elsewhere = FilesSender((disk if ranks.leads else other) / "apart", name, leads=True)
        quant = QuantConfig(scheme="int8")
        publisher = Publisher(policy, fleet, quant, sync, sender)
        apart = Publisher(policy, fleet, quant, sync, elsewhere)

        def no_room(which, version: int, leave: int) -> str:
            if ranks.leads:
                fill(disk, leave=leave)
            dist.barrier()
            error = refused(which, version)
            dist.barrier()
            if ranks.leads:
                (disk / "filler").unlink()
            left = [path.name for path in disk.rglob("*.tmp")]
            assert not left, left
            return error

        publisher.publish(0)
        dist.barrier()
        assert not list((disk / "versions").glob("v*"))  # nobody needs them any more
        errors = [no_room(publisher, 1, leave=3 << 20)]
        if ranks.rank == 1:
            exhaust_names(other)
        dist.barrier()
        errors.append(refused(apart, 3))
        if fleet:  # it may have a part of the last one, and answers nobody
            assert fleet.version == 0 and not fleet.serving() and engine.paused.is_set()
        publisher.publish(4)
        if fleet:
            assert engine.version == fleet.names.of(4)
        (out / f"{name}.json").write_text(json.dumps(errors))


def test_every_rank_learns_that_one_of_them_has_no_room(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", vocab_size=8192)
    config = recipe(folder, dict(tensor=2))
    with (
        small_disk(tmp_path / "disk", "32m") as disk,
        small_disk(tmp_path / "other", "1m,nr_inodes=100") as other,
    ):
        run_on_ranks(
            publish_where_there_is_no_room, 2, "gloo", tmp_path, config, disk, other, tmp_path
        )
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    shard, names = first
    assert re.search(r"/v000001-rank\d-b\d+ cannot be written \(No space", shard)
    assert re.search(r"other/apart/v000003-rank1-b\d+ cannot be written \(No space", names)
    assert "no room for another file, however small (inodes" in names
    # The output layer comes last: 4096 rows of 64 in FP32 on each rank.
    assert re.search(r": 1\.\d MB are needed, \d\.\d MB are free; .*sync\.dir", shard)
