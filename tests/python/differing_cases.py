"""Cases of ranks that were told different things, or make different calls: all of them get an error
that says which rank has what, and are in step after it.
"""

import functools

import moire
import pytest
import torch
import worlds
from worlds import EXPERTS, World, at_once, case, in_three_steps


@case
def what_the_ranks_are_told_has_to_be_equal(at):
    if at.size == 1:
        return
    told = 64 if at.rank == 1 else 32
    form = "mxfp8" if at.rank == 1 else None
    if at.group is None:
        with pytest.raises(moire.InvalidArgument, match="32 on rank 0 but 64 on rank 1"):
            moire.ExpertParallel(num_experts=EXPERTS, max_tokens=told)
        found = "dispatch_format is None on rank 0 but mxfp8 on rank 1"
        with pytest.raises(moire.InvalidArgument, match=found):
            moire.ExpertParallel(num_experts=EXPERTS, max_tokens=32, dispatch_format=form)
        overflow = "drop" if at.rank == 1 else "refuse"
        found = "overflow is refuse on rank 0 but drop on rank 1"
        with pytest.raises(moire.InvalidArgument, match=found):
            moire.ExpertParallel(num_experts=EXPERTS, max_tokens=32, overflow=overflow)
        calls_that_differ_are_refused_on_all_ranks(at)
        return
    idx, ones = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for others, widths in ((None, (8, 8)), ("fp8_block", (64, 64)), ("mxfp8", (64, 60))):
        x = torch.zeros(3, widths[at.rank == 1])
        options = {"num_experts": EXPERTS, "max_tokens": 4, "dispatch_format": form or others}
        with pytest.raises(moire.InvalidArgument, match="x_.*recv is .* of the window of rank"):
            moire.ExpertParallel(at.group, **options).dispatch(x, idx, ones)
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=told)
    x = torch.zeros(3, 8)
    for _ in range(2):  # and all are in step
        with pytest.raises(moire.InvalidArgument, match="x_recv is .* of the window of rank"):
            group.dispatch(x, torch.zeros(3, 1, dtype=torch.int64), x[:, :1])


def calls_that_differ_are_refused_on_all_ranks(at):
    """Where their hosts wait for each other; there are no windows that compare calls."""
    first = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    first = [tensor.to(worlds.DEVICE) for tensor in first]
    others = {
        "x.dtype is torch.float32 on rank 0 but torch.float16": [first[0].half(), *first[1:]],
        r"x.shape\[1\] is 64 on rank 0 but 32": [first[0][:, :32].contiguous(), *first[1:]],
        r"topk_idx.shape\[1\] is 2 on rank 0 but 1": [first[0], *(t[:, :1] for t in first[1:])],
    }
    for most in (None, 4) if worlds.DEVICE.type == "cpu" else (None,):
        group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=most)
        for found, other in others.items():
            with pytest.raises(moire.InvalidArgument, match=f"dispatch: {found} on rank 1, must"):
                group.dispatch(*(other if at.rank == 1 else first))
        assert not group.dispatch(*first).x.any()  # and all are in step
    if worlds.DEVICE.type != "cpu":
        return
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=4)
    got, large = (
        moire.ExpertParallel(num_experts=EXPERTS, max_tokens=n).dispatch(*first) for n in (4, 5)
    )
    others = {
        "y.dtype is torch.float32 on rank 0 but torch.bfloat16": (got.x.bfloat16(), got),
        r"y.shape\[1\] is 64 on rank 0 but 60": (got.x[:, :60].contiguous(), got),
        rf"y.shape\[0\] is {4 * at.size} on rank 0 but {5 * at.size}": (large.x, large),
    }
    for found, other in others.items():
        with pytest.raises(moire.InvalidArgument, match=f"combine: {found} on rank 1, must"):
            group.combine(*(other if at.rank == 1 else (got.x, got)))
    large = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=5)
    with pytest.raises(moire.InvalidArgument, match="max_tokens is 4 on rank 0 but 5 on rank 1"):
        (large if at.rank == 1 else group).dispatch(*first)
    with pytest.raises(moire.InvalidArgument, match="the call is combine on rank 0 but dispatch"):
        group.dispatch(*first) if at.rank == 1 else group.combine(got.x, got)
    assert not group.combine(got.x, got).any()


@case
def what_experts_make_on_one_rank_alone_is_refused_on_all(at):
    """Another type, by autocast; or another width."""
    if at.size == 1 or at.group is not None or worlds.DEVICE.type != "cpu":
        return  # windows compare every call, and a GPU's host waits for nobody
    world = World(at, 3, torch.float32)
    group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=64)
    given = group, *given_to(world, group)
    dtype, others = torch.bfloat16 if at.rank == 1 else None, list(given)
    if at.rank == 1:
        others[3] = given[3][:, :60].contiguous()
    found = "y.dtype is torch.float32 on rank 0 but torch.bfloat16 on rank 1, must"
    for way, call in ((at_once, "moe"), (in_three_steps, "combine")):
        with pytest.raises(moire.InvalidArgument, match=f"{call}: {found}"):
            way(*given, autocast=dtype)
        with pytest.raises(moire.InvalidArgument, match=rf"{call}: y.shape\[1\] is 64 on rank 0"):
            way(*others)
        wanted = way(*given)
        assert torch.equal(way(*given, autocast=dtype, compute_dtype=torch.float32), wanted)
    with pytest.raises(moire.InvalidArgument, match="the call is dispatch on rank 0 but moe on"):
        (at_once if at.rank == 1 else in_three_steps)(*given)


@case
def a_gradient_that_one_rank_wants_is_made(at):
    """The others' backward passes are there for it, though none of their tensors wants one."""
    if at.group is not None or worlds.DEVICE.type != "cpu":
        return  # windows, and hosts of GPUs that wait for nobody, do not know of each other's
    world = World(at, 3, torch.float32)
    for most in (None, 64):
        group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=most)
        for way in (in_three_steps, at_once, functools.partial(at_once, micro_batches=3)):
            wanted = world.together(group, way)[1:]
            for leaf in range(4):
                for rank in {0, at.size - 1}:
                    leaves = [leaf == i and rank == at.rank for i in range(4)]
                    y, *grads = world.together(group, way, leaves)[1:]
                    assert torch.equal(y, wanted[0])
                    for is_leaf, grad, exact in zip(leaves, grads, wanted[1:]):
                        assert torch.equal(grad, exact) if is_leaf else grad is None
            with torch.no_grad():
                assert not way(group, *given_to(world, group)).requires_grad


def given_to(world, group):
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    mine = world.mine
    return world.x[mine], world.w1[own], world.w2[own], world.idx[mine], world.weights[mine]
