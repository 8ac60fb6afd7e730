#!/usr/bin/env python3
"""The whole expert MLP: moire against PyTorch, as a loop over experts and as torch's grouped_mm, in
one process.

The loop is the fast form of it: weights unbound once, one F.linear per expert, chunk, silu, one
concatenation. grouped_mm (public since torch 2.10) multiplies all experts in a call; where this
torch has none for a CPU, its rows say why. Rounds of the variants are interleaved, so that a drift
of the machine meets all of them; a ratio is the median of the ratios of single rounds, the peer's
time over moire's. GFLOP/s counts the GEMMs of useful rows: 6 R H F forward, three times that with
backward.

  scripts/bench_torch.py                          the table, for the problems of problems/cpu.txt
  scripts/bench_torch.py --json out.json          the samples as well
  scripts/bench_torch.py --shapes olmoe_1b_7b/8 --dtypes fp32 --seconds 10
"""

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time

import moire
import torch
import torch.nn.functional as F
from peers.case import grouped_mm
from results import library, percentile

PROBLEMS = pathlib.Path(__file__).resolve().parent.parent / "problems" / "cpu.txt"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = {"loop": "PyTorch loop over experts", "grouped_mm": "torch grouped_mm"}


def read_shapes(path):
    """{name: fields} of the lines of a problem file; splits as a list of rows."""
    shapes = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        fields = dict(word.split("=", 1) for word in line.split())
        experts, rows = int(fields["groups"]), int(fields["rows"])
        uniform = [rows // experts] * experts
        splits = fields["splits"]
        fields["splits"] = uniform if splits == "uniform" else [int(n) for n in splits.split(",")]
        shapes[fields["name"]] = fields
    return shapes


SHAPES = read_shapes(PROBLEMS)


def why_no_grouped_mm(dtype):
    """Why this torch cannot multiply groups on a CPU, with gradients; empty where it can."""
    a = torch.zeros(4, 16, dtype=dtype, requires_grad=True)
    b = torch.zeros(2, 16, 16, dtype=dtype, requires_grad=True)
    try:
        grouped_mm()(a, b, offs=torch.tensor([1, 4], dtype=torch.int32)).sum().backward()
    except (AttributeError, RuntimeError) as e:
        return f"torch {torch.__version__} has none here: {str(e).splitlines()[0]}"
    return ""


class Problem:
    """The tensors of one shape and dtype, and the MLPs on them."""

    def __init__(self, name, dtype):
        fields = SHAPES[name]
        self.experts, self.hidden, self.ffn = (int(fields[k]) for k in ("groups", "hidden", "ffn"))
        self.splits = fields["splits"]
        self.rows = sum(self.splits)
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.w1 = normal(self.experts, 2 * self.ffn, self.hidden) / self.hidden**0.5
        self.w2 = normal(self.experts, self.hidden, self.ffn) / self.ffn**0.5
        self.x = normal(self.rows, self.hidden)
        for leaf in (self.w1, self.w2, self.x):
            leaf.requires_grad_()
        self.probs = torch.rand(self.rows, generator=generator)
        self.grad_y = normal(self.rows, self.hidden)
        self.groups = moire.Groups(splits=self.splits, capacity=self.rows)
        self.ends = torch.tensor(self.splits).cumsum(0).to(torch.int32)
        self.why_no_grouped_mm = why_no_grouped_mm(dtype)
        self.flop = 6 * self.rows * self.hidden * self.ffn

    def loop_mlp(self):
        outputs, start = [], 0
        w1, w2 = self.w1.unbind(0), self.w2.unbind(0)
        for expert, count in enumerate(self.splits):
            if count:
                rows = self.x[start : start + count]
                gate, up = F.linear(rows, w1[expert]).chunk(2, -1)
                act = F.silu(gate) * up * self.probs[start : start + count, None].to(rows.dtype)
                outputs.append(F.linear(act, w2[expert]))
            start += count
        return torch.cat(outputs)

    def grouped_mm_mlp(self):
        multiply = grouped_mm()
        gate, up = multiply(self.x, self.w1.transpose(1, 2), offs=self.ends).chunk(2, -1)
        act = F.silu(gate) * up * self.probs[:, None].to(gate.dtype)
        return multiply(act, self.w2.transpose(1, 2), offs=self.ends)

    def moire_mlp(self):
        return moire.grouped_mlp(self.x, self.w1, self.w2, self.groups, probs=self.probs)

    def variants(self):
        """What is timed: (pass, library) -> a function and its FLOP."""

        def forward(mlp):
            def run():
                with torch.no_grad():
                    mlp()

            return run

        def both(mlp):
            return lambda: torch.autograd.grad(mlp(), [self.x, self.w1, self.w2], self.grad_y)

        mlps = self.mlps()
        table = {("forward", k): (forward(m), self.flop) for k, m in mlps.items()}
        return table | {("forward+backward", k): (both(m), 3 * self.flop) for k, m in mlps.items()}

    def mlps(self):
        found = {"moire": self.moire_mlp, "loop": self.loop_mlp}
        return found if self.why_no_grouped_mm else {**found, "grouped_mm": self.grouped_mm_mlp}

    def relative_differences(self):
        """Of each peer: the largest difference of results and gradients from moire's, relative to
        the largest value of each."""
        ours, *theirs = [(name, self.results(mlp)) for name, mlp in self.mlps().items()]
        differences = {}
        for name, results in theirs:
            pairs = [(a.float(), b.float()) for a, b in zip(ours[1], results)]
            differences[name] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        return differences

    def results(self, mlp):
        y = mlp()
        return [y.detach(), *torch.autograd.grad(y, [self.x, self.w1, self.w2], self.grad_y)]


def time_interleaved(variants, seconds, progress):
    """Rounds in which every variant runs once: until `seconds` per variant are spent, and at least
    three unless a round is very slow."""
    samples = {key: [] for key in variants}
    for run, _ in variants.values():
        run()  # warm-up
    start = time.perf_counter()
    while True:
        for key, (run, _) in variants.items():
            begin = time.perf_counter()
            run()
            samples[key].append(time.perf_counter() - begin)
        rounds, spent = len(samples[next(iter(samples))]), time.perf_counter() - start
        progress(f"round {rounds}, {spent:.0f} s")
        budget = seconds * len(variants)
        if spent > budget and (rounds >= 3 or spent > 5 * budget):
            return samples


def summarise(shape, dtype, which, variants, samples, differences):
    """A row for each peer."""
    ours, flop = samples[which, "moire"], variants[which, "moire"][1]
    for peer, difference in differences.items():
        theirs = samples[which, peer]
        ratios = [t / m for m, t in zip(ours, theirs)]
        yield {
            "shape": shape,
            "dtype": dtype,
            "pass": which,
            "peer": PEERS[peer],
            "moire_gflops": flop / statistics.median(ours) / 1e9,
            "peer_gflops": flop / statistics.median(theirs) / 1e9,
            "ratio": statistics.median(ratios),
            "ratio_p10": percentile(ratios, 0.1),
            "ratio_p90": percentile(ratios, 0.9),
            "relative_difference": difference,
            "moire_seconds": ours,
            "peer_seconds": theirs,
        }


def machine(threads):
    with open("/proc/cpuinfo") as info:
        names = [line.split(": ")[1].strip() for line in info if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": threads,
        "torch": torch.__version__,
        "torch_simd": torch.backends.cpu.get_cpu_capability(),
        "torch_has_bf16_instructions": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "moire": library(),
    }


def print_row(row):
    label = f"{row['shape']:<14} {row['dtype']} {row['pass']:<16} {row['peer']:<25}"
    if "absent" in row:
        print(f"{label} {row['absent']}", flush=True)
        return
    print(
        f"{label} {row['peer_gflops']:7.1f} GFLOP/s   moire {row['moire_gflops']:7.1f}"
        f"   ratio {row['ratio']:6.2f} [{row['ratio_p10']:.2f}, {row['ratio_p90']:.2f}]"
        f"   difference {row['relative_difference']:.1e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="time per variant")
    parser.add_argument("--json", help="write machine, protocol, rows and all samples to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = machine(args.threads)
    print(f"{facts['processor']}, {args.threads} threads, torch {torch.__version__}")

    rows = []
    for shape in args.shapes:
        for dtype in args.dtypes:

            def progress(text, label=f"{shape} {dtype}"):
                if sys.stderr.isatty():
                    print(f"\r{label}: {text}\033[K", end="", file=sys.stderr, flush=True)

            problem = Problem(shape, DTYPES[dtype])
            differences = problem.relative_differences()
            variants = problem.variants()
            samples = time_interleaved(variants, args.seconds, progress)
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr)
            for which in ("forward", "forward+backward"):
                found = list(summarise(shape, dtype, which, variants, samples, differences))
                if problem.why_no_grouped_mm:
                    labels = {"shape": shape, "dtype": dtype, "pass": which}
                    reason = problem.why_no_grouped_mm
                    found.append({**labels, "peer": PEERS["grouped_mm"], "absent": reason})
                for row in found:
                    print_row(row)
                rows += found
    if args.json:
        report = {"command": " ".join(sys.argv), "machine": facts, "rows": rows}
        with open(args.json, "w") as out:
            json.dump(report, out, indent=1)


if __name__ == "__main__":
    main()
