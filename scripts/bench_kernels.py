#!/usr/bin/env python3
"""Where the joules go: energy and time of each of the seven kernels of a grouped MLP's forward and
backward, each beside one bare cuBLAS product of as many FLOP, in steady state, on one GPU.

The kernels of a shape, their bare products and a dense product of 8192^3 take turns by the protocol
of scripts/sustained.py (docs/performance.md). Before they are timed, what the kernels compute has
to be what moire.grouped_mlp computes of the same tensors, bit for bit.

  scripts/bench_kernels.py --json build/gpu/kernels.json
  scripts/bench_kernels.py --shapes qwen3-30b-a3b --short
"""

import argparse
import gc
import sys
import time

import torch
from peers import runs
from peers.kernels import Layer
from peers.shapes import SHAPES, TINY, Tensors
from peers.tables import number
from peers.timing import Bench, TorchGpu, host_microseconds
from results import ratio_span
from sustained import SHORT_NOTICE, Progress, plan_text, time_ratio

NUM_KERNELS = 7
SECONDS_PER_SHAPE = 4
BARE = ", bare"


def main():
    args = arguments()
    runs.need_gpu("bench_kernels")
    began = time.perf_counter()
    bench = Bench(TorchGpu(), args.short)
    report = {**runs.new_report(bench), "shapes": []}
    stretches = len(args.shapes) * bench.protocol.turns * (2 * NUM_KERNELS + 1)
    print(plan_text(stretches, len(args.shapes), bench.protocol, SECONDS_PER_SHAPE), flush=True)
    progress = Progress(stretches)
    for name in args.shapes:
        shape = TINY if name == "tiny" else SHAPES[name]
        report["shapes"].append(measured_shape(Tensors(shape, "cuda"), bench, progress.tick))
        progress.clear()
        print(table(report["shapes"][-1]), flush=True)
        runs.write(args.json, report)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"took {time.perf_counter() - began:.0f} s")
    if args.short:
        print(SHORT_NOTICE)
    wrong = [(s["shape"], s["differs"]) for s in report["shapes"] if s["differs"]]
    for shape, names in wrong:
        print(f"WRONG {shape}: not grouped_mlp's: {', '.join(names)}", file=sys.stderr)
    return 1 if wrong else 0


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs.add_arguments(parser)
    return parser.parse_args()


def measured_shape(tensors, bench, tick=lambda: None):
    layer = Layer(tensors)
    differs = layer.differs_from_mlp()
    kernels = layer.kernels()
    functions = {k.name: (k.run, k.flop) for k in kernels}
    functions |= {k.name + BARE: (k.bare, k.flop) for k in kernels}
    measured = bench.measure(functions, tick)
    rows = [row_of(k, measured[k.name], measured[k.name + BARE]) for k in kernels]
    return {
        "shape": tensors.shape.name,
        "differs": differs,
        "kernels": rows,
        "sum": sum_of([row for kernel, row in zip(kernels, rows) if kernel.is_part]),
        "dense": measured["dense"].to_json(),
    }


def row_of(kernel, ours, bare):
    """`time` and `energy` are ours over those of the bare product."""
    mj, bare_mj = ours.turn_mj(), bare.turn_mj()
    row = {"kernel": kernel.name, "flop": kernel.flop, "moire": ours.to_json()}
    row["moire"]["host_us"] = host_microseconds(kernel.run)
    row |= {"bare": bare.to_json(), "time": time_ratio(bare, ours)}
    return row | {"energy": ratio_span(mj, bare_mj) if mj and bare_mj else None}


def sum_of(rows):
    """Of forward and backward with BF16 gradients; null where energy is not known."""

    def total(whose, value):
        found = [value(row[whose]) for row in rows]
        return None if None in found else sum(found)

    return {
        whose: {
            "ms": total(whose, lambda m: m["ms"]["median"]),
            "mj": total(whose, lambda m: m["mj"]),
        }
        for whose in ("moire", "bare")
    }


def table(shape):
    """Markdown: what docs/performance.md shows."""
    head = ("kernel", "µs", "TFLOP/s", "GHz", "W", "mJ", "pJ/FLOP", "bare: µs, mJ, pJ/FLOP, GHz")
    head = (f"{shape['shape']}: {head[0]}", *head[1:], "time, of bare", "energy, of bare")
    lines = [head, ("---",) * len(head)]
    for row in shape["kernels"]:
        lines.append((row["kernel"], *cells(row, row["moire"], row["bare"])))
    lines.append(("sum of six", *sum_cells(shape["sum"])))
    dense = shape["dense"]
    rate = f"{dense['tflops']:.0f}", number(dense["sm_mhz"], 2, 1e3), number(dense["watts"], 0)
    mj = number(dense["mj"], 1), picojoules(dense, 2 * 8192**3)
    lines.append(("dense 8192³", f"{1e3 * dense['ms']['median']:.0f}", *rate, *mj, "", "", ""))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row, ours, bare):
    energy = row["energy"]["median"] if row["energy"] else None
    return (
        f"{1e3 * ours['ms']['median']:.0f}",
        f"{ours['tflops']:.0f}",
        number(ours["sm_mhz"], 2, 1e3),
        number(ours["watts"], 0),
        number(ours["mj"], 1),
        picojoules(ours, row["flop"]),
        f"{1e3 * bare['ms']['median']:.0f}, {number(bare['mj'], 1)}, "
        f"{picojoules(bare, row['flop'])}, {number(bare['sm_mhz'], 2, 1e3)}",
        f"{row['time']['median']:.3f}",
        number(energy, 3),
    )


def sum_cells(sums):
    ours, bare = sums["moire"], sums["bare"]
    energy = ours["mj"] / bare["mj"] if ours["mj"] and bare["mj"] else None
    bare_text = f"{1e3 * bare['ms']:.0f}, {number(bare['mj'], 1)}"
    ratios = f"{ours['ms'] / bare['ms']:.3f}", number(energy, 3)
    return f"{1e3 * ours['ms']:.0f}", "", "", "", number(ours["mj"], 1), "", bare_text, *ratios


def picojoules(measured, flop):
    return number(None if measured["mj"] is None else 1e9 * measured["mj"] / flop, 3)


if __name__ == "__main__":
    sys.exit(main())
