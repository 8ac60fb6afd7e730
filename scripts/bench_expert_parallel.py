#!/usr/bin/env python3
"""Experts over ranks: what moves tokens beside a bare all-to-all of the same rows, and a layer
beside the same experts without it.

  torchrun --nproc-per-node 2 scripts/bench_expert_parallel.py      processes that NCCL connects
  scripts/bench_expert_parallel.py --threads 2                      ranks that are threads
  ... --device cpu --tokens 256 --layer 256x64                      on a CPU
  ... --json out.json                                               samples as well

4096 tokens a rank choose 8 of 64 experts. Over windows (moire.Communicator) the calls are those of
moire.h; over the process group, moire.ExpertParallel's. "GB/s" counts the rows that have to cross a
link, once a way: those of a rank's tokens that another rank needs. On GPUs every row is a CUDA
graph, of one call and of --calls, replayed back to back: the time is one call's, with the way from
graph to graph and nearly without it. Printed are medians over rounds of the slowest rank.

The layer is a rank's share of the experts with as many tokens, forward and backward: alone, with
tokens that choose among this rank's experts only, and over windows; beside that with a shared
expert, after the others or with MoE(overlap=True), where --few multiprocessors move tokens.
"""

import argparse
import json
import os
import sys
import threading
import time
from functools import partial

import moire
import torch
import torch.distributed as dist
from results import library, percentile

DEADLINE_MS = 30_000  # of a rank that waits for others
BF16 = torch.bfloat16


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, help="so many ranks in this process, no torchrun")
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--experts", type=int, default=64, help="of all ranks")
    parser.add_argument("--choices", type=int, default=8, help="of each token")
    parser.add_argument("--hidden", type=int, nargs="*", default=[7168, 2048], metavar="H")
    parser.add_argument("--layer", default="7168x2048", metavar="HxF", help="'' leaves it out")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[2], metavar="N")
    parser.add_argument(
        "--few",
        type=int,
        nargs="*",
        default=[16, 32],
        metavar="N",
        help="multiprocessors that move tokens beside other work",
    )
    parser.add_argument("--calls", type=int, default=8, help="in the larger graphs")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="write the samples")
    return parser.parse_args()


# ---- ranks, besides what is timed ----


class OfProcesses:
    """A rank that torchrun started."""

    def __init__(self, arguments):
        self.device, self.few = arguments.device, arguments.few
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def slowest(self, seconds):
        found = torch.tensor([seconds], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def communicators(self, window_bytes):
        """One of all multiprocessors, then those of few; none where there are no windows."""
        if self.device == "cpu":
            return ()
        options = {"window_bytes": window_bytes, "timeout_ms": DEADLINE_MS}
        make = partial(moire.Communicator.from_process_group, **options)
        try:
            return [make(num_multiprocessors=count) for count in (0, *self.few)]
        except moire.Unsupported as e:
            if self.rank == 0:
                print(f"no windows: {e}")
            return ()


class OfThreads:
    """A rank that is a thread of this process."""

    barrier, shared = None, None

    def __init__(self, rank, arguments):
        self.rank, self.size, self.device = rank, arguments.threads, arguments.device
        self.few = arguments.few

    def slowest(self, seconds):
        self.shared[self.rank] = seconds
        self.barrier.wait()
        found = max(self.shared)
        self.barrier.wait()
        return found

    def communicators(self, window_bytes):
        if self.rank == 0:
            options = {"timeout_ms": DEADLINE_MS}
            make = partial(moire.Communicator.threads, self.size, window_bytes, **options)
            if self.device == "cuda":
                count = torch.cuda.device_count()
                make = partial(make, devices=[f"cuda:{r % count}" for r in range(self.size)])
                made = [make(num_multiprocessors=count) for count in (0, *self.few)]
            else:
                made = [make()]
            self.shared[:] = zip(*made)
        self.barrier.wait()
        found = self.shared[self.rank]
        self.barrier.wait()
        return found


class Clock:
    """Times calls that all ranks make together."""

    def __init__(self, rank, arguments):
        self.rank, self.rounds, self.on_gpu = rank, arguments.rounds, arguments.device == "cuda"

    def captured(self, call, times=1):
        """So many calls as a CUDA graph; on a CPU the one call itself."""
        if not self.on_gpu:
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            graph.made = [call() for _ in range(times)]  # stays until the graph goes
        return graph.replay

    def once(self, call, times):
        """Seconds of one of so many calls, on the slowest rank."""
        self.rank.slowest(0.0)
        begin = time.perf_counter()
        if self.on_gpu:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
        for _ in range(times):
            call()
        if self.on_gpu:
            marks[1].record()
            marks[1].synchronize()
            seconds = marks[0].elapsed_time(marks[1]) / 1e3
        else:
            seconds = time.perf_counter() - begin
        return self.rank.slowest(seconds / times)

    def turns(self, calls, times):
        """Samples of each call, by name, taken in turns."""
        for call in calls.values():
            self.once(call, 2)
        samples = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                samples[name].append(self.once(call, times))
        return samples


def of_each(arguments):
    """What a name says of each of a rank's communicators."""
    return ["", *(f", {count} multiprocessors" for count in arguments.few)]


# ---- what moves tokens ----


class Tokens:
    """Of one rank, and where they go."""

    def __init__(self, rank, arguments, hidden, device):
        own = torch.Generator().manual_seed(rank.rank)  # Torch's is that of all threads
        self.size, self.experts = rank.size, arguments.experts
        self.x = torch.randn(arguments.tokens, hidden, generator=own).to(device, BF16)
        scores = torch.rand(arguments.tokens, self.experts, generator=own)
        weights, idx = scores.topk(arguments.choices)
        self.weights, self.idx = weights.to(device), idx.to(device, torch.int32)
        owner = idx // (self.experts // self.size)
        others = [r for r in range(self.size) if r != rank.rank]
        sent = sum(int((owner == r).any(1).sum()) for r in others)
        self.link_bytes = sent * hidden * self.x.element_size()


class OverWindows:
    """The calls of moire.h, on tensors that are made once."""

    def __init__(self, tokens, communicator):
        self.tokens, self.communicator = tokens, communicator
        count, hidden = tokens.x.shape
        rows, k = tokens.size * count, tokens.idx.shape[1]
        self.plan_fields = {
            "topk_idx": tokens.idx,
            "num_experts": tokens.experts,
            "capacity": count,
            "places": tokens.idx.new_empty(count, tokens.size),
            "counts": tokens.idx.new_empty(tokens.size, dtype=torch.int64),
        }
        self.y = torch.empty_like(tokens.x)
        choices = ((rows, k), torch.int32), ((rows, k), torch.float32)
        self.x_recv, *self.choices = communicator.divide(((rows, hidden), BF16), *choices)
        self.codes = moire.quantize(tokens.x, recipe="mxfp8").rowwise
        formats = [((rows, t.shape[1]), t.dtype) for t in self.codes]
        self.codes_recv = communicator.divide(*formats, *choices)
        self.call("dispatch_plan", **self.plan_fields)

    def call(self, name, **fields):
        with moire.settings(communicator=self.communicator):
            moire.call(name, **fields)

    def plan(self):
        self.call("dispatch_plan", **self.plan_fields)

    def _dispatch(self, choices, **rows):
        fields = {name: self.plan_fields[name] for name in ("topk_idx", "num_experts", "places")}
        fields.update(topk_weights=self.tokens.weights, counts=self.plan_fields["counts"])
        fields.update(topk_idx_recv=choices[0], topk_weights_recv=choices[1])
        self.call("dispatch", **fields, **rows)

    def dispatch(self):
        self._dispatch(self.choices, x=self.tokens.x, x_recv=self.x_recv)

    def dispatch_codes(self):
        """In MXFP8, quantised before."""
        codes, scales, *choices = self.codes_recv
        sent = {"x": self.codes[0], "x_scales": self.codes[1]}
        self._dispatch(choices, **sent, x_recv=codes, x_scales_recv=scales)

    def combine(self):
        self.call("combine", rows=self.x_recv, places=self.plan_fields["places"], y=self.y)

    def all_three(self):
        self.plan()
        self.dispatch()
        self.combine()


def calls_of_group(tokens):
    """moire.ExpertParallel over the process group, and the all-to-all that it makes."""
    group = moire.ExpertParallel(num_experts=tokens.experts, max_tokens=len(tokens.x))
    received = group.dispatch(tokens.x, tokens.idx, tokens.weights)
    into = torch.empty_like(received.x)

    def both():
        came = group.dispatch(tokens.x, tokens.idx, tokens.weights)
        return group.combine(came.x, came)

    return {
        "all-to-all": (lambda: dist.all_to_all_single(into, received.x), 1),
        "group: dispatch and combine": (both, 2),
    }


def time_moves(rank, clock, arguments, hidden, device, communicators):
    """[(name, samples, GB/s)] of one width."""
    tokens = Tokens(rank, arguments, hidden, device)
    named = calls_of_group(tokens) if dist.is_initialized() else {}
    for communicator, of_few in zip(communicators, of_each(arguments)):
        windows = OverWindows(tokens, communicator)
        named[f"plan{of_few}"] = (windows.plan, 0)
        named[f"dispatch{of_few}"] = (windows.dispatch, 1)
        named[f"dispatch in MXFP8{of_few}"] = (windows.dispatch_codes, 0)
        named[f"combine{of_few}"] = (windows.combine, 1)
        named[f"plan, dispatch, combine{of_few}"] = (windows.all_three, 2)
    calls, counts = {}, (1, arguments.calls) if clock.on_gpu else (1,)
    for name, (call, ways) in named.items():
        for count in counts:
            in_graph = name if count == 1 else f"{name}, {count} in a graph"
            calls[in_graph] = clock.captured(call, count), count, ways
    samples = clock.turns({name: call for name, (call, _, _) in calls.items()}, 20)
    found = []
    for name, (_, count, ways) in calls.items():
        seconds = [sample / count for sample in samples[name]]
        rate = ways * tokens.link_bytes / percentile(seconds, 0.5) / 1e9
        found.append((name, seconds, rate))
    return found


# ---- a layer ----


class Shared(torch.nn.Module):
    """A dense expert of every token: moire's MLP with one group."""

    def __init__(self, hidden, width, **options):
        super().__init__()
        self.mlp = moire.nn.GroupedMLP(1, hidden, width, **options)
        self.offsets = None

    def forward(self, x):
        if self.offsets is None or self.offsets[0] != len(x):
            self.offsets = len(x), torch.tensor([len(x)], device=x.device)
        return self.mlp(x, moire.Groups(splits=self.offsets[1]))


def steps_of_layer(rank, arguments, device, communicators):
    """Forward and backward of the layer, by name."""
    hidden, width = (int(n) for n in arguments.layer.split("x"))
    local, tokens, k = arguments.experts // rank.size, arguments.tokens, arguments.choices
    options = {"device": device, "dtype": BF16}
    experts = moire.nn.GroupedMLP(local, hidden, width, **options)
    shared = Shared(hidden, width, **options)
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(rank.rank))
    choices = (draw(tokens, n).topk(min(k, n)) for n in (local, arguments.experts))
    of_own, of_every = ((idx.to(device), weights.to(device)) for weights, idx in choices)
    x, grad_y = (torch.randn(tokens, hidden).to(device, BF16) for _ in range(2))
    x.requires_grad_()
    rows = {"max_tokens": tokens, "max_rows": tokens * k * 9 // 8 + 256}
    groups = [
        moire.ExpertParallel(communicator, num_experts=arguments.experts, **rows)
        for communicator in communicators
    ]

    def step(layer):
        for p in (x, *layer.parameters()):
            p.grad = None
        layer(x).backward(grad_y)
        return [x.grad, *(p.grad for p in layer.parameters())]

    layers = {"alone": moire.nn.MoE(experts, lambda x: of_own)}
    layers["alone, shared expert"] = moire.nn.MoE(experts, lambda x: of_own, shared)
    if groups:
        over_windows = partial(moire.nn.MoE, experts, lambda x: of_every)
        layers["over windows"] = over_windows(group=groups[0])
        layers["over windows, shared expert"] = over_windows(shared, group=groups[0])
        named = list(zip(of_each(arguments), groups))
        for count in arguments.micro_batches:
            for of_few, group in named:
                name = f"over windows, {count} micro-batches{of_few}"
                layers[name] = over_windows(group=group, micro_batches=count)
        for of_few, group in named[1:] or named:
            name = f"over windows, shared expert beside{of_few}"
            layers[name] = over_windows(shared, group=group, overlap=True)
    return {name: partial(step, layer) for name, layer in layers.items()}


def time_layer(rank, clock, arguments, device, communicators):
    """[(name, samples, over the same without communication)]."""
    steps = steps_of_layer(rank, arguments, device, communicators)
    samples = clock.turns({name: clock.captured(step) for name, step in steps.items()}, 3)
    found = []
    for name in samples:
        base = "alone, shared expert" if "shared" in name else "alone"
        ratios = [a / b for a, b in zip(samples[name], samples[base])]
        found.append((name, samples[name], percentile(ratios, 0.5)))
    return found


# ---- the program ----


def run(rank, arguments, found):
    """Everything, on one rank; rank 0 prints and keeps it."""
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    clock, widths = Clock(rank, arguments), list(arguments.hidden)
    widest = max([*widths, int((arguments.layer or "0").split("x")[0])])
    rows = rank.size * arguments.tokens
    communicators = rank.communicators(rows * (2 * widest + 8 * arguments.choices) + (1 << 20))

    def keep(what, rows, unit):
        for name, samples, figure in rows if rank.rank == 0 else ():
            found.append({"what": what, "case": name, unit: figure, "seconds": samples})
            us = 1e6 * percentile(samples, 0.5)
            print(f"{what:12} {name:58} {us:9.1f} us {figure:8.3f} {unit}", flush=True)

    for hidden in widths:
        moves = time_moves(rank, clock, arguments, hidden, device, communicators)
        keep(f"H = {hidden}", moves, "GB/s")
    if arguments.layer:
        layer = time_layer(rank, clock, arguments, device, communicators)
        keep(f"layer {arguments.layer}", layer, "x alone")


def run_threads(arguments, found):
    size = arguments.threads
    OfThreads.barrier, OfThreads.shared = threading.Barrier(size), [None] * size
    failed = []

    def work(r):
        try:
            if arguments.device == "cuda":
                torch.cuda.set_device(r % torch.cuda.device_count())
                with torch.cuda.stream(torch.cuda.Stream()):
                    run(OfThreads(r, arguments), arguments, found)
            else:
                run(OfThreads(r, arguments), arguments, found)
        except BaseException:
            failed.append(r)
            OfThreads.barrier.abort()
            raise

    if arguments.device == "cuda":
        torch.cuda.init()
    threads = [threading.Thread(target=work, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failed else 0


def main():
    arguments, found, code = parse_arguments(), [], 0
    if arguments.threads is None:
        run(OfProcesses(arguments), arguments, found)
    else:
        code = run_threads(arguments, found)
    if arguments.json and found:
        about = {"command": " ".join(sys.argv), **vars(arguments), "torch": torch.__version__}
        about["ranks"] = arguments.threads or dist.get_world_size()
        about["gpu"] = torch.cuda.get_device_name() if arguments.device == "cuda" else None
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**about, "moire": library(), "rows": found}, file, indent=1, default=list)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
