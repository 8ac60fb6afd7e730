"""Ranks of a process group that die or come too late are named by the others' errors."""

import datetime
import os
import re
import time

import moire
import pytest
import torch
import torch.distributed as dist
from ranks import NEEDS_GLOO, join_processes

SIZE, LOST = 3, 1


def call(group):
    x, idx = torch.ones(4, 8), torch.arange(4)[:, None] % SIZE
    return group.dispatch(x, idx, torch.ones(4, 1))


def work(rank, folder, how):
    store = dist.FileStore(str(folder / "store"), SIZE)
    timeout = datetime.timedelta(seconds=3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    group = moire.ExpertParallel(num_experts=SIZE)
    call(group)
    if rank == LOST and how == "dies":
        os._exit(0)
    if rank == LOST:
        time.sleep(6)
    begin = time.monotonic()
    try:
        call(group)
        said = "nothing"
    except moire.Error as error:
        said = f"{error.code.name} {error}"
    (folder / f"said.{rank}").write_text(f"{time.monotonic() - begin:.1f} {said}")
    if rank != LOST and how == "is late":
        time.sleep(8)  # the late rank's call needs these ranks' connections
    os._exit(0)


@NEEDS_GLOO
@pytest.mark.parametrize("how", ("dies", "is late"))
def test_a_lost_rank_is_named(how, tmp_path):
    ranks = torch.multiprocessing.spawn(work, (tmp_path, how), nprocs=SIZE, join=False)
    join_processes(ranks.processes, 60)
    for rank in set(range(SIZE)) - {LOST}:
        seconds, said = (tmp_path / f"said.{rank}").read_text().split(" ", 1)
        lost = "left or did not come" if how == "dies" else "came after the group's timeout"
        assert re.match(rf"RANK_FAILED ExpertParallel: rank {LOST} {lost} \(.+\)", said)
        assert float(seconds) < 20
    if how == "is late":
        said = (tmp_path / f"said.{LOST}").read_text()
        assert "the other ranks have given this one up" in said
