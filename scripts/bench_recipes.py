#!/usr/bin/env python3
"""What FP8 costs: the MLP of the experts, forward and backward, in other recipes than BF16's beside
BF16's and a dense product, on one GPU. Each recipe is timed with weights whose FP8 copies are kept,
with weights that are quantised at each call, with weights that are prepared:
as FP8 tensor cores read them, or, of mxfp8, with dequantized_weights; with those and weight
gradients added to FP32 ones; with what modules keep made anew at each call from FP32 masters; and
as a module in torch.compile, which prepares its weights once for both passes of a call. x, the
activation and the gradients always are quantised.
All take turns by the protocol of scripts/sustained.py (docs/performance.md).

  scripts/bench_recipes.py --json build/gpu/recipes.json
  scripts/bench_recipes.py --shapes qwen3-30b-a3b --recipes mxfp8 fp8_block --short
"""

import argparse
import gc
import sys
from functools import partial

import moire
import torch
from moire.wgrad import ParameterGradients
from peers import runs
from peers.shapes import SHAPES, TINY, Tensors
from peers.tables import number
from peers.timing import Bench, TorchGpu, bytes_kept
from sustained import SHORT_NOTICE, Progress, plan_text, rate_ratio, time_ratio

BF16 = "bf16"
AT_EACH_CALL = ", weights at each call"
DEQUANTIZED = ", weights kept dequantized"
PREPARED = ", weights prepared"
ADDED = ", FP32 gradients added"
MASTERS = ", weights from FP32 masters at each call"
COMPILED = ", module compiled"
SECONDS_PER_SHAPE = 4


def main():
    args = arguments()
    runs.need_gpu("bench_recipes")
    bench = Bench(TorchGpu(), args.short)
    report = {**runs.new_report(bench), "rows": []}
    stretches = len(args.shapes) * bench.protocol.turns * (2 + 6 * len(args.recipes))
    print(plan_text(stretches, len(args.shapes), bench.protocol, SECONDS_PER_SHAPE), flush=True)
    progress = Progress(stretches)
    for name in args.shapes:
        tensors = Tensors(TINY if name == "tiny" else SHAPES[name], "cuda")
        report["rows"] += rows_of(tensors, args.recipes, bench, progress.tick)
        progress.clear()
        runs.write(args.json, report)
        del tensors
        gc.collect()
        torch.cuda.empty_cache()
    print(table(report["rows"]))
    if args.short:
        print(SHORT_NOTICE)
    return 0


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs.add_arguments(parser)
    parser.add_argument("--recipes", nargs="+", default=["mxfp8"])
    return parser.parse_args()


def rows_of(tensors, recipes, bench, tick):
    forwards, leaves, grad_y = ways(tensors, recipes)
    s = tensors.shape
    flop = 18 * s.rows * s.hidden * s.width

    def with_backward(forward):
        return lambda: torch.autograd.grad(forward()[0], leaves, grad_y)

    measured = bench.measure({n: (with_backward(f), flop) for n, f in forwards.items()}, tick)
    return [
        {
            "shape": s.name,
            "recipe": name,
            **measured[name].to_json(),
            "of_bf16": time_ratio(measured[name], measured[BF16]),
            "of_dense": rate_ratio(measured[name], measured["dense"]),
            "kept_bytes": bytes_kept(forward),
        }
        for name, forward in forwards.items()
    ]


def ways(tensors, recipes):
    """{name: forward}, whose results have a backward; its leaves; the gradient of the result."""
    s = tensors.shape
    x = tensors.normal(s.rows, s.hidden, requires_grad=True)
    w1, w2 = map(torch.nn.Parameter, tensors.weights())
    probs = tensors.uniform(s.rows, requires_grad=True)
    groups = moire.Groups.of_offsets(tensors.offsets, s.rows)

    for w in (w1, w2):
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        w.grad_added_to_main_grad = False  # so that autograd gets something for it
    added = [ParameterGradients(True, False).of_call("grouped_mlp", w, None) for w in (w1, w2)]

    def mlp(recipe=None, copies=(None, None), wgrad=None):
        given = dict(w1_quantized=copies[0], w2_quantized=copies[1], wgrad=wgrad)
        return [moire.grouped_mlp(x, w1, w2, groups, probs=probs, recipe=recipe, **given)]

    def quantized(recipe):
        with torch.no_grad():
            return [moire.quantize(w, recipe=recipe, columnwise=True) for w in (w1, w2)]

    masters = [w.detach().float() for w in (w1, w2)]

    def from_masters(recipe, kept):
        return mlp(recipe, [copies.quantize_(m) for copies, m in zip(kept, masters)])

    def compiled(recipe):
        with torch.device("meta"):
            sizes = s.experts, s.hidden, s.width
            module = moire.nn.GroupedMLP(*sizes, recipe=recipe, dtype=w1.dtype)
        module.fc1.weight, module.fc2.weight = w1, w2
        return torch.compile(module)

    def by_module(module):
        return [module(x, groups, probs=probs)]

    forwards = {BF16: mlp}
    for recipe in recipes:
        copies = quantized(recipe)
        forwards[recipe] = partial(mlp, recipe, copies)
        forwards[recipe + AT_EACH_CALL] = partial(mlp, recipe)
        kept = moire.Recipe(recipe, dequantized_weights=recipe == "mxfp8")
        prepared = [moire.PreparedWeight(w.detach(), kept) for w in (w1, w2)]
        are_kept = recipe + (DEQUANTIZED if recipe == "mxfp8" else PREPARED)
        forwards[are_kept] = partial(mlp, recipe, prepared)
        forwards[are_kept + ADDED] = partial(mlp, recipe, prepared, added)
        forwards[recipe + MASTERS] = partial(
            from_masters, recipe, copies if recipe == "mxfp8" else prepared
        )
        forwards[recipe + COMPILED] = partial(by_module, compiled(recipe))
    return forwards, [x, w1, w2, probs], tensors.normal(s.rows, s.hidden)


def table(rows):
    """Markdown."""
    rates = ("of BF16's rate", "of dense")
    head = ("shape", "recipe", "ms", "TFLOP/s", "GHz", "W", "mJ", *rates, "kept MiB")
    lines = [head, ("---",) * len(head)]
    for row in rows:
        cells = (f"{row['ms']['median']:.3f}", f"{row['tflops']:.0f}")
        power = number(row["sm_mhz"], 2, 1e3), number(row["watts"], 0), number(row["mj"], 0)
        ratios = (f"{row[name]['median']:.3f}" for name in ("of_bf16", "of_dense"))
        ends = *ratios, f"{row['kept_bytes'] / 2**20:.0f}"
        lines.append((row["shape"], row["recipe"], *cells, *power, *ends))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
