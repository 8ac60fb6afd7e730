#!/usr/bin/env python3
"""Few tokens, as when text is generated: the MLP of the experts and the whole layer, forward,
beside torch's grouped_mm, on one GPU. Of so few rows the bytes of the chosen experts' weights are
all that takes time, and launches: so a function here is a CUDA graph of 16 calls, each of tokens of
its own, whose router chooses other experts; what is shown is a call's share. FP8 weights are
prepared once. All take turns by the protocol of scripts/sustained.py (docs/performance.md).

  scripts/bench_decode.py --json build/gpu/decode.json
  scripts/bench_decode.py --shapes qwen3-30b-a3b --tokens 1 2 4 8 --short
"""

import argparse
import gc
import sys
from functools import partial
from typing import NamedTuple

import moire
import torch
from peers import runs
from peers.case import grouped_mm, relative_difference
from peers.layers import choose, torch_layer
from peers.mlps import compiled_act
from peers.shapes import SHAPES, TINY, Tensors
from peers.tables import number
from peers.timing import Bench, TorchGpu
from sustained import SHORT_NOTICE, Progress, plan_text, time_ratio

TORCH, BF16 = "torch", "bf16"
CALLS = 16  # of a graph
LIMITS = {BF16: 2e-2}  # of a relative difference (of norms) from torch's results; of FP8:
FP8_LIMIT = 1e-1
SECONDS_PER_CASE = 3


def main():
    args = arguments()
    runs.need_gpu("bench_decode")
    bench = Bench(TorchGpu(), args.short, dense_of=lambda dtype: {})
    # ms and mj are a graph's.
    report = {**runs.new_report(bench), "calls_of_a_graph": CALLS, "rows": []}
    num_cases = len(args.shapes) * len(args.tokens)
    stretches = num_cases * bench.protocol.turns * 2 * (2 + len(args.recipes))
    print(plan_text(stretches, num_cases, bench.protocol, SECONDS_PER_CASE), flush=True)
    progress = Progress(stretches)
    for name in args.shapes:
        torch._dynamo.reset()  # or it gives up compiling after so many shapes
        tensors = Tensors(TINY if name == "tiny" else SHAPES[name], "cuda")
        for row in rows_of(tensors, args.tokens, args.recipes, bench, progress.tick):
            report["rows"].append(row)
            progress.clear()
            print(row_text(row), flush=True)
            runs.write(args.json, report)
        del tensors
        gc.collect()
        torch.cuda.empty_cache()
    print(table(report["rows"]))
    if args.short:
        print(SHORT_NOTICE)
    wrong = [row for row in report["rows"] if not row["agrees"]]
    return f"bench_decode: {len(wrong)} rows differ from torch's results" if wrong else 0


def arguments(given=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs.add_arguments(parser)
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 16, 128], help="of a call; default: 1 16 128"
    )
    parser.add_argument(
        "--recipes",
        nargs="*",
        choices=["mxfp8", "mxfp8_fast", "fp8_block"],
        default=["fp8_block"],
        help="of FP8, beside BF16; default: fp8_block",
    )
    args = parser.parse_args(given)
    if min(args.tokens) < 1:
        parser.error(f"--tokens has {min(args.tokens)}, needs 1 or more")
    return args


class Batch(NamedTuple):
    """Some tokens, which experts they go to, and their rows in the experts' order."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    rows: torch.Tensor
    probs: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor  # torch's


def batch(tensors, router, tokens):
    s = tensors.shape
    x = tensors.normal(tokens, s.hidden)
    topk_idx, topk_weights = choose(x, router, s.top_k)
    order = topk_idx.flatten().argsort(stable=True)
    counts = torch.bincount(topk_idx.flatten(), minlength=s.experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    probs = topk_weights.flatten()[order]
    ends = offsets[1:].to(torch.int32)
    return Batch(x, topk_idx, topk_weights, x[order // s.top_k], probs, offsets, ends)


def ways(tensors, router, recipes):
    """{kind: {name: function of a Batch}}: "mlp", "layer", and "routed", the layer of choices that
    were made, which has to agree: torch and moire order equal logits differently."""
    s = tensors.shape
    w1, w2 = tensors.weights()
    gm, act = grouped_mm(), compiled_act(dynamic=True)
    layer = torch_layer(s, dynamic=True)

    def torch_mlp(b):
        z = gm(b.rows, w1.transpose(1, 2), offs=b.ends)
        return gm(act(z, b.probs), w2.transpose(1, 2), offs=b.ends)

    def mlp(options, b):
        groups = moire.Groups.of_offsets(b.offsets, len(b.rows))
        return moire.grouped_mlp(b.rows, w1, w2, groups, probs=b.probs, **options)

    def whole(options, b):
        topk_idx, weights = moire.router(b.x @ router.t(), s.top_k, normalize=True)
        return moire.moe(b.x, w1, w2, topk_idx, weights, **options)

    def routed(options, b):
        return moire.moe(b.x, w1, w2, b.topk_idx, b.topk_weights, **options)

    given = {BF16: {}}
    for recipe in recipes:
        copies = [moire.PreparedWeight(w, recipe, forward_only=True) for w in (w1, w2)]
        given[recipe] = dict(recipe=recipe, w1_quantized=copies[0], w2_quantized=copies[1])
    ours = {"mlp": mlp, "layer": whole, "routed": routed}
    theirs = {
        "mlp": torch_mlp,
        "layer": lambda b: layer(b.x, w1, w2, *choose(b.x, router, s.top_k)),
        "routed": lambda b: layer(b.x, w1, w2, b.topk_idx, b.topk_weights),
    }
    return {
        kind: {TORCH: theirs[kind], **{n: partial(ours[kind], o) for n, o in given.items()}}
        for kind in ours
    }


@torch.no_grad()
def rows_of(tensors, all_tokens, recipes, bench, tick):
    s = tensors.shape
    router = tensors.normal(s.experts, s.hidden, scale=s.hidden**-0.5)
    functions = ways(tensors, router, recipes)
    compared = {"mlp": functions["mlp"], "layer": functions.pop("routed")}
    for tokens in all_tokens:
        batches = [batch(tensors, router, tokens) for _ in range(CALLS)]
        chosen = sum((b.offsets.diff() > 0).sum().item() for b in batches) / CALLS
        flop = 6 * tokens * s.top_k * s.hidden * s.width
        for kind, by_name in functions.items():
            run = {n: (replayed(f, batches), CALLS * flop) for n, f in by_name.items()}
            theirs = compared[kind][TORCH]
            differences = {n: difference(f, theirs, batches) for n, f in compared[kind].items()}
            measured = bench.measure(run, tick)
            yield {
                "shape": s.name,
                "kind": kind,
                "tokens": tokens,
                "chosen_experts": chosen,
                "weight_elements": 3 * s.hidden * s.width * chosen,
                "peers": {n: m.to_json() for n, m in measured.items()},
                "ratios": {
                    n: time_ratio(m, measured[TORCH]) for n, m in measured.items() if n != TORCH
                },
                "differences": differences,
                "agrees": all(d < LIMITS.get(n, FP8_LIMIT) for n, d in differences.items()),
            }


def difference(ours, theirs, batches):
    return max(relative_difference(ours(b), theirs(b)) for b in batches[:2])


def replayed(function, batches):
    """A function of all batches, one after the other: on a GPU the replay of their graph."""

    def run():
        for b in batches:
            function(b)

    if not batches[0].x.is_cuda:
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # what is compiled, or allocated once, is then there
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def microseconds(row, name):
    return 1e3 * row["peers"][name]["ms"]["median"] / CALLS


def row_text(row):
    parts = [f"{name} {microseconds(row, name):.1f} µs" for name in row["peers"]]
    doubt = "" if row["agrees"] else f"; RESULTS DIFFER: {row['differences']}"
    return f"{row['shape']}, {row['kind']}, {row['tokens']} tokens: {', '.join(parts)}{doubt}"


def table(rows):
    """Markdown."""
    names = list(rows[0]["peers"])
    head = ["shape", "tokens", "experts chosen", "", f"{TORCH}: µs"]
    head += [f"{n}: µs, torch's time over it, TB/s of weights, mJ" for n in names if n != TORCH]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        line = [row["shape"], f"{row['tokens']}", f"{row['chosen_experts']:.1f}", row["kind"]]
        lines.append([*line, *(cell(row, name) for name in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row, name):
    us = microseconds(row, name)
    if name == TORCH:
        return f"{us:.1f}"
    bytes_read = row["weight_elements"] * (2 if name == BF16 else 1)
    mj = row["peers"][name]["mj"]
    share = None if mj is None else mj / CALLS
    ratio = row["ratios"][name]["median"]
    return f"{us:.1f}, **{ratio:.2f}**, {bytes_read / us / 1e6:.2f}, {number(share, 1)}"


if __name__ == "__main__":
    sys.exit(main())
