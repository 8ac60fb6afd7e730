#!/usr/bin/env python3
"""moire against its peers on one GPU, in one process and on the same tensors: torch's grouped_mm
(with a compiled activation, and autograd), other libraries where they can be imported
(scripts/peers/others.py), and with --loop a loop of cuBLAS calls over the experts.

For each shape: the six bare products, the MLP forward and with its backward (gradients of weights
in BF16, and added to FP32), the whole layer from router to combine, the MLP and two products in FP8
blocks. Splits are ragged, neither
aligned nor padded; TFLOP/s count useful rows. The peers and a dense product of 8192^3 take turns,
each alone until the GPU is at its power limit (scripts/sustained.py, docs/performance.md); ratios
are taken within a turn. What moire and the loop compute is compared with torch's before it is
timed; by how much others' results differ stands beside their rates.

  scripts/bench_peers.py --parts mlp layer --json build/gpu/peers.json
  scripts/bench_peers.py --shapes qwen3-30b-a3b --parts mlp --short
  scripts/bench_peers.py --table build/gpu/peers.json    Markdown of what was measured; no GPU
"""

import argparse
import gc
import importlib.util
import json
import pathlib
import sys
import time

import moire
import torch
from peers import fp8, layers, mlps, others, products, runs
from peers.shapes import SHAPES, TINY, Tensors
from peers.tables import markdown
from peers.timing import Bench, TorchGpu, bytes_kept, host_microseconds
from sustained import SHORT_NOTICE, SUSTAINED, Progress, plan_text, rate_ratio, time_ratio

PARTS = {"gemm": products.cases, "mlp": mlps.cases, "layer": layers.cases, "fp8": fp8.cases}
# How many functions of each case take turns, without the loop and others' libraries; their kind.
FUNCTIONS = {
    "gemm": [(2, "rows")] * 4 + [(3, None)] * 2,
    "mlp": [(2, "mlp"), (3, "mlp backward")],
    "layer": [(2, "layer")] * 2,
    "fp8": [(2, "fp8 rows")] * 2 + [(4, "fp8 mlp")],
}
HAVE_LOOPS = ("gemm", "mlp")
SECONDS_PER_CASE = 6  # to make its tensors, compile and compare


def main():
    args = arguments()
    if args.table:
        reports = [json.loads(path.read_text()) for path in args.table]
        print(markdown([row for report in reports for row in report["rows"]]))
        return 0
    runs.need_gpu("bench_peers")
    began = time.perf_counter()
    bench = Bench(TorchGpu(), args.short, turns=args.turns)
    report = {**runs.new_report(bench), "rows": []}
    stretches, cases = planned(args)
    print(plan_text(stretches, cases, bench.protocol, SECONDS_PER_CASE), flush=True)
    progress = Progress(stretches)
    for name in args.shapes:
        shape = TINY if name == "tiny" else SHAPES[name]
        for part in args.parts:
            torch._dynamo.reset()
            tensors = Tensors(shape, "cuda", args.multiple)
            for row in timed_cases(PARTS[part](tensors), shape, bench, args.loop, progress.tick):
                report["rows"].append(row)
                progress.clear()
                print_row(row)
                runs.write(args.json, report)
    report["gemms"] = [weighted(name, report["rows"]) for name in args.shapes]
    for line in report["gemms"]:
        if line["ratio"]:
            print(f"{line['shape']:<14} six products together: {line['ratio']:.3f} x torch")
    runs.write(args.json, report)
    print(f"took {time.perf_counter() - began:.0f} s")
    if args.short:
        print(SHORT_NOTICE)
    wrong = [row for row in report["rows"] if row.get("error") or not row["agrees"]]
    for row in wrong:
        reason = row.get("error") or f"differs by {row['difference']:.1e}"
        print(f"WRONG {row['shape']} {row['case']}: {reason}", file=sys.stderr)
    return 1 if wrong else 0


def arguments(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs.add_arguments(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--loop", action="store_true", help="time a loop of cuBLAS calls as well")
    parser.add_argument("--multiple", type=int, default=1, help="rows of every expert are one")
    parser.add_argument("--turns", type=int, default=SUSTAINED.turns, help="of each function")
    parser.add_argument("--table", nargs="+", type=pathlib.Path, help="of such files")
    args = parser.parse_args(words)
    if args.turns < 1:
        parser.error(f"--turns is {args.turns}, must be 1 or more")
    return args


def planned(args):
    """(stretches, cases) of a run: what cannot be imported takes none."""
    stretches = cases = 0
    for part in args.parts:
        for functions, kind in FUNCTIONS[part]:
            is_there = kind in others.MODULES and importlib.util.find_spec(others.MODULES[kind])
            functions += 1 + (args.loop and part in HAVE_LOOPS)  # 1: dense
            functions += len(others.makers(kind)) if is_there else 0
            stretches += args.turns * functions
            cases += 1
    return stretches * len(args.shapes), cases * len(args.shapes)


def timed_cases(cases, shape, bench, with_loop, tick):
    """A generator of cases makes the tensors of one at a time."""
    for case in cases:
        others.join(case)
        yield timed(case, shape, bench, with_loop, tick)
        del case
        gc.collect()
        torch.cuda.empty_cache()


def timed(case, shape, bench, with_loop, tick):
    row = {"shape": shape.name, "case": case.name, "flop": case.flop, "absent": case.absent}
    for name in list(case.run):
        error = failure_of(case.run[name])
        if error is not None:
            del case.run[name]
            row["absent"][name] = error
    if "moire" not in case.run or "torch" not in case.run:
        row.update(agrees=False, error=str(row["absent"]), peers={}, ratios={}, of_dense={})
        return row
    difference = case.difference()
    row.update(difference=difference, agrees=difference <= case.limit)
    row["implementations"] = implementations(case.run["moire"])
    if not with_loop:
        case.run.pop("loop", None)
    measured = bench.measure({n: (f, case.flop) for n, f in case.run.items()}, tick, case.dense)
    row["peers"] = {name: m.to_json() for name, m in measured.items()}
    for name, run in case.run.items():
        row["peers"][name]["host_us"] = host_microseconds(run)
        row["peers"][name]["difference"] = case.difference_of(name)
    for name, forward in case.keeps:
        row["peers"][name]["bytes_kept"] = bytes_kept(forward)
    row.update(comparisons(measured))
    return row


def comparisons(measured):
    """Each peer's time over each of ours, and everybody's rate over that of dense."""
    theirs = [name for name in measured if name != "dense" and not name.startswith("moire")]
    ours = [name for name in measured if name.startswith("moire")]
    return {
        "ratios": {
            f"{mine} / {name}": time_ratio(measured[mine], measured[name])
            for mine in ours
            for name in theirs
        },
        "of_dense": {n: rate_ratio(measured[n], measured["dense"]) for n in ours + theirs},
    }


def failure_of(function):
    """Why a peer cannot take the case, or None; the first call also compiles."""
    try:
        function()
        torch.cuda.synchronize()
        moire.check()
    except Exception as e:  # another library's error may be of any type, and is a result here
        return f"{type(e).__name__}: {str(e)[:300]}"
    return None


def implementations(function):
    """What moire runs for it, op by op."""
    return [f"{step['op']}: {step['implementation']}" for step in moire.explain(function)]


def weighted(shape, rows):
    """All six products: torch's time over moire's."""
    found = [r["peers"] for r in rows if r["shape"] == shape and r["case"].startswith("gemm")]
    if not found or not all(found):
        return {"shape": shape, "ratio": None}
    ms = {p: sum(peers[p]["ms"]["median"] for peers in found) for p in ("moire", "torch")}
    return {"shape": shape, "ms": ms, "ratio": ms["torch"] / ms["moire"]}


def print_row(row):
    print(f"{row['shape']:<14} {row['case']}")
    for name, peer in row["peers"].items():
        print(f"    {name:<20} {peer_text(peer)}", end="")
        for label, ratio in (
            ("moire /", row["ratios"].get(f"moire / {name}")),
            ("of dense", row["of_dense"].get(name)),
        ):
            if ratio:
                print(
                    f", {label} {ratio['median']:.3f} [{ratio['least']:.3f}, {ratio['most']:.3f}]",
                    end="",
                )
        print("", flush=True)
    if row["peers"]:
        print(f"    moire and torch differ by {row['difference']:.0e}")
    for name, reason in row["absent"].items():
        print(f"    {name}: {reason}", flush=True)


def peer_text(peer):
    text = f"{peer['ms']['median']:8.3f} ms {peer['tflops']:5.0f} TFLOP/s"
    for key, unit, digits in (("sm_mhz", "MHz", 0), ("watts", "W", 0), ("mj", "mJ", 1)):
        text += f" {peer[key]:7.{digits}f} {unit}" if peer[key] is not None else f"       - {unit}"
    if peer.get("difference") is not None:
        text += f", differs from torch by {peer['difference']:.0e}"
    if "host_us" in peer:
        text += f", host {peer['host_us']:.0f} us"
    if "bytes_kept" in peer:
        text += f", keeps {peer['bytes_kept'] / 1e6:,.0f} MB"
    return text


if __name__ == "__main__":
    sys.exit(main())
