"""Cases of moe(group=, micro_batches=): the uncut call, but for the order in which gradients of
weights are added up.
"""

import functools

import moire
import pytest
import torch
import worlds
from moe_cases import LEAVES, MOES
from moire import nn
from torch.utils.checkpoint import checkpoint
from worlds import EXPERTS, HIDDEN, WIDTH, World, at_once, case, close

COUNTS = 2, 3, 9  # ranks have 13, 0, 40 and 7 tokens
CALLS = [
    *MOES,
    (torch.bfloat16, {"dispatch_format": "fp8_block"}, {"recipe": "fp8_block"}),
    (torch.bfloat16, {}, {"recipe": "mxfp8_fast"}),
    (torch.bfloat16, {}, {"compute_dtype": torch.bfloat16, "autocast": torch.float16}),
]


def in_parts(count):
    return functools.partial(at_once, micro_batches=count)


def of_pieces(world, group, count, options):
    """Gradients of w1 and w2, in double, of calls on each part alone, the last first."""
    found, (x, idx, weights, grad_y) = (
        [],
        (
            t[world.mine].tensor_split(count)
            for t in (world.x, world.idx, world.weights, world.grad_y)
        ),
    )
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    for i in reversed(range(count)):
        w = [t[own].clone().requires_grad_() for t in (world.w1, world.w2)]
        y = at_once(group, x[i], *w, idx[i], weights[i], **options)
        y.backward(grad_y[i].to(y.dtype))
        found.append([t.grad.double() for t in w])
    return zip(*found)


def is_sum(found, pieces):
    """Of pieces that were rounded, one added to the other and rounded each time."""
    total, most = torch.zeros_like(pieces[0]), 0.0
    for piece in pieces:
        total = total + piece
        most += total.norm() + piece.norm()
    return ((found - total).norm() <= torch.finfo(found.dtype).eps / 2 * most).item()


@case
def moe_in_parts_is_the_uncut_call(at):
    """To the bit, whatever lies in the windows between the calls, with fewer tokens than parts."""
    for number, (dtype, of_group, options) in enumerate(CALLS):
        if "overflow" in of_group:  # which parts have to themselves
            of_group = {}
        at.sum(torch.zeros(1, device=worlds.DEVICE))  # see above: no copies while others wait
        count, k = COUNTS[number % 3], (5, 1, 32)[number // 3 % 3]
        world = World(at, k, dtype, seed=number)
        at.sum(world.x.new_zeros(1))
        group = {"num_experts": EXPERTS, "max_tokens": (64, 40)[number % 2], **of_group}
        group = moire.ExpertParallel(at.group, **group)
        every = None
        for is_leaf in LEAVES:
            found = []
            for way in (at_once, in_parts(count), in_parts(count)):
                if at.group is not None:
                    at.group.window.fill_(255)
                run = functools.partial(way, **options)
                found.append(world.together(group, run, is_leaf)[1:])
                moire.check()  # nobody's rows, whatever they are, were not quantised
            for of, (uncut, first, again) in enumerate(zip(*found)):
                assert (uncut is None) == (first is None) == (again is None)
                if uncut is not None:
                    assert torch.equal(first, again) and (of in (2, 3) or torch.equal(first, uncut))
            every = every or found[1]
        for grad, pieces in zip(every[2:4], of_pieces(world, group, count, options)):
            assert is_sum(grad, pieces)
            *others, largest = sorted(pieces, key=torch.linalg.vector_norm)
            assert not (largest.any() and is_sum(grad, others))
        own = slice(group.first_expert, group.first_expert + group.num_local_experts)
        given = world.x[world.mine], world.w1[own], world.w2[own]
        given += world.idx[world.mine], world.weights[world.mine]
        with torch.no_grad():
            assert torch.equal(in_parts(count)(group, *given, **options), found[0][0])


@case
def moe_in_parts_equals_one_rank_with_every_expert(at):
    for k in (1, 3, 32):
        at.sum(torch.zeros(1, device=worlds.DEVICE))
        world = World(at, k, torch.float32)
        y, *grads = world.alone()
        at.sum(world.x.new_zeros(1))
        for count, most in ((2, None), (8, 40), (5, 64)):
            group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=most)
            own, found, x, w1, w2, weights = world.together(group, in_parts(count))
            assert torch.equal(weights, grads[3][world.mine])
            for mine, wanted in ((found, y[world.mine]), (x, grads[0][world.mine])):
                assert close(mine, wanted, k, torch.float32)
            for mine, wanted in ((w1, grads[1][own]), (w2, grads[2][own])):
                assert close(mine, wanted, count, torch.float32)


@case
def modules_add_up_the_gradients_of_parts(at):
    """Into main_grad or .grad, at once or in backward_dw(), with biases; a first microbatch
    overwrites.
    """
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    world = World(at, 3, torch.bfloat16)
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    x, idx, weights = (t[world.mine] for t in (world.x, world.idx, world.weights))
    at.sum(world.x.new_zeros(1))
    for adds, delays in ((False, False), (True, False), (False, True), (True, True)):
        options = {"accumulate_into_main_grad": adds, "delay_wgrad_compute": delays}
        options.update(dtype=torch.bfloat16, device=worlds.DEVICE, bias=not delays)
        for is_first in (None, True) if adds else (None,):
            grads = []
            for parts in (1, 3):
                with worlds.ONE_AT_A_TIME:
                    torch.manual_seed(5)
                    local = nn.GroupedMLP(group.num_local_experts, HIDDEN, WIDTH, **options)
                with torch.no_grad():
                    local.fc1.weight.copy_(world.w1[own])
                    local.fc2.weight.copy_(world.w2[own])
                both = local.fc1.weight, local.fc2.weight
                for p in both if adds else ():
                    p.main_grad = torch.full(p.shape, 3.0, device=p.device)
                layer = nn.MoE(local, lambda x: (idx, weights), group=group, micro_batches=parts)
                for _ in range(2):  # a second pass begins anew, and adds to the first
                    y = layer(x, is_first_microbatch=is_first)
                    (y * world.grad_y[world.mine]).sum().backward()
                    if at.group is not None:
                        at.group.window.fill_(255)
                    local.backward_dw()
                of_weights = [p.main_grad if adds else p.grad for p in both]
                biases = (p.grad for name, p in local.named_parameters() if "bias" in name)
                grads.append([t.clone() for t in (*of_weights, *biases)])
                local.backward_dw()  # there is nothing left
                assert all(map(torch.equal, of_weights, grads[-1]))
            for uncut, cut in zip(*grads):
                assert close(cut, uncut, 8, cut.dtype) and cut.dtype == uncut.dtype


@case
def layers_in_parts_stand_beside_others(at):
    """Behind one another, side by side, and made again in the backward."""
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    world, grads = World(at, 3, torch.float32), []
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    idx, weights = world.idx[world.mine], world.weights[world.mine]
    at.sum(world.x.new_zeros(1))

    def step(x, w1, w2, counts):
        first, second, third = (in_parts(n) for n in counts)
        x = first(group, x, w1, w2, idx, weights)
        return second(group, x, w1, w2, idx, weights) + third(group, x, w1.sin(), w2, idx, weights)

    for counts, reentrant in (
        ((1,) * 3, None),
        ((3, 1, 2), None),
        ((2, 3, 1), True),
        ((4, 2, 3), False),
    ):
        leaves = [
            t.clone().requires_grad_() for t in (world.x[world.mine], world.w1[own], world.w2[own])
        ]
        if reentrant is None:
            y = step(*leaves, counts)
        else:
            y = checkpoint(step, *leaves, counts, use_reentrant=reentrant)
        (y * world.grad_y[world.mine]).sum().backward()
        grads.append([y.detach(), *(t.grad for t in leaves)])
    for other in grads[1:]:
        assert torch.equal(other[0], grads[0][0])
        assert all(close(a, b, 20, torch.float32) for a, b in zip(other, grads[0]))


@case
def bad_micro_batches_are_refused_before_anything_is_sent(at):
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    world = World(at, 3, torch.float32)
    given = {"x": world.x, "w1": world.w1, "w2": world.w2}
    given.update(topk_idx=world.idx, topk_weights=world.weights)
    local = nn.GroupedMLP(group.num_local_experts, HIDDEN, WIDTH, device=worlds.DEVICE)
    for bad in (0, -1, True, 2.0, None):
        found = f"micro_batches is {bad}, must be a positive integer"
        with pytest.raises(moire.InvalidArgument, match=f"moe: {found}"):
            moire.moe(**given, group=group, micro_batches=bad)
        with pytest.raises(moire.InvalidArgument, match=f"MoE: {found}"):
            nn.MoE(local, lambda x: x, group=group, micro_batches=bad)
    found = "micro_batches is 2, but there is no group"
    with pytest.raises(moire.InvalidArgument, match=f"moe: {found}"):
        moire.moe(**given, micro_batches=2)
    if at.size == 1:
        with pytest.raises(moire.InvalidArgument, match=f"MoE: {found}"):
            nn.MoE(local, lambda x: x, micro_batches=2)


@case
def more_of_a_part_than_there_is_room_for_is_an_error_or_dropped(at):
    """All of them go to the first rank, which has room for 6 of each, and for 2 of each part."""
    x = torch.ones(6, HIDDEN, device=worlds.DEVICE)
    idx, weights = x[:, :1].long() - 1, x[:, :1]
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=6)
    w1 = x.new_ones(group.num_local_experts, 2 * WIDTH, HIDDEN)
    given = x, w1, w1[:, :WIDTH].mT.contiguous(), idx, weights
    y = moire.moe(*given, group=group, micro_batches=3)
    assert (y == y[0, 0]).all() and y[0, 0] > 0
    if at.group is None:
        return
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=4, overflow="drop")
    dropped = moire.moe(*given, group=group, micro_batches=3)
    assert torch.equal(dropped, y)  # 2 of 4 / 3, rounded up
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=3, overflow="drop")
    dropped = moire.moe(*given, group=group, micro_batches=3)
    assert torch.equal(dropped[::2], y[::2]) and not dropped[1::2].any()
    if worlds.DEVICE.type == "cpu":
        group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=3)
        with pytest.raises(moire.InvalidArgument, match="has 2 tokens for rank 0, which has room"):
            moire.moe(*given, group=group, micro_batches=3)


@case
def ranks_that_cut_a_call_into_different_parts_are_all_told(at):
    """Also where what they send is of one size; and all are in step after it."""
    if at.size == 1 or worlds.DEVICE.type != "cpu":
        return  # a GPU's host waits for nobody
    world, tokens = World(at, 3, torch.float32), slice(at.rank, at.rank + 1)
    for most, *counts in ((None, 2, 3), (64, 2, 3), (1, 2, 3), (64, 1, 2), (64, 2, 1)):
        found = "moe: micro_batches is {} on rank 0 but {} on rank 1, must be equal on all ranks"
        found = found.format(*counts)
        if at.group is not None:
            found = "of the window of rank|rank . calls"
        group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=most)
        own = slice(group.first_expert, group.first_expert + group.num_local_experts)
        given = group, world.x[tokens], world.w1[own], world.w2[own]
        given += world.idx[tokens], world.weights[tokens]
        wanted = at_once(*given)
        with pytest.raises(moire.InvalidArgument, match=found):
            in_parts(counts[at.rank == 1])(*given)
        assert torch.equal(in_parts(2)(*given), wanted)


@case
def gradients_of_parts_are_those_of_the_forward_in_whatever_autocast_backward_runs(at):
    """None of it in the other type of 16 bits, and FP32 of the weights."""
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        at.sum(torch.zeros(1, device=worlds.DEVICE))  # see above: no copies while others wait
        world = World(at, 3, dtype)
        at.sum(world.x.new_zeros(1))
        wanted = world.together(group, in_parts(3))[1:]
        for other in (torch.float16, torch.bfloat16):
            with torch.autocast(worlds.DEVICE.type, other):  # which at_once leaves
                found = world.together(group, in_parts(3))[1:]
            assert all(map(torch.equal, found, wanted))
