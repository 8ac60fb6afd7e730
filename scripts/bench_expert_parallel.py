#!/usr/bin/env python3
"""Expert parallelism: dispatch and combine beside a bare all-to-all of the same rows.

  torchrun --nproc-per-node 2 scripts/bench_expert_parallel.py                  the table, on GPUs
  torchrun --nproc-per-node 2 scripts/bench_expert_parallel.py --device cpu --tokens 256
  ... --json out.json                                                           samples as well

4096 tokens a rank choose 8 of 64 experts. "GB/s" counts the rows that have to cross a link, once a
way: those of a rank's tokens that another rank needs. "graph" is dispatch, the plan of what came
and combine, captured as one CUDA graph. Medians over the slowest rank of each call.
"""

import argparse
import json
import os
import statistics
import time

import moire
import torch
import torch.distributed as dist

SHAPES = (7168, 2048)  # H


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--experts", type=int, default=64, help="of all ranks")
    parser.add_argument("--choices", type=int, default=8, help="of each token")
    parser.add_argument("--hidden", type=int, nargs="+", default=SHAPES, metavar="H")
    parser.add_argument("--calls", type=int, default=50, help="timed of each case (default 50)")
    parser.add_argument("--json", metavar="FILE", help="write the samples")
    return parser.parse_args()


_Formatter = argparse.RawDescriptionHelpFormatter


class Case:
    """The tokens of this rank, and what is timed with them, by name."""

    def __init__(self, arguments, hidden, device):
        tokens = arguments.tokens
        torch.manual_seed(dist.get_rank())
        self.device = device
        self.group = moire.ExpertParallel(num_experts=arguments.experts, max_tokens=tokens)
        self.x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        scores = torch.rand(tokens, arguments.experts, device=device)
        self.weights, self.idx = scores.topk(arguments.choices)
        self.received = self.group.dispatch(self.x, self.idx, self.weights)
        owner = self.idx.div(self.group.num_local_experts, rounding_mode="floor")
        others = [r for r in range(self.group.size) if r != self.group.rank]
        sent = sum(int((owner == r).any(1).sum()) for r in others)
        self.link_bytes = sent * hidden * self.x.element_size()
        self.into = torch.empty_like(self.received.x)

    def calls(self):
        named = {
            "all-to-all": lambda: dist.all_to_all_single(self.into, self.received.x),
            "dispatch": lambda: self.group.dispatch(self.x, self.idx, self.weights),
            "combine": lambda: self.group.combine(self.received.x, self.received),
        }
        if self.device.type == "cuda":
            named["graph"] = self.captured()
        return named

    def both(self):
        received = self.group.dispatch(self.x, self.idx, self.weights)
        self.y = self.group.combine(received.x, received)

    def captured(self):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.both()
        return graph.replay


def seconds_of(call, device):
    """One call, begun by all ranks together, on the slowest of them."""
    dist.barrier()
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        marks[0].record()
        call()
        marks[1].record()
        marks[1].synchronize()
        seconds = marks[0].elapsed_time(marks[1]) / 1e3
    else:
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main():
    arguments = parse_arguments()
    on_gpu = arguments.device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    found = []
    for hidden in arguments.hidden:
        case = Case(arguments, hidden, device)
        for name, call in case.calls().items():
            for _ in range(5):
                call()
            samples = [seconds_of(call, device) for _ in range(arguments.calls)]
            median = statistics.median(samples)
            ways = 2 if name == "graph" else 1
            rate = ways * case.link_bytes / median / 1e9
            found.append({"hidden": hidden, "case": name, "GB/s": rate, "seconds": samples})
            if dist.get_rank() == 0:
                print(
                    f"H = {hidden:5} {name:12} {1e6 * median:9.0f} us {rate:7.1f} GB/s", flush=True
                )
    if arguments.json and dist.get_rank() == 0:
        about = {"ranks": dist.get_world_size(), "torch": torch.__version__, **vars(arguments)}
        about["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
        with open(arguments.json, "w") as file:
            json.dump({**about, "cases": found}, file, indent=1, default=list)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
