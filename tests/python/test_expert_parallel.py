"""Experts over the ranks of a process group, against one rank that has them all: with the tokens of
all ranks one behind the other, rows have the same order, so what is summed within a rank is equal
to the bit. Each world of processes is started once and runs every case.
"""

import contextlib
import os
import traceback

import moire
import pytest
import torch
import torch.distributed as dist
from moire import nn

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this Torch has no gloo"
)

EXPERTS, HIDDEN, WIDTH = 12, 64, 32
TOKENS = [13, 0, 40, 7]  # of the ranks
DEVICE = torch.device("cpu")  # of a rank of a world
CASES = {}


def case(run):
    CASES[run.__name__] = run
    return run


class World:
    """The numbers of all ranks, the same on each, and what is a rank's own of them."""

    def __init__(self, k, dtype, seed=1):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, of=torch.randn, **options):
            return of(*shape, generator=generator, **options).to(DEVICE)

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        tokens = TOKENS[: self.size]
        self.x, self.grad_y = draw(sum(tokens), HIDDEN).to(dtype), draw(sum(tokens), HIDDEN)
        self.w1 = draw(EXPERTS, 2 * WIDTH, HIDDEN).to(dtype)
        self.w2 = draw(EXPERTS, HIDDEN, WIDTH).to(dtype)
        self.idx = draw(-1, EXPERTS + 1, (sum(tokens), k), of=torch.randint)
        self.weights = draw(sum(tokens), k, of=torch.rand)
        begin = sum(tokens[: self.rank])
        self.mine = slice(begin, begin + tokens[self.rank])

    def alone(self):
        """(y, gradients of x, w1, w2, weights) where one rank has it all."""
        leaves = [t.clone().requires_grad_() for t in (self.x, self.w1, self.w2, self.weights)]
        x, w1, w2, weights = leaves
        y = moire.moe(x, w1, w2, self.idx, weights)
        y.backward(self.grad_y.to(y.dtype))
        return y.detach(), *(t.grad for t in leaves)

    def together(self, group):
        """The same of this rank's tokens and experts."""
        last = group.first_expert + group.num_local_experts
        own = slice(group.first_expert, last)
        parts = self.x[self.mine], self.w1[own], self.w2[own], self.weights[self.mine]
        x, w1, w2, weights = leaves = [t.clone().requires_grad_() for t in parts]
        got = group.dispatch(x, self.idx[self.mine], weights)
        y = moire.moe(got.x, w1, w2, None, got.topk_weights, plan=got.plan)
        y = group.combine(y, got)
        y.backward(self.grad_y[self.mine].to(y.dtype))
        return own, y.detach(), *(t.grad for t in leaves)


def close(found, wanted, parts, dtype):
    """Within the rounding of a partial sum on each rank and of their sum."""
    unit = torch.finfo(dtype).eps / 2
    return ((found - wanted).float().norm() <= 4 * unit * parts * wanted.float().norm()).item()


@case
def equals_one_rank_with_every_expert():
    for k, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16), (32, None)):
        world = World(k, dtype or torch.float32)
        y, *grads = world.alone()
        for most in (None, max(TOKENS), 64):
            group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=most)
            own, found, x, w1, w2, weights = world.together(group)
            assert torch.equal(w1, grads[1][own]) and torch.equal(w2, grads[2][own])
            assert torch.equal(weights, grads[3][world.mine])
            for mine, all_of_it in ((found, y), (x, grads[0])):
                wanted = all_of_it[world.mine]
                if k == 1 or world.size == 1:
                    assert torch.equal(mine, wanted)
                assert close(mine, wanted, k, y.dtype)


@case
def two_runs_are_equal():
    world = World(5, torch.bfloat16)
    group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=50)
    first, second = (world.together(group)[1:] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@case
def rows_that_nobody_sent_are_zeros_and_have_no_gradient():
    world = World(2, torch.float32)
    group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=64)
    x = world.x[world.mine].clone().requires_grad_()
    got = group.dispatch(x, world.idx[world.mine], world.weights[world.mine])
    nobody = (got.topk_idx < 0).all(1)
    assert got.x.shape == (64 * world.size, HIDDEN) and nobody.any()
    assert not got.x[nobody].any() and not got.topk_weights[got.topk_idx < 0].any()
    # A layer that moves every row, nobody's too, by the same: its gradient counts the sent alone.
    shift = torch.zeros(HIDDEN, device=DEVICE, requires_grad=True)
    group.combine(got.x + shift, got).sum().backward()
    assert torch.equal(shift.grad, (~nobody).sum().float().expand(HIDDEN))
    owners = world.idx[world.mine].clamp(-1, EXPERTS).div(group.num_local_experts).floor()
    sent = [
        sum((o == r).any() for r in range(world.size)) if len(o) else 0
        for o in torch.where(world.idx[world.mine] < 0, -1, owners)
    ]
    assert x.grad[:, 0].tolist() == [float(n) for n in sent]


@case
def a_module_has_its_ranks_experts():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = moire.ExpertParallel(num_experts=EXPERTS)
    torch.manual_seed(3)
    on = {"device": DEVICE}
    router = nn.Router(HIDDEN, EXPERTS, k=3, **on)
    whole = nn.MoE(nn.GroupedMLP(EXPERTS, HIDDEN, WIDTH, **on), router)
    local = nn.GroupedMLP(group.num_local_experts, HIDDEN, WIDTH, **on)
    layer = nn.MoE(local, nn.Router(HIDDEN, EXPERTS, k=3, **on), group=group)
    layer.router.load_state_dict(whole.router.state_dict())
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    with torch.no_grad():
        for mine, theirs in zip(local.parameters(), whole.experts.parameters()):
            mine.copy_(theirs[own])
    x = torch.randn(size, 2, 5, HIDDEN, **on)
    y = layer(x[rank])
    assert close(y, whole(x)[rank], 3, torch.float32)
    y.sin().sum().backward()
    whole(x).sin().sum().backward()
    for mine, theirs in zip(local.parameters(), whole.experts.parameters()):
        assert close(mine.grad, theirs.grad[own], 3, torch.float32)
    router = layer.router.weight.grad.clone()
    dist.all_reduce(router)
    assert close(router, whole.router.weight.grad, 30, torch.float32)


@case
def more_rows_than_there_is_room_for_are_an_error():
    world = World(3, torch.float32)
    idx = torch.full_like(world.idx[world.mine], 0)
    group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=64, max_rows=2)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:  # where expert 0 is
            stack.enter_context(pytest.raises(moire.Error, match="rows"))
        group.dispatch(world.x[world.mine], idx, world.weights[world.mine])
        moire.check()


@case
def what_the_ranks_are_told_has_to_be_equal():
    if dist.get_world_size() == 1:
        return
    told = 64 if dist.get_rank() == 1 else 32
    with pytest.raises(moire.InvalidArgument, match="32 on rank 0 but 64 on rank 1"):
        moire.ExpertParallel(num_experts=EXPERTS, max_tokens=told)


@case
def bad_arguments_are_refused_before_anything_is_sent():
    group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=4)
    x, idx, weights = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2)
    x, idx, weights = good = [t.to(DEVICE) for t in (x, idx, weights)]

    def refuses(match, *args):
        with pytest.raises(moire.InvalidArgument, match=match):
            group.dispatch(*args)

    longer = [torch.cat([t, t[:1]]) for t in good]
    refuses("has 5 tokens, must have at most max_tokens = 4", *longer)
    refuses(r"\[4, 2\] and topk_weights \[4, 3\]", x, idx, weights[:, [0, 1, 1]])
    refuses("topk_idx is torch.int16", x, idx.short(), weights)
    refuses("x is 3, must be a Torch tensor", 3, idx, weights)
    got = group.dispatch(x, idx, weights)
    with pytest.raises(moire.InvalidArgument, match="must have the .* rows of received.x"):
        group.combine(x[:1], got)
    with pytest.raises(moire.InvalidArgument, match="must be what dispatch returns"):
        group.combine(x, x)
    if dist.get_world_size() > 1:
        with pytest.raises(moire.InvalidArgument, match="is 13, must be a multiple of the"):
            moire.ExpertParallel(num_experts=13)
    with pytest.raises(moire.InvalidArgument, match="must be a moire.ExpertParallel"):
        nn.MoE(nn.GroupedMLP(2, 8, 8), nn.Router(8, 2, 1), group=3)


@case
def a_step_is_one_graph_on_gpus():
    """Captured once, replayed with other tokens, choices and weights."""
    if DEVICE.type == "cpu":
        return
    world, other = World(3, torch.bfloat16), World(3, torch.bfloat16, seed=2)
    group = moire.ExpertParallel(num_experts=EXPERTS, max_tokens=64)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        world.together(group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = world.together(group)[1:]
    for name in ("x", "grad_y", "w1", "w2", "idx", "weights"):
        getattr(world, name).copy_(getattr(other, name))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, other.together(group)[1:]))


def work(rank, size, backend, folder):
    """A rank of a world: each case's traceback, if it has one, goes into a file of its name."""
    global DEVICE
    torch.set_num_threads(1)
    if backend == "nccl":
        DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    for name, run in CASES.items():
        try:
            run()
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
    for process in ranks.processes:
        process.join(90)
        process.kill()
    return size, folder


@pytest.mark.parametrize("name", CASES)
def test_experts_over_ranks(world, name):
    size, folder = world
    for rank in range(size):
        found = folder / f"{name}.{rank}"
        assert found.exists(), f"rank {rank} did not come to the end"
        assert not found.read_text(), found.read_text()


def test_without_a_process_group_it_says_what_is_needed():
    with pytest.raises(moire.InvalidArgument, match="needs init_process_group"):
        moire.ExpertParallel(num_experts=8)
