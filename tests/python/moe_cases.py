"""Cases of moe(group=): dispatch, experts and combine in one call."""

import functools

import moire
import pytest
import torch
import worlds
from moire import nn
from worlds import EXPERTS, HIDDEN, WIDTH, World, at_once, case, in_three_steps

LEAVES = (True,) * 4, (False, True, False, False), (True, False, True, True)
MOES = [
    (torch.bfloat16, {}, {}),
    (torch.float32, {}, {"save_z": False}),
    (torch.bfloat16, {}, {"save_act": True, "recipe": "mxfp8"}),
    (torch.float32, {}, {"compute_dtype": torch.bfloat16}),
    (torch.bfloat16, {}, {"compute_dtype": torch.float32}),
    (torch.bfloat16, {"dispatch_format": "mxfp8"}, {"recipe": "mxfp8"}),
    (torch.bfloat16, {}, {"compute_dtype": torch.float16}),
    (torch.float32, {}, {"autocast": torch.bfloat16}),
    (torch.bfloat16, {}, {"autocast": torch.float16}),
    (torch.float16, {"max_rows": 1000, "overflow": "drop", "max_tokens": 20}, {"b2_scale": None}),
]


@case
def moe_of_a_group_is_its_three_steps(at):
    """To the bit, whatever lies in the windows between the calls, and without gradients."""
    for dtype, of_group, options in MOES:
        at.sum(torch.zeros(1, device=worlds.DEVICE))  # see above: no copies while others wait
        world = World(at, 5, dtype)
        at.sum(world.x.new_zeros(1))
        group = {"num_experts": EXPERTS, "max_tokens": 64, **of_group}
        group = moire.ExpertParallel(at.group, **group)
        for is_leaf in LEAVES:
            ways, found = (in_three_steps, at_once), []
            for way in ways:
                if at.group is not None:
                    at.group.window.fill_(255)
                run = functools.partial(way, **options)
                found.append(world.together(group, run, is_leaf)[1:])
                moire.check()  # nobody's rows, whatever they are, were not quantised
            for three, one in zip(*found):
                assert (three is None and one is None) or torch.equal(three, one)
        own = slice(group.first_expert, group.first_expert + group.num_local_experts)
        given = world.x[world.mine], world.w1[own], world.w2[own]
        choices = world.idx[world.mine], world.weights[world.mine]
        with torch.no_grad():
            three, one = (way(group, *given, *choices, **options) for way in ways)
        assert torch.equal(three, one) and torch.equal(one, found[0][0])


@case
def moe_of_a_group_says_what_it_cannot_take(at):
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    world = World(at, 3, torch.float32)
    given = {"x": world.x, "w1": world.w1, "w2": world.w2, "topk_idx": world.idx}
    given["topk_weights"] = world.weights
    if at.size > 1:
        own = slice(group.first_expert, group.first_expert + group.num_local_experts)
        given.update(w1=world.w1[own], w2=world.w2[own])
    for options, message in (
        ({"plan": moire.make_plan(world.idx, EXPERTS)}, "plan is of this rank's choices, but"),
        ({"b2_scale": world.weights}, "b2_scale is of this rank's choices, but with group"),
        ({"group": at.rank}, "group is .*, must be a moire.ExpertParallel"),
        ({"w1": world.w1[:1]}, f"x is .* w1 has 1 experts of {HIDDEN} inputs, must be .T, H. and"),
        ({"w1": given["w1"][:, :, :8].contiguous()}, "x is .* experts of 8 inputs, must be"),
        ({"act": "nope"}, "act is 'nope', must be one of"),
    ):
        with pytest.raises(moire.Error, match=f"moe: {message}"):
            moire.moe(**{**given, "group": group, **options})
    at.sum(world.x.new_zeros(1))
    together = world.together(group, at_once)  # nobody waits for a call that was refused
    assert torch.equal(together[1], world.together(group)[1])


@case
def windows_need_no_more_for_a_wider_type(at):
    """BF16's rows travel as they are, whatever experts compute in."""
    if at.group is None:
        return
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    world = World(at, 3, torch.bfloat16)
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    given = world.x[world.mine], world.w1[own], world.w2[own]
    given += world.idx[world.mine], world.weights[world.mine]
    sizes = [
        moire.explain(way, group, *given, compute_dtype=torch.float32).window_bytes
        for way in (in_three_steps, at_once)
    ]
    assert sizes[0] == sizes[1]


@case
def what_is_explained_asks_nothing_of_others(at):
    """One rank alone may ask what a step would run."""
    world = World(at, 3, torch.float32)
    ways = in_three_steps, at_once, functools.partial(at_once, micro_batches=2)
    for most in (None, 64):
        group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=most)
        for way in ways if at.rank == at.size - 1 else ():
            found = [step["op"] for step in moire.explain(world.together, group, way)]
            assert found.count("grouped_gemm_glu_backward") == 1 + (way is ways[2])
        world.together(group)


@case
def on_the_meta_device_one_rank_alone_gets_shapes(at):
    if at.group is not None:
        return  # windows hold values
    for most, parts in ((None, 1), (None, 3), (9, 1), (9, 3)):
        group, on = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=most), {"device": "meta"}
        experts = nn.GroupedMLP(group.num_local_experts, HIDDEN, WIDTH, **on)
        router = nn.Router(HIDDEN, EXPERTS, k=3, **on)
        layer = nn.MoE(experts, router, group=group, micro_batches=parts)
        x = torch.randn(2, 4, HIDDEN, **on, requires_grad=True)
        if at.rank == 0:
            layer(x).sum().backward()
            assert x.grad.is_meta and experts.fc1.weight.grad.shape == experts.fc1.weight.shape


@case
def delayed_gradients_outlive_the_window(at):
    """Of moe(group=), which reads the gradient of y in it."""
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    world, grads = World(at, 3, torch.float32), []
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    x, idx, weights = (t[world.mine] for t in (world.x, world.idx, world.weights))
    experts = []
    for delay in (False, True):
        options = {"delay_wgrad_compute": delay, "device": worlds.DEVICE}
        experts.append(nn.GroupedMLP(group.num_local_experts, HIDDEN, WIDTH, **options))
        with torch.no_grad():
            experts[-1].fc1.weight.copy_(world.w1[own])
            experts[-1].fc2.weight.copy_(world.w2[own])
    at.sum(world.x.new_zeros(1))
    for local, delay in zip(experts, (False, True)):
        layer = nn.MoE(local, lambda x: (idx, weights), group=group)
        (layer(x) * world.grad_y[world.mine]).sum().backward()
        if at.group is not None:
            at.group.window.fill_(255)
        if delay:
            local.backward_dw()
        grads.append([p.grad for p in local.parameters()])
    assert len(grads[0]) == 2 and all(torch.equal(a, b) for a, b in zip(*grads))


@case
def a_rank_whose_choices_were_wrong_may_call_again(at):
    """While others wait: nothing of the first call was sent, though its last token alone was wrong.
    On a GPU nobody reads choices before they go.
    """
    if worlds.DEVICE.type != "cpu":
        return
    world = World(at, 3, torch.float32)
    for most, parts in ((64, 1), (64, 3), (None, 1), (None, 3)):
        group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=most)
        run = functools.partial(at_once, micro_batches=parts)
        wanted, idx = world.together(group, run), world.idx
        if at.rank == 0:  # which has 13 tokens
            world.idx = idx.clone()
            world.idx[12, 1] = EXPERTS + 1
            with pytest.raises(moire.InvalidArgument, match=r"topk_idx\[12, 1\] is 13, must be"):
                world.together(group, run)
        world.idx = idx
        found = world.together(group, run)
        assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:]))
