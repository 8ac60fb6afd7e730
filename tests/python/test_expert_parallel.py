"""Experts over ranks, those of a process group and of communicators, against one rank that has them
all: with the tokens of all ranks one behind the other, rows have the same order, so what is summed
within a rank is equal to the bit. Each world of processes is started once and runs every case; one
of threads is made for each.
"""

import contextlib
import functools
import os
import subprocess
import sys
import traceback

import differing_cases  # noqa: F401 (they are run here)
import micro_batch_cases  # noqa: F401
import moe_cases  # noqa: F401
import moire
import pytest
import torch
import torch.distributed as dist
import worlds
from moire import nn
from moire.travel import OverProcessGroup
from ranks import NEEDS_GLOO, alone_in_gloo, in_threads, join_processes, succeed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from worlds import (
    CASES,
    EXPERTS,
    HIDDEN,
    ONE_AT_A_TIME,
    TOKENS,
    WIDTH,
    OfProcesses,
    World,
    at_once,
    case,
    close,
    in_three_steps,
)


@case
def equals_one_rank_with_every_expert(at):
    for k, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16), (32, None)):
        world = World(at, k, dtype or torch.float32)
        y, *grads = world.alone()
        at.sum(world.x.new_zeros(1))  # on a GPU that ranks share, one that waits may hold up copies
        for most in (None, max(TOKENS), 64):
            group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=most)
            own, found, x, w1, w2, weights = world.together(group)
            assert torch.equal(w1, grads[1][own]) and torch.equal(w2, grads[2][own])
            assert torch.equal(weights, grads[3][world.mine])
            for mine, all_of_it in ((found, y), (x, grads[0])):
                wanted = all_of_it[world.mine]
                if k == 1 or world.size == 1:
                    assert torch.equal(mine, wanted)
                assert close(mine, wanted, k, y.dtype)


@case
def two_runs_are_equal(at):
    world = World(at, 5, torch.bfloat16)
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=50)
    first, second = (world.together(group)[1:] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@case
def rows_that_travel_in_8_bits_are_as_if_they_had_been_rounded(at):
    """Tokens, and gradients of y; in windows that are full of NaN."""
    most = {"num_experts": EXPERTS, "max_tokens": 64}
    for name, dtype in (("mxfp8", torch.bfloat16), ("fp8_block", torch.bfloat16), ("mxfp8", None)):
        dtype = dtype or torch.float32
        world, rounded = (World(at, 3, dtype) for _ in range(2))
        rounded.x = moire.quantize(world.x, recipe=name).dequantize(dtype)
        grad_y = moire.quantize(world.grad_y.to(dtype), recipe=name).dequantize(dtype)
        rounded.grad_y = grad_y.float()
        if at.group is not None:
            at.group.window.fill_(255)
        group = moire.ExpertParallel(at.group, **most, dispatch_format=name)
        found = world.together(group)
        wanted = rounded.together(moire.ExpertParallel(at.group, **most))
        for mine, exact in zip(found[1:], wanted[1:]):
            assert torch.equal(mine, exact)
        exact = world.together(moire.ExpertParallel(at.group, **most))
        assert not len(exact[1]) or not torch.equal(found[1], exact[1])


@case
def rows_that_nobody_sent_are_zeros_and_have_no_gradient(at):
    world = World(at, 2, torch.float32)
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    x = world.x[world.mine].clone().requires_grad_()
    got = group.dispatch(x, world.idx[world.mine], world.weights[world.mine])
    nobody = (got.topk_idx < 0).all(1)
    assert got.x.shape == (64 * world.size, HIDDEN) and nobody.any()
    assert not got.x[nobody].any() and not got.topk_weights[got.topk_idx < 0].any()
    # A layer that moves every row, nobody's too, by the same: its gradient counts the sent alone.
    shift = torch.zeros(HIDDEN, device=worlds.DEVICE, requires_grad=True)
    group.combine(got.x + shift, got).sum().backward()
    assert torch.equal(shift.grad, (~nobody).sum().float().expand(HIDDEN))
    owners = world.idx[world.mine].clamp(-1, EXPERTS).div(group.num_local_experts).floor()
    sent = [
        sum((o == r).any() for r in range(world.size)) if len(o) else 0
        for o in torch.where(world.idx[world.mine] < 0, -1, owners)
    ]
    assert x.grad[:, 0].tolist() == [float(n) for n in sent]


@case
def a_module_has_its_ranks_experts(at):
    rank, size, on = at.rank, at.size, {"device": worlds.DEVICE}
    with ONE_AT_A_TIME:
        torch.manual_seed(3)
        router = nn.Router(HIDDEN, EXPERTS, k=3, **on)
        whole = nn.MoE(nn.GroupedMLP(EXPERTS, HIDDEN, WIDTH, **on), router)
        x = torch.randn(size, 2, 5, HIDDEN, **on)
        local = nn.GroupedMLP(EXPERTS // size, HIDDEN, WIDTH, **on)
        router = nn.Router(HIDDEN, EXPERTS, k=3, **on)
    layer = nn.MoE(local, router, group=at.group or dist.group.WORLD)
    group = layer.group
    layer.router.load_state_dict(whole.router.state_dict())
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    with torch.no_grad():
        for mine, theirs in zip(local.parameters(), whole.experts.parameters()):
            mine.copy_(theirs[own])
    y = layer(x[rank])
    assert close(y, whole(x)[rank], 3, torch.float32)
    y.sin().sum().backward()
    whole(x).sin().sum().backward()
    for mine, theirs in zip(local.parameters(), whole.experts.parameters()):
        assert close(mine.grad, theirs.grad[own], 3, torch.float32)
    router = at.sum(layer.router.weight.grad.clone())
    assert close(router, whole.router.weight.grad, 30, torch.float32)


@case
def more_rows_than_there_is_room_for_are_an_error(at):
    world = World(at, 3, torch.float32)
    idx = torch.full_like(world.idx[world.mine], 0)
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64, max_rows=2)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:  # where expert 0 is
            found = "rows" if world.x.is_cuda else "pairs came to the experts of rank 0, needs"
            stack.enter_context(pytest.raises(moire.Error, match=found))
        group.dispatch(world.x[world.mine], idx, world.weights[world.mine])
        moire.check()


@case
def pairs_past_max_rows_are_dropped_from_the_last_row_on(at):
    """As if their tokens had not chosen these experts."""
    ways = (at_once, 1), (in_three_steps, 1), (functools.partial(at_once, micro_batches=2), 2)
    for run, parts in ways:
        world = World(at, 5, torch.float32)
        rooms = {"num_experts": EXPERTS, "max_tokens": 64, "overflow": "drop"}
        group = moire.ExpertParallel(at.group, **rooms, max_rows=7 * parts)
        found = world.together(group, run)
        tokens = torch.arange(len(world.x)).split(TOKENS[: at.size])
        for some in zip(*(of_rank.tensor_split(parts) for of_rank in tokens)):
            chosen = world.idx[torch.cat(some)]
            owner = chosen.div(group.num_local_experts, rounding_mode="floor")
            for rank in range(at.size):
                is_here = owner == rank
                is_past = is_here.flatten().cumsum(0).view(is_here.shape) > 7
                chosen = chosen.where(~(is_here & is_past), -1)
            world.idx[torch.cat(some)] = chosen
        wanted = world.together(moire.ExpertParallel(at.group, **rooms), run)
        assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:]))
        assert (world.idx != World(at, 5, torch.float32).idx).any()


@case
def tokens_that_overflow_are_dropped_or_refused(at):
    """All choose the first rank's first expert, which has room for 2 of each rank."""
    tokens, two = TOKENS[at.rank], {"num_experts": EXPERTS, "max_tokens": 2}
    x = torch.arange(1.0, tokens + 1, device=worlds.DEVICE)[:, None].expand(-1, 8).requires_grad_()
    idx = torch.zeros(tokens, 1, dtype=torch.int64, device=worlds.DEVICE)
    weights = torch.ones(tokens, 1, device=worlds.DEVICE, requires_grad=True)
    group = moire.ExpertParallel(at.group, **two, overflow="drop")
    got = group.dispatch(x, idx, weights)
    assert (got.topk_idx >= 0).sum() == (at.rank == 0) * sum(min(t, 2) for t in TOKENS[: at.size])
    y = group.combine(got.x * got.topk_weights, got)
    y.sum().backward()
    came = (torch.arange(tokens, device=worlds.DEVICE) < 2)[:, None]
    assert torch.equal(y, x * came) and torch.equal(x.grad, came.expand(-1, 8).float())
    assert torch.equal(weights.grad, (8 * x[:, :1] * came).detach())
    if at.group is not None:
        group = moire.ExpertParallel(at.group, **two)
        found = "rank 0 has 13 tokens for rank 0, which has room for 2 of each rank"
        with pytest.raises(moire.InvalidArgument, match=found):
            got = group.dispatch(x, idx, weights)
            torch.cuda.current_stream().synchronize()
            assert not got.x.any() and (got.topk_idx == -1).all()
            group.dispatch(x, idx, weights)  # raises what kernels found of the one before


@case
def gradients_have_gradients(at):
    """Each call is the other's: of squares of what went to n ranks and came back, 2 n**2 x, and of
    its squares, 8 n**4 x."""
    world = World(at, 3, torch.float32)
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    x, weights = (t[world.mine].clone().requires_grad_() for t in (world.x, world.weights))
    got = group.dispatch(x, world.idx[world.mine], weights)
    loss = group.combine(got.x, got).square().sum() + got.topk_weights.square().sum()
    first = torch.autograd.grad(loss, (x, weights), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, weights))
    is_choice = (world.idx[world.mine] >= 0) & (world.idx[world.mine] < EXPERTS)
    owner = world.idx[world.mine].div(group.num_local_experts, rounding_mode="floor")
    n = sum((owner == r).any(1, keepdim=True).float() for r in range(at.size))
    assert torch.allclose(second[0], 8 * n**4 * x) and torch.allclose(
        second[1], 8 * weights * is_choice
    )


@case
def without_gradients_it_is_the_same(at):
    world = World(at, 3, torch.bfloat16)
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    y = world.together(group)[1]
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    with torch.no_grad():
        got = group.dispatch(world.x[world.mine], world.idx[world.mine], world.weights[world.mine])
        found = moire.moe(
            got.x, world.w1[own], world.w2[own], None, got.topk_weights, plan=got.plan
        )
        assert torch.equal(group.combine(found, got), y)
        x, none = world.x[world.mine], world.idx[world.mine][:, :0]
        got = group.dispatch(x, none, world.weights[world.mine][:, :0])  # k = 0
        assert not got.x.any() and not group.combine(got.x, got).any()


@case
def experts_of_hugging_face_get_their_tokens(at):
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen
    except ImportError:
        return
    if at.group is not None:
        return
    moire.hf.register()
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
    world = World(at, 3, torch.float32)
    y, grad_x, *_, grad_weights = world.alone()
    mesh = init_device_mesh(worlds.DEVICE.type, (at.size, 1), mesh_dim_names=("ep", "tp"))
    for implementation in ("moire", "grouped_mm"):
        config = qwen.Qwen3MoeConfig(**sizes, num_experts=EXPERTS // at.size)
        config._experts_implementation = implementation
        experts = qwen.Qwen3MoeExperts(config).to(worlds.DEVICE)
        experts._is_expert_parallel = True  # as transformers marks those that it shards
        own = slice(at.rank * config.num_experts, (at.rank + 1) * config.num_experts)
        with torch.no_grad():
            experts.gate_up_proj.copy_(world.w1[own])
            experts.down_proj.copy_(world.w2[own])
        run = EPImplementationInterface()["moire"](experts, mesh["ep"], mesh["tp"])
        x, weights = (t[world.mine].clone().requires_grad_() for t in (world.x, world.weights))
        found = run(x, world.idx[world.mine], weights)
        found.backward(world.grad_y[world.mine])
        for mine, wanted in ((found, y), (x.grad, grad_x), (weights.grad, grad_weights)):
            assert close(mine, wanted[world.mine], 12, torch.float32), implementation
    if at.size > 1:
        with pytest.raises(moire.Unsupported, match="needs tp_size=1, found"):
            EPImplementationInterface()["moire"](experts, mesh["ep"], mesh["ep"])


@case
def bad_arguments_are_refused_before_anything_is_sent(at):
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=4)
    x, idx, weights = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2)
    x, idx, weights = good = [t.to(worlds.DEVICE) for t in (x, idx, weights)]

    def refuses(match, *args):
        with pytest.raises(moire.InvalidArgument, match=match):
            group.dispatch(*args)

    longer = [torch.cat([t, t[:1]]) for t in good]
    if at.group is None:  # on all, whichever has them
        refuses("a rank has 5 tokens, needs at most max_tokens = 4", *(good if at.rank else longer))
    else:
        refuses("has 5 tokens for rank 0, which has room for 4", *longer)
    refuses(r"\[4, 2\] and topk_weights \[4, 3\]", x, idx, weights[:, [0, 1, 1]])
    refuses("topk_idx is torch.int16", x, idx.short(), weights)
    refuses("the type of x is torch.float64, must be", x.double(), idx, weights)
    for bad in (-2, EXPERTS + 1):
        found = rf"topk_idx\[.*\] is {bad}, must be (-1 to {EXPERTS}|below {EXPERTS + 1})"
        if worlds.DEVICE.type == "cpu":
            refuses(found, x, idx + bad, weights)
            continue
        with pytest.raises(moire.InvalidArgument, match=found):  # before ranks wait for each other
            OverProcessGroup(group, idx + bad, 4)
            moire.check()
    refuses("x is 3, must be a Torch tensor", 3, idx, weights)
    got = group.dispatch(x, idx, weights)
    with pytest.raises(moire.InvalidArgument, match="must have the .* rows of received.x"):
        group.combine(x[:1], got)
    with pytest.raises(moire.InvalidArgument, match="must be what dispatch returns"):
        group.combine(x, x)
    if at.size > 1:
        with pytest.raises(moire.InvalidArgument, match="is 13, must be a multiple of the"):
            moire.ExpertParallel(at.group, num_experts=13)
    with pytest.raises(moire.InvalidArgument, match="MoE: "):
        nn.MoE(nn.GroupedMLP(2, 8, 8), nn.Router(8, 2, 1), group=3)


@case
def fake_tensors_pass_process_groups_and_are_refused_by_windows(at):
    """Those of one rank alone, too."""
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=4)
    real = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2)
    real = [t.to(worlds.DEVICE) for t in real]
    mode = FakeTensorMode()
    x, idx, weights = fake = [mode.from_tensor(t) for t in real]
    with pytest.raises(moire.InvalidArgument, match="x is a FakeTensor, without values, but topk_"):
        group.dispatch(x, *real[1:])
    for around in (contextlib.nullcontext(), mode):
        with around:
            if at.group is not None:
                found = "x is a FakeTensor, without values, but a Communicator's windows hold"
                with pytest.raises(moire.Unsupported, match=found):
                    group.dispatch(*fake)
                continue
            x.requires_grad_()
            for group.max_tokens, group.dispatch_format in ((None, None), (4, None), (4, "mxfp8")):
                if at.rank != at.size - 1:
                    continue
                got, rows = group.dispatch(*fake), 4 * at.size
                assert got.x.shape == (rows, 8) and got.plan.gather_idx.shape == (2 * rows,)
                group.combine(got.x * got.topk_weights[:, :1], got).sum().backward()
                assert x.grad.shape == x.shape
    group.dispatch_format, y = None, torch.zeros(4 * at.size, 8, device=worlds.DEVICE)
    with pytest.raises(moire.InvalidArgument, match="y is a FakeTensor, without values, but rec"):
        group.combine(mode.from_tensor(y), group.dispatch(*real))


@case
def a_step_is_one_graph_on_gpus(at):
    """Captured once, replayed with other tokens, choices and weights."""
    if worlds.DEVICE.type == "cpu":
        return
    world, other = World(at, 3, torch.bfloat16), World(at, 3, torch.bfloat16, seed=2)
    group = moire.ExpertParallel(at.group, num_experts=EXPERTS, max_tokens=64)
    for run in (None, functools.partial(at_once, micro_batches=3)):
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            world.together(group, run)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = world.together(group, run)[1:]
        for name in ("x", "grad_y", "w1", "w2", "idx", "weights"):
            getattr(world, name).copy_(getattr(other, name))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, other.together(group, run)[1:]))
        world = World(at, 3, torch.bfloat16)


def work(rank, size, backend, folder):
    """A rank of a world: each case's traceback, if it has one, goes into a file of its name."""
    torch.set_num_threads(1)
    if backend == "nccl":
        worlds.DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(worlds.DEVICE)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    for name, run in CASES.items():
        try:
            run(OfProcesses())
        except BaseException:
            (folder / f"{name}.{rank}").write_text(traceback.format_exc())
            break  # the others may wait for what this rank did not send
        dist.barrier()
        (folder / f"{name}.{rank}").write_text("")
    os._exit(0)  # without waiting for ranks that failed


WORLDS = [(1, "gloo"), (2, "gloo"), (4, "gloo"), (2, "nccl")]


@pytest.fixture(scope="module", params=WORLDS, ids="{0[0]} ranks of {0[1]}".format)
def world(request, tmp_path_factory):
    size, backend = request.param
    if backend == "nccl" and (torch.cuda.device_count() < size or "cpu" in moire.__version__):
        pytest.skip(f"needs {size} GPUs, and a build of moire with CUDA")
    folder = tmp_path_factory.mktemp("ranks")
    args = (size, backend, folder)
    ranks = torch.multiprocessing.spawn(work, args, nprocs=size, join=False)
    join_processes(ranks.processes)
    return size, folder


@NEEDS_GLOO
@pytest.mark.parametrize("name", CASES)
def test_experts_over_ranks(world, name):
    size, folder = world
    for rank in range(size):
        found = folder / f"{name}.{rank}"
        assert found.exists(), f"rank {rank} did not come to the end"
        assert not found.read_text(), found.read_text()


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("name", CASES)
def test_experts_over_threads(size, name):
    succeed(in_threads(size, CASES[name]))


@NEEDS_GLOO
def test_one_rank_asks_nobody(monkeypatch):
    """What it sends itself are choices, and rows of x, y and grad_y."""
    with alone_in_gloo():
        world, sent, send = World(OfProcesses(), 3, torch.float32), [], dist.all_to_all_single
        monkeypatch.setattr(dist, "all_gather_object", None)
        monkeypatch.setattr(dist, "all_to_all_single", lambda *a, **b: sent.append(send(*a, **b)))
        group = moire.ExpertParallel(num_experts=EXPERTS)
        world.together(group, at_once, (False, True, False, False))
        assert len(sent) == 4


@NEEDS_GLOO
def test_without_a_process_group_it_says_what_is_needed():
    with pytest.raises(moire.InvalidArgument, match="needs init_process_group"):
        moire.ExpertParallel(num_experts=8)


FAKE = """
import moire, os, sys, torch

assert "torch.distributed._functional_collectives" not in sys.modules
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = moire.ExpertParallel(num_experts=2, max_tokens=3)
given = torch.zeros(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1)
got = group.dispatch(*map(FakeTensorMode().from_tensor, given))
print(list(group.combine(got.x, got).shape), flush=True)
os._exit(0)  # without waiting for gloo's threads
"""


@NEEDS_GLOO
def test_fake_tensors_need_nothing_that_others_imported():
    """Torch 2.4 knows what its functional all-to-all makes of them once that was imported."""
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[3, 8]\n", done.stderr
