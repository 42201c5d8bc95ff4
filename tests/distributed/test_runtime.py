"""Who speaks what: tensors of GPUs over NCCL, all else over gloo; and which device a rank has."""

import datetime
import gc
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor import cpu, megatron
from qurl_megatron.actor.megatron import RankLost, kept_on_lead, megatron_runtime, on_lead, share
from qurl_megatron.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit import filesystem, launch
from qurl_megatron.kit.errors import ConfigError, Interrupted
from tests.support.ranks import run_on_ranks
from tests.support.waiting import wait_until

CUDA = torch.device("cuda", 0)


def meet_as_on_gpus(parallel: ParallelConfig) -> int:
    """A rank whose groups have two backends as on GPUs: torch's fake one stands for NCCL."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers it

    spoken = megatron._backend(CUDA)
    spoken = spoken.replace("nccl", "fake") if ":" in spoken else "cuda:fake"
    megatron._backend = lambda device: spoken
    with megatron_runtime(parallel) as ranks:
        groups = dist.distributed_c10d._world.pg_map
        assert len(groups) > 10  # Megatron's are among them
        for group in groups:
            assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"
            assert group.bound_device_id is None  # barriers would go there
        for group in (ranks.tensor.group, ranks.copies.group, None):
            found = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, dist.get_rank(), group=group)
            assert len(set(found)) == len(found) and None not in found
            dist.barrier(group)
    return 0


def test_objects_and_barriers_go_over_gloo_in_every_group():
    parallel = ParallelConfig(tensor=2, data=2)
    assert launch.launch(meet_as_on_gpus, (parallel,), parallel.world_size) == 0


def act_on_rank_0(folder) -> int:
    def act() -> str:
        assert dist.get_rank() == 0
        return "found"

    def fail(error: Exception) -> None:
        assert dist.get_rank() == 0
        raise error

    failures = (
        ConfigError("the reward has no score"),
        Interrupted("a stop"),
        EngineError("no engine", status=400),
    )
    with megatron_runtime(ParallelConfig(data=2)) as ranks:
        assert on_lead(act, ranks, waiting_for="it") == "found"
        assert kept_on_lead(act, ranks, waiting_for="it") == ("found" if ranks.leads else None)
        for error in failures:
            with pytest.raises(type(error), match=str(error)) as raised:
                on_lead(partial(fail, error), ranks, waiting_for="it")
            assert vars(raised.value) == vars(error)
            assert (raised.value is error) == ranks.leads  # whose traceback says where it was
        (folder / f"rank-{ranks.rank}").touch()
    return 0


def test_what_comes_of_rank_0s_work_comes_to_every_rank(tmp_path):
    assert launch.launch(act_on_rank_0, (tmp_path,), 2) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1"}


def halt_where_the_disk_is_full(device) -> None:
    from qurl_megatron.training.guard import Collapse
    from qurl_megatron.training.loop import Run
    from qurl_megatron.training.state import TrainState

    def finish(state: TrainState) -> None:
        raise ConfigError("report.html cannot be written")

    recipe = RunConfig(model=ModelConfig(path="x"), data=DataConfig(task="chain_sum"))
    with megatron_runtime(ParallelConfig(data=2)) as ranks:
        lead = SimpleNamespace(drain_events=lambda step: {}, journal=SimpleNamespace(finish=finish))
        mine = lead if ranks.leads else None
        run = Run(recipe, SimpleNamespace(ranks=ranks), None, None, mine, TrainState(3), 3)
        with pytest.raises(Collapse, match="reward fell; report.html cannot.*; step 3 is saved"):
            run._end(Collapse("reward fell"))


def test_a_halted_run_says_so_on_every_rank_although_its_report_cannot_be_written(tmp_path):
    run_on_ranks(halt_where_the_disk_is_full, 2, "gloo", tmp_path)


def look_for_what_costs_a_start(device) -> None:
    cpu.install()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    for expected in (0.9, 0.8):  # Adam's step is the learning rate while the gradient stays
        weight.grad = torch.ones(2)
        optimizer.step()
        torch.testing.assert_close(weight.data, torch.full((2,), expected))
        assert weight.is_leaf and weight.requires_grad
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()

    from megatron.core.jit import jit_fuser

    assert jit_fuser(look_for_what_costs_a_start) is look_for_what_costs_a_start
    assert "torch._dynamo" not in sys.modules
    assert gc.isenabled() and gc.get_freeze_count() > 100_000


def test_a_rank_on_a_cpu_trains_without_the_compiler_and_collects_only_its_own(tmp_path):
    run_on_ranks(look_for_what_costs_a_start, 1, "gloo", tmp_path)


def lose_rank_0(device, meeting) -> None:
    """In a world of less patience than the harness'."""
    rank = dist.get_rank()
    dist.barrier()  # both go on at once
    dist.destroy_process_group()
    wait = datetime.timedelta(seconds=4)
    dist.init_process_group("gloo", f"file://{meeting}", timeout=wait, rank=rank, world_size=2)
    told = meeting.with_name("told")
    if rank == 0:
        wait_until(told.exists)
    else:
        with pytest.raises(RankLost, match="rank 1 waited 2 hours for rank 0 .rollouts"):
            share(None, waiting_for="rollouts")
        told.touch()


def test_who_has_waited_for_too_long_tells_for_what(tmp_path):
    run_on_ranks(lose_rank_0, 2, "gloo", tmp_path, tmp_path / "again")


def hear_that_rank_0_is_gone(device) -> None:
    dist.barrier()  # else rank 1 may still be on its way to the meeting
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    else:
        with pytest.raises(
            RankLost, match="rank 1 lost contact with rank 0 or another rank .*rollouts"
        ):
            share(None, waiting_for="rollouts")


def test_a_rank_that_is_gone_is_named(tmp_path):
    run_on_ranks(hear_that_rank_0_is_gone, 2, "gloo", tmp_path)


def train_on_the_cpu_beside_gpus(device) -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    with megatron_runtime(ParallelConfig(tensor=2)) as ranks:
        assert ranks.device == torch.device("cpu")
        # What Megatron, and the model's builder, ask.
        assert torch.cuda.current_device() == torch.device("cpu")
        assert not torch.cuda.is_available() and not torch.cuda.device_count()


def test_ranks_that_speak_gloo_leave_gpus_alone(tmp_path):
    run_on_ranks(train_on_the_cpu_beside_gpus, 2, "gloo", tmp_path)


@pytest.fixture
def gpus(monkeypatch):
    """A process that sees some GPUs, which CUDA calls by these names."""

    def see(*uuids: str, local_rank: int = 0) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=uuids[device.index]),
        )

    return see


def test_a_rank_takes_the_gpu_of_its_number_or_the_last_one(gpus):
    gpus("a", "b", "c", local_rank=2)
    assert megatron._device() == torch.device("cuda", 2)
    gpus("a", "b", local_rank=2)  # one rank too many: told when all have met
    assert megatron._device() == torch.device("cuda", 1)
    gpus("c", local_rank=2)
    assert megatron._device() == torch.device("cuda", 0)


def gather(monkeypatch, *others: str) -> None:
    def all_gather_object(found: list, mine: str) -> None:
        found[:] = [mine, *others]

    monkeypatch.setattr(dist, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)


def test_ranks_that_see_one_gpu_each_must_see_different_ones(gpus, monkeypatch):
    gpus("a")
    gather(monkeypatch, "b", "c")
    megatron._refuse_shared_gpus(CUDA)
    gather(monkeypatch, "b", "a")
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 have the same GPU \(a\)"):
        megatron._refuse_shared_gpus(CUDA)
    # Parts of one GPU are told apart.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    gather(monkeypatch, "MIG-2")
    megatron._refuse_shared_gpus(CUDA)
    gather(monkeypatch, "MIG-1")
    with pytest.raises(ConfigError, match="same GPU .MIG-1"):
        megatron._refuse_shared_gpus(CUDA)


def look_for_checkpoints(device, run_dir) -> None:
    from qurl_megatron.training import newest
    from qurl_megatron.training.state import TrainState

    if dist.get_rank() > 0:  # its node has the folders of a minute ago
        newest.folders = lambda run_dir: []
    with megatron_runtime(ParallelConfig(tensor=2)) as ranks:
        path, state = newest.newest_whole(run_dir, ranks)
    assert (path.name, state) == ("step_000004", TrainState(step=4, accuracy=0.5))


def test_rank_0_decides_where_all_resume(tmp_path):
    from qurl_megatron.training.state import TrainState

    for step in (2, 4):
        folder = tmp_path / f"run/checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        TrainState(step=step, accuracy=0.5).write(folder)
    run_on_ranks(look_for_checkpoints, 2, "gloo", tmp_path, tmp_path / "run")


def test_a_file_that_never_appears_is_told_of(tmp_path):
    with pytest.raises(ConfigError, match="not visible on .* set train.run_dir to a folder"):
        filesystem.wait_until_seen(tmp_path / "a/b/c", "x", key="train.run_dir", seconds=0.6)
