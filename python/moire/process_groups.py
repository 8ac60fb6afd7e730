"""Process groups of torch.distributed: their ranks, and what those agree on."""

import contextlib
import time

import torch
import torch.distributed as dist

from .arrays import Torch
from .errors import Code, Error, invalid, unsupported
from .recipes import FORMATS
from .values import described

_GRACE = 10.0  # seconds in which a rank says that its call has failed as well

# What ranks tell each other of a call besides numbers, and of how many things.
_WORDS = ("dispatch", "moe", "combine", None, *FORMATS, *Torch.compute_dtypes)
_MOST_TOLD = 10


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


def compare(call, counts, ours, tell):
    """The most of each count that a rank has, where all make this call with the same values `ours`,
    by name; or an error on all. tell(record) is that of every rank.

    NOTE: gloo ends a process that gets more than it waits for: records are of one size.
    """
    ours = {"the call": call, **ours}
    mine = [~_WORDS.index(value) if value in _WORDS else value for value in ours.values()]
    told = list(zip(*tell([*counts, *mine, *[0] * (_MOST_TOLD - len(mine))]).tolist()))
    for name, values in zip(ours, told[len(counts) :]):
        check_equal(call, name, [_WORDS[~value] if value < 0 else value for value in values])
    return [max(count) for count in told[: len(counts)]]


@contextlib.contextmanager
def naming_lost(call, group):
    """Makes of what the group says of a rank that has left, or did not come in the group's time, an
    error that names it. Gloo says the connection's address; NCCL ends the process.
    """
    try:
        yield
    except RuntimeError as error:
        if "/gloo/" not in str(error):  # the files of its sources stand before what it says
            raise
        said = str(error).splitlines()[0]
        raise Error(Code.RANK_FAILED, f"{call}: {_lost(group)} ({said})") from error


def _lost(group):
    """Which ranks do not answer, or last: each says in the group's store that its call failed."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    silent, end = set(range(size)), time.monotonic() + _GRACE
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        store.set(f"moire failed {rank}", str(store.add("moire failed", 1)))
        while silent and time.monotonic() < end:
            silent = {other for other in silent if not store.check([f"moire failed {other}"])}
            time.sleep(0.02)
        if not silent:
            last = max(range(size), key=lambda other: int(store.get(f"moire failed {other}")))
    except (AttributeError, RuntimeError):  # it is gone, with the rank that kept it perhaps
        return "a rank has left or did not come, which one is not known without the group's store"
    if silent:
        names = ", ".join(map(str, sorted(silent)))
        return f"rank{'s' if len(silent) > 1 else ''} {names} left or did not come"
    if last == rank:
        return "the other ranks have given this one up, after the group's timeout"
    return f"rank {last} came after the group's timeout"


def want(*tensors):
    """Whether autograd is to pass on a gradient of one of them."""
    return int(torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def wanting(wants, tensor, *others):
    """The tensor with a gradient, where another rank's has one: its backward pass waits for this
    rank's.
    """
    if not wants or not torch.is_grad_enabled() or want(tensor, *others):
        return tensor
    return tensor.detach().requires_grad_()


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
