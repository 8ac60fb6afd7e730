"""Process groups of torch.distributed: their ranks, and what those agree on."""

import torch
import torch.distributed as dist

from .errors import invalid, unsupported
from .values import described


def ranks_of(call, group, or_else=""):
    """(the group, rank, size) of a process group, None for the default one."""
    if not (dist.is_available() and dist.is_initialized()):
        raise invalid(f"{call}: torch.distributed has no process group, needs init_process_group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise invalid(
            f"{call}: group is {described(group)}, must be a process group that this rank belongs "
            f"to{or_else}"
        )
    return group, dist.get_rank(group), dist.get_world_size(group)


def agree(call, group, **ours):
    """An error on every rank where one was told something else than the first."""
    told = [None] * dist.get_world_size(group)
    if len(told) == 1:
        return
    dist.all_gather_object(told, ours, group=group)
    for name in ours:
        check_equal(call, name, [theirs[name] for theirs in told])


def check_equal(call, name, told):
    """That every rank was told what the first was; of ranks that know what all were, all raise."""
    for rank, value in enumerate(told):
        if value != told[0]:
            raise invalid(
                f"{call}: {name} is {told[0]} on rank 0 but {value} on rank {rank}, must be equal "
                "on all ranks"
            )


def nccl_ranks(call, group, window_bytes):
    """(rank, size, an ncclUniqueId of all ranks) for windows of so many bytes: a call of all."""
    group, rank, size = ranks_of(call, group)
    backends = dist.get_backend_config(group)
    if "cuda:nccl" not in backends:
        raise unsupported(
            f"{call}: the process group has {backends}, needs cuda:nccl, since NCCL connects "
            "windows; give the process group itself to moire.ExpertParallel or moire.nn.MoE"
        )
    agree(call, group, window_bytes=window_bytes)
    nccl_id = [torch.cuda.nccl.unique_id() if rank == 0 else None]
    dist.broadcast_object_list(nccl_id, dist.get_global_rank(group, 0), group=group)
    return rank, size, nccl_id[0]
