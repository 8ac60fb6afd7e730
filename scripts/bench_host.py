#!/usr/bin/env python3
"""Host time: what a call costs before and besides the work itself, layer by layer.

On a CPU the batch has no rows, so that a call is all checks, allocations and bookkeeping; on a GPU
it has a few, nothing waits for the kernels while the clock runs, and the queue is emptied between
rounds. Rounds of the cases are interleaved, so that a drift of the machine meets all of them;
printed are the median of the rounds, their 10th and 90th percentile and the least, which on a
machine that others use as well is the one to compare, in microseconds. Where
python/invoke.cpp makes the calls, each is timed by cffi as well. Beside them are the same MLP by
torch's grouped_mm, and by Transformer Engine where that can be imported.

  scripts/bench_host.py                       the table, on the CPU
  scripts/bench_host.py --device cuda         calls that launch kernels
  scripts/bench_host.py --json out.json       the samples as well
"""

import argparse
import json
import pathlib
import platform
import time
import types

import moire
import torch
from moire import _abi, invoke
from peers.case import Case, grouped_mm
from peers.others import join
from results import library, summary

EXPERTS, HIDDEN, WIDTH, CHOICES = 4, 64, 32, 2
CALLS = 20  # of one case in a round: as many launches as any queue holds
BY_CFFI = ", by cffi"


class Layer:
    """The tensors of one small MLP and everything that is called with them."""

    def __init__(self, device, rows, dtype):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.rows = rows
        self.splits = [rows // EXPERTS] * EXPERTS
        self.x, self.grad_y = normal(rows, HIDDEN), normal(rows, HIDDEN)
        self.w1, self.w2 = normal(EXPERTS, 2 * WIDTH, HIDDEN), normal(EXPERTS, HIDDEN, WIDTH)
        self.listed = [list(w.unbind()) for w in (self.w1, self.w2)]
        self.leaves = [t.clone().requires_grad_() for t in (self.x, self.w1, self.w2)]
        tokens = rows // CHOICES
        self.logits = torch.randn(tokens, EXPERTS, generator=generator).to(device)
        self.topk_idx, self.topk_weights = moire.router(self.logits, CHOICES)
        self.plan = moire.make_plan(self.topk_idx, EXPERTS)
        self.groups = moire.Groups(splits=torch.tensor(self.splits, device=device))
        self.given_splits = torch.tensor(self.splits, device=device)

    def steps(self):
        """Forward and backward of modules in training, by name."""
        into = {"accumulate_into_main_grad": True}
        ways = {
            "": {},
            ", main_grad": into,
            ", delayed": {"delay_wgrad_compute": True},
            ", main_grad, delayed": {**into, "delay_wgrad_compute": True},
            ", primary MXFP8, main_grad": {**into, "primary": "mxfp8"},
            ", autocast": {"dtype": torch.float32},
        }
        like = {"device": self.x.device, "dtype": self.x.dtype}
        steps = {n: self.step(n == ", autocast", **{**like, **way}) for n, way in ways.items()}
        return {f"GroupedMLP and backward{name}": step for name, step in steps.items()}

    def step(self, is_cast, **options):
        """One of a GroupedMLP, and the gradients that it left for later."""
        mlp = moire.nn.GroupedMLP(EXPERTS, HIDDEN, WIDTH, **options)
        for p in mlp.parameters():
            p.main_grad = torch.zeros(p.shape, device=p.device)
        x = self.leaves[0].detach().clone().requires_grad_()
        autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=is_cast)

        def run():
            with autocast:
                y = mlp(x, self.groups)
            y.backward(self.grad_y.to(y.dtype))
            mlp.backward_dw()

        return run

    def forward_and_backward(self):
        x, w1, w2 = self.leaves
        y = moire.grouped_mlp(x, w1, w2, self.groups)
        torch.autograd.grad(y, self.leaves, self.grad_y)

    def cases(self):
        """Calls of Python, by name."""
        x, w1, w2, groups = self.x, self.w1, self.w2, self.groups
        lx, lw1, lw2 = self.leaves
        routed = (self.topk_idx, self.topk_weights)
        tokens = x[: self.rows // CHOICES]
        fields = self.fields()
        return {
            "torch.ops.moire.grouped_mlp": lambda: torch.ops.moire.grouped_mlp(**fields),
            "grouped_mlp": lambda: moire.grouped_mlp(x, w1, w2, groups),
            "grouped_mlp, listed weights": lambda: moire.grouped_mlp(x, *self.listed, groups),
            "grouped_mlp, MXFP8": lambda: moire.grouped_mlp(x, w1, w2, groups, recipe="mxfp8"),
            "grouped_mlp with gradients": lambda: moire.grouped_mlp(lx, lw1, lw2, groups),
            "grouped_mlp and backward": self.forward_and_backward,
            "grouped_linear": lambda: moire.grouped_linear(x, w1, groups),
            "moe": lambda: moire.moe(tokens, w1, w2, *routed),
            "moe, plan given": lambda: moire.moe(tokens, w1, w2, *routed, plan=self.plan),
            "router": lambda: moire.router(self.logits, CHOICES),
            "make_plan": lambda: moire.make_plan(self.topk_idx, EXPERTS),
            "Groups": lambda: moire.Groups(splits=self.given_splits),
            **self.steps(),
        }

    def peers(self):
        """The MLP of others, forward and with its backward."""
        lx, lw1, lw2 = self.leaves
        case = Case("mlp", 0, {}, operands={"kind": "mlp", "tensors": types.SimpleNamespace()})
        case.operands["tensors"].splits = self.splits
        case.operands["probs"] = torch.ones(self.rows, device=lx.device)
        found, ends = {}, self.groups.offsets[1:].int()

        def of_torch(x, w1, w2):
            gate, up = grouped_mm()(x, w1.transpose(1, 2), offs=ends).chunk(2, -1)
            return grouped_mm()(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)

        def both():
            torch.autograd.grad(of_torch(*self.leaves), self.leaves, self.grad_y)

        try:
            both()
        except (AttributeError, RuntimeError) as e:
            print(f"no grouped_mm of torch: {e}")
        else:
            found["torch's grouped_mm MLP"] = lambda: of_torch(self.x, self.w1, self.w2)
            found["torch's grouped_mm MLP with gradients"] = lambda: of_torch(lx, lw1, lw2)
            found["torch's grouped_mm MLP and backward"] = both
        for name, grad_y in (("", None), (" and backward", self.grad_y)):
            case.operands.update(x=lx, w1=lw1, w2=lw2, grad_y=grad_y)
            join(case)
            found.update((f"{peer}'s MLP{name}", run) for peer, run in case.run.items())
        for peer, reason in case.absent.items():
            print(f"no {peer}: {reason}")
        return found

    def fields(self):
        """Of one call of the C entry."""
        return {
            "x": self.x,
            "w1": [self.w1],
            "w2": [self.w2],
            "y": torch.empty_like(self.x),
            "offsets": self.groups.offsets,
            "num_groups": EXPERTS,
            "capacity": self.rows,
            "activation": [0.0] * 4,
            "layout": [0, 0],
        }

    def entries(self):
        """What lies under the calls: C on a struct that is filled once."""
        ffi, lib = _abi.ffi, _abi.lib

        def tensor(t):
            code = {torch.float32: 1, torch.bfloat16: 2}[t.dtype]
            address = ffi.cast("void *", t.data_ptr())
            return address, code, t.ndim, tuple(t.shape), 0

        options = ffi.new("moire_context_options *")
        options.struct_size, options.num_threads = ffi.sizeof(options[0]), 1
        options.device = lib.MOIRE_CPU if self.x.is_cpu else lib.MOIRE_CUDA
        created = ffi.new("moire_context **")
        assert lib.moire_context_create(options, created) == 0, _abi.text(lib.moire_last_error())
        context, fields = created[0], self.fields()
        args, needed = ffi.new("moire_grouped_mlp_args *"), ffi.new("size_t *")
        args.struct_size = ffi.sizeof(args[0])
        args.x, args.y = tensor(fields["x"]), tensor(fields["y"])
        args.w1.tensor, args.w2.tensor = tensor(self.w1), tensor(self.w2)
        offsets = ffi.cast("int64_t *", self.groups.offsets.data_ptr())
        args.groups = (offsets, EXPERTS, self.rows)
        assert lib.moire_grouped_mlp_workspace(context, args, needed) == 0
        scratch = torch.empty(needed[0] + 256, dtype=torch.uint8, device=self.x.device)
        address = scratch.data_ptr()
        args.workspace = (ffi.cast("void *", address + -address % 256), needed[0])
        assert lib.moire_grouped_mlp(context, args) == 0, _abi.text(lib.moire_last_error())
        alive = (created, fields, scratch)
        size, run = lib.moire_grouped_mlp_workspace, lib.moire_grouped_mlp
        return {
            "an empty C call": _abi.lib.moire_version_number,
            "C: grouped_mlp_workspace": lambda: (size(context, args, needed), alive),
            "C: grouped_mlp": lambda: (run(context, args), alive),
        }


def turns_of(layer):
    """(name, call, what makes calls of Torch's tensors) of all that is timed."""
    ways = {"": invoke.compiled_for}
    if invoke.compiled_for is not None:
        ways[BY_CFFI] = None
    calls = {**layer.entries(), **layer.peers()}
    turns = [(name, call, invoke.compiled_for) for name, call in calls.items()]
    for name, call in layer.cases().items():
        try:
            call()
        except moire.Unsupported as e:
            print(f"no {name}: {e}")
            continue
        turns += [(name + suffix, call, way) for suffix, way in ways.items()]
    return turns


def measure(turns, seconds, device):
    """Microseconds per call of each, one sample a round."""
    samples = {name: [] for name, _, _ in turns}
    for _, call, _ in turns:
        for _ in range(CALLS):
            call()
    end, compiled = time.perf_counter() + seconds, invoke.compiled_for
    while True:
        for name, call, invoke.compiled_for in turns:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter_ns() - begin) / CALLS / 1e3)
        if time.perf_counter() > end:
            invoke.compiled_for = compiled
            return samples


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=20, help="for all cases together")
    parser.add_argument("--json", type=pathlib.Path, help="where the samples go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = 0 if options.device == "cpu" else EXPERTS * CHOICES
    layer = Layer(options.device, rows, getattr(torch, options.dtype))
    samples = measure(turns_of(layer), options.seconds, options.device)
    about = f"torch {torch.__version__}, {rows} rows, {options.dtype}"
    print(f"| call | us | p10 | p90 | least |  {about}")
    print("|---|---|---|---|---|")
    results = {name: summary(values) for name, values in samples.items()}
    for name, s in results.items():
        row = (s["median"], s["p10"], s["p90"], min(samples[name]))
        print(f"| {name} | {' | '.join(f'{us:.1f}' for us in row)} |")
    if options.json is not None:
        machine = {"machine": platform.processor() or platform.machine(), **library()}
        report = {"info": machine, "results": results, "samples": samples}
        options.json.write_text(json.dumps(report, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
