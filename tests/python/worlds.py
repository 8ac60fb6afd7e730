"""Ranks with tokens and experts of their own, beside one that has them all. What is asked of them
is a case(), which every world of ranks runs.
"""

import threading

import moire
import torch
import torch.distributed as dist

EXPERTS, HIDDEN, WIDTH = 12, 64, 32
TOKENS = [13, 0, 40, 7]  # of the ranks
DEVICE = torch.device("cpu")  # of a rank of a world
CASES = {}
ONE_AT_A_TIME = threading.Lock()  # Torch's random numbers are those of all threads


def case(run):
    CASES[run.__name__] = run
    return run


class OfProcesses:
    """A rank of a process group."""

    group = None  # of whom experts are

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, tensor):
        dist.all_reduce(tensor)
        return tensor


class World:
    """The numbers of all ranks, the same on each, and what is a rank's own of them."""

    def __init__(self, at, k, dtype, seed=1):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, of=torch.randn, **options):
            return of(*shape, generator=generator, **options).to(DEVICE)

        self.rank, self.size = at.rank, at.size
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

    def together(self, group, run=None, is_leaf=(True,) * 4):
        """The same of this rank's tokens and experts; run(group, x, w1, w2, idx, weights) is moe in
        three steps, or another way. Those that are no leaf have no gradient.
        """
        last = group.first_expert + group.num_local_experts
        own = slice(group.first_expert, last)
        parts = self.x[self.mine], self.w1[own], self.w2[own], self.weights[self.mine]
        x, w1, w2, weights = leaves = [
            t.clone().requires_grad_(leaf) for t, leaf in zip(parts, is_leaf)
        ]
        y = (run or in_three_steps)(group, x, w1, w2, self.idx[self.mine], weights)
        y.backward(self.grad_y[self.mine].to(y.dtype))
        return own, y.detach(), *(t.grad for t in leaves)


def in_three_steps(group, x, w1, w2, idx, weights, autocast=None, **options):
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        got = group.dispatch(x, idx, weights)
        y = moire.moe(got.x, w1, w2, None, got.topk_weights, plan=got.plan, **options)
        return group.combine(y, got)


def at_once(group, x, w1, w2, idx, weights, autocast=None, **options):
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        return moire.moe(x, w1, w2, idx, weights, group=group, **options)


def close(found, wanted, parts, dtype):
    """Within the rounding of a partial sum on each rank and of their sum."""
    unit = torch.finfo(dtype).eps / 2
    return ((found - wanted).float().norm() <= 4 * unit * parts * wanted.float().norm()).item()
