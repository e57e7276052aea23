"""The pool itself: values come back, and every kind of failure is readable and leaves no damage."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.baselines import TrainOptions, train_fsdp2
from tests.dist_pool import RanksFailed, fake_world, local_ranks, run_ranks
from tests.fully_shard.runs import train_eager


def sum_of_ranks(rank: int, world_size: int, factor: int) -> tuple[int, float]:
    value = torch.tensor(float(rank * factor))
    dist.all_reduce(value)
    return os.getpid(), value.item()


def random_and_groups(rank: int, world_size: int) -> tuple[float, int, int]:
    sample = torch.rand(()).item()
    before = len(dist.distributed_c10d._world.pg_map)
    dist.new_group([0, 1])
    return sample, before, torch.get_num_threads()


def mesh_round_trip(rank: int, world_size: int, shape: tuple[int, ...]) -> torch.Tensor:
    names = ("a", "b")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    value = torch.arange(10.0).reshape(5, 2)
    sharded = distribute_tensor(value, mesh, [Shard(0)] * len(shape))
    return (sharded * 2).full_tensor()


def raise_on(rank: int, world_size: int, bad: tuple[int, ...]) -> None:
    if rank in bad:
        print(f"about to fail on rank {rank}")
        expected = 41 + rank
        assert expected == 0
    dist.barrier()


def hang_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        time.sleep(600)


def die_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise SystemExit(3)


def print_rank(rank: int, world_size: int) -> None:
    print(f"hello from {rank}")


def returns_function(rank: int, world_size: int) -> object:
    return lambda: rank


@pytest.mark.dist
def test_values_come_back_and_workers_are_reused() -> None:
    first = run_ranks(sum_of_ranks, 2, 10)
    second = run_ranks(sum_of_ranks, 2, 100)
    assert [value for _, value in first] == [10.0, 10.0]
    assert [value for _, value in second] == [100.0, 100.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first} | {os.getpid()}) == 3


def count_threads(rank: int, world_size: int) -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_case_leaves_no_threads_behind() -> None:
    """Groups that something still holds keep their threads, which slow down every later case."""
    before = run_ranks(count_threads, 2)
    for name in ("tiny", "uneven"):
        for train in (train_fsdp2, train_eager):
            run_ranks(train, 2, name, TrainOptions(steps=1, mesh_shape=(1, 2)))
    assert run_ranks(count_threads, 2) == before


@pytest.mark.dist
def test_each_case_starts_with_same_seeds_and_no_groups() -> None:
    first = run_ranks(random_and_groups, 2)
    assert first == run_ranks(random_and_groups, 2)
    assert first[0] == first[1]
    assert first[0][1:] == (1, 1)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_meshes_of_earlier_cases_do_not_leak(world_size: int) -> None:
    expected = torch.arange(10.0).reshape(5, 2) * 2
    shapes = [(world_size,), (1, world_size), (world_size,)]
    for shape in shapes:
        for result in run_ranks(mesh_round_trip, world_size, shape):
            torch.testing.assert_close(result, expected)


@pytest.mark.dist
def test_raise_on_one_rank_is_reported_and_survived() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(raise_on, 2, (1,))
    error = failure.value
    assert set(error.errors) == {1}
    assert set(error.silent) == {0}
    text = str(error)
    assert "test_dist_pool.raise_on on 2 ranks: raised on ranks [1]" in text
    assert "assert expected == 0" in text
    assert "expected = 42" in text
    assert "about to fail on rank 1" in text
    assert "in barrier" in error.silent[0]
    assert [value for _, value in run_ranks(sum_of_ranks, 2, 1)] == [1.0, 1.0]


@pytest.mark.dist
def test_every_failing_rank_is_reported() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(raise_on, 2, (0, 1))
    assert set(failure.value.errors) == {0, 1}
    assert "expected = 41" in failure.value.errors[0]
    assert "expected = 42" in failure.value.errors[1]


@pytest.mark.dist
def test_hang_is_cut_and_shows_where() -> None:
    run_ranks(print_rank, 2)  # start the workers outside the measured time
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"no answer within 2 s from ranks \[0, 1\]") as failure:
        run_ranks(hang_on, 2, 1, timeout=2.0)
    assert time.monotonic() - start < 30.0
    assert "in hang_on" in failure.value.silent[1]
    assert "in barrier" in failure.value.silent[0]
    assert [value for _, value in run_ranks(sum_of_ranks, 2, 1)] == [1.0, 1.0]


@pytest.mark.dist
def test_interrupted_case_leaves_no_answers_behind() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(hang_on, 2, 1)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert [value for _, value in run_ranks(sum_of_ranks, 2, 1)] == [1.0, 1.0]


@pytest.mark.dist
def test_killed_rank_is_named() -> None:
    with pytest.raises(RanksFailed, match=r"process died on ranks \[0\]") as failure:
        run_ranks(die_on, 2, 0)
    assert failure.value.died == {0: -signal.SIGKILL}
    assert [value for _, value in run_ranks(sum_of_ranks, 2, 1)] == [1.0, 1.0]


@pytest.mark.dist
def test_system_exit_is_an_error_of_the_case() -> None:
    with pytest.raises(RanksFailed, match="SystemExit: 3"):
        run_ranks(exit_on, 2, 0)


@pytest.mark.dist
def test_output_of_ranks_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(print_rank, 2)
    shown = capsys.readouterr().out
    assert "[rank 0] hello from 0" in shown
    assert "[rank 1] hello from 1" in shown


@pytest.mark.dist
def test_what_cannot_be_sent_is_explained() -> None:
    with pytest.raises(TypeError, match="Use a module-level function"):
        run_ranks(lambda rank, world_size: None, 2)
    with pytest.raises(RanksFailed, match=r"returns_function.*lambda"):
        run_ranks(returns_function, 2)


def test_fake_world_of_any_size() -> None:
    with fake_world(1024, rank=77):
        mesh = init_device_mesh("cpu", (16, 64), mesh_dim_names=("dp_replicate", "dp_shard"))
        assert dist.get_world_size() == 1024
        assert tuple(mesh.get_coordinate() or ()) == (1, 13)
        assert dist.get_process_group_ranks(mesh.get_group("dp_replicate"))[:2] == [13, 77]
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_world(2):
        _ = 1 / 0
    assert not dist.is_initialized()


def test_local_ranks_compute_collectives_on_real_data() -> None:
    with local_ranks(4) as mode:
        value = mode.rank_map(lambda rank: torch.full((2,), float(rank)))
        dist.all_reduce(value)
        assert value.reconcile().tolist() == [6.0, 6.0]
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        sharded = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
        assert sharded.full_tensor().reconcile().tolist() == list(range(10))
