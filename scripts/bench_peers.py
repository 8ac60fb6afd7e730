#!/usr/bin/env python3
"""moire against its peers on one GPU, in one process and on the same tensors: torch's grouped_mm
(with a compiled activation, and autograd), a loop of cuBLAS calls over the experts, and other
libraries where they can be imported (scripts/peers/others.py).

For each shape: the six bare products, the MLP forward and with its backward (gradients of weights
in BF16, and added to FP32), the whole layer from router to combine. Splits are ragged, neither
aligned nor padded; TFLOP/s count useful rows. The peers take turns, a stretch of calls each, four
rounds; a ratio is the median of the rounds' ratios. What moire and the loop compute is compared
with torch's before it is timed.

  scripts/bench_peers.py --json build/gpu/peers.json
  scripts/bench_peers.py --shapes qwen3-30b-a3b --cases mlp --seconds 0.5
"""

import argparse
import gc
import json
import pathlib
import sys

import moire
import torch
from peers import layers, mlps, others, products
from peers.shapes import SHAPES, TINY, Tensors
from peers.timing import Clock, bytes_kept, clocks, host_microseconds
from results import library, summary

CASES = {"gemm": products.cases, "mlp": mlps.cases, "layer": layers.cases}


def main():
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("bench_peers: Torch finds no GPU")
    if moire.info()["cuda"].startswith("off"):
        sys.exit("bench_peers: this build of moire has no CUDA backend")
    clock = Clock(args.seconds)
    report = {"command": " ".join(sys.argv), "machine": machine(), "rows": []}
    report["roofline"] = roofline(clock)
    print(f"{report['machine']['gpu']}, torch {torch.__version__}; {report['roofline']}")
    for name in args.shapes:
        shape = TINY if name == "tiny" else SHAPES[name]
        for kind in args.cases:
            torch._dynamo.reset()
            for row in timed_cases(CASES[kind](Tensors(shape, "cuda")), shape, clock):
                report["rows"].append(row)
                print_row(row, report["roofline"])
                write(args.json, report)
    report["gemms"] = [weighted(name, report["rows"]) for name in args.shapes]
    for line in report["gemms"]:
        if line["ratio"]:
            print(f"{line['shape']:<14} six products together: {line['ratio']:.3f} x torch")
    write(args.json, report)
    wrong = [row for row in report["rows"] if row.get("error") or not row["agrees"]]
    for row in wrong:
        reason = row.get("error") or f"differs by {row['difference']:.1e}"
        print(f"WRONG {row['shape']} {row['case']}: {reason}", file=sys.stderr)
    return 1 if wrong else 0


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "tiny"], default=list(SHAPES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=0.2, help="of a stretch of calls")
    parser.add_argument("--json", type=pathlib.Path, help="write everything to this file")
    return parser.parse_args()


def timed_cases(cases, shape, clock):
    """A generator of cases makes the tensors of one at a time."""
    for case in cases:
        others.join(case)
        yield timed(case, shape, clock)
        del case
        gc.collect()
        torch.cuda.empty_cache()


def timed(case, shape, clock):
    row = {"shape": shape.name, "case": case.name, "flop": case.flop, "absent": case.absent}
    for name in list(case.run):
        error = failure_of(case.run[name])
        if error is not None:
            del case.run[name]
            row["absent"][name] = error
    if "moire" not in case.run or "torch" not in case.run:
        row.update(agrees=False, error=str(row["absent"]), peers={}, ratios={}, clocks=[])
        return row
    difference = case.difference()
    row.update(difference=difference, agrees=difference <= case.limit)
    row["implementations"] = implementations(case.run["moire"])
    row["clocks"] = [clocks()]
    samples = clock.rounds(case.run)
    row["clocks"].append(clocks())
    row["peers"] = {
        name: {
            "ms": summary(ms),
            "tflops": case.flop / summary(ms)["median"] / 1e9,
            "host_us": host_microseconds(case.run[name]),
            "samples_ms": ms,
        }
        for name, ms in samples.items()
    }
    for name, forward in case.keeps:
        row["peers"][name]["bytes_kept"] = bytes_kept(forward)
    ours = {name: ms for name, ms in samples.items() if name.startswith("moire")}
    row["ratios"] = {
        f"{mine} / {name}": summary([t / m for m, t in zip(ours[mine], samples[name])])
        for mine in ours
        for name in samples
        if name not in ours
    }
    return row


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


def roofline(clock):
    """The dense rate of cuBLAS and the copy bandwidth of this GPU, now."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = clock.rounds({"dense": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return {
        "dense_tflops": round(2 * 8192**3 / summary(ms["dense"])["median"] / 1e9, 1),
        "copy_gb_per_s": round(2 * 2**30 / summary(ms["copy"])["median"] / 1e6),
    }


def machine():
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "moire": library(),
    }


def print_row(row, roof):
    print(f"{row['shape']:<14} {row['case']:<21}", end="")
    for name, peer in row["peers"].items():
        print(f" | {name} {peer['tflops']:5.0f} TFLOP/s {peer['ms']['median']:7.3f} ms", end="")
        print(f" host {peer['host_us']:.0f} us" if name == "moire" else "", end="")
    if row["peers"]:
        for name, r in row["ratios"].items():
            if name.endswith("/ torch"):
                print(f" | {name} {r['median']:.3f} [{r['p10']:.3f}, {r['p90']:.3f}]", end="")
        share = row["peers"]["moire"]["tflops"] / roof["dense_tflops"]
        print(f", {share:.0%} of dense, off {row['difference']:.0e}", end="")
        kept = {n: p["bytes_kept"] / 1e6 for n, p in row["peers"].items() if "bytes_kept" in p}
        if kept:
            words = ", ".join(f"{name} {megabytes:,.0f}" for name, megabytes in kept.items())
            print(f", MB kept for backward: {words}", end="")
    print("", flush=True)
    for name, reason in row["absent"].items():
        print(f"{'':<15}{name}: {reason}", flush=True)


def write(path, report):
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
