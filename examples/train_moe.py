#!/usr/bin/env python3
"""Trains a small mixture-of-experts language model on real text, several times from the same start:
with expert layers that are a PyTorch loop over experts, torch's grouped_mm, and moire's. Prints a
table and writes a report; with --ranks, spreads moire's experts over processes instead and compares
their loss with that of one. The exit code is 1 where one of the findings below the table is "NO".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from pathlib import Path

from moe_demo import recipes as recipe_list
from moe_demo import report, results, text
from moe_demo.runs import train_all

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    arguments = parse_arguments()
    config = make_config(arguments)
    if arguments.worker:
        return work(arguments, config)

    if arguments.ranks:
        return compare_ranks(arguments, config)
    chosen = choose_recipes(arguments.recipes, config.device)
    data = text.load(arguments.text, config.seed)
    print(f"text: {data.source}; order-0 entropy {data.entropy:.2f} bits per byte")
    print(describe(config))
    child = [sys.executable, __file__, *sys.argv[1:], "--device", config.device, "--worker"]
    runs = train_all(chosen, config, lambda recipe: [*child, recipe.name])
    found = {
        "config": dataclasses.asdict(config),
        "text": {"source": data.source, "entropy": data.entropy},
        "machine": machine(),
        "command": " ".join(["python", "examples/train_moe.py", *sys.argv[1:]]),
        "runs": runs,
    }
    print("\n" + results.as_text([results.HEADER, *results.table(found)]) + "\n")
    findings = results.findings(found)
    for holds, sentence in findings:
        print(("yes  " if holds else "NO   ") + sentence)

    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "report.html").write_text(report.render(found))
    print(f"\nwrote {out / 'report.html'} and results.json beside it")
    return 0 if all(holds for holds, _ in findings) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="train on these files (default: the standard library's sources)",
    )
    parser.add_argument(
        "--steps", type=int, help=f"optimizer steps per run (default {recipe_list.Config.steps})"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model for a few steps: half a minute, to see that everything runs",
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=[r.name for r in recipe_list.RECIPES],
        help="run only these; the others are compared with the first",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="spread moire's experts over N processes, on a GPU each where there are as many, and"
        " compare the loss with that of one (--recipes: of which recipe; default moire-fp32)",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where moire has it, else cpu"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: what PyTorch chooses)")
    parser.add_argument("--seed", type=int, help="of weights and batches (default 1)")
    parser.add_argument(
        "--out",
        default=str(ROOT / "build" / "demo"),
        help="folder of the report (default build/demo)",
    )
    parser.add_argument(
        "--worker", help=argparse.SUPPRESS
    )  # the recipe that this process trains, as the parent's child
    return parser.parse_args()


def make_config(arguments: argparse.Namespace) -> recipe_list.Config:
    device = choose_device(arguments.device, arguments.ranks)
    changes = dict(recipe_list.CUDA) if device == "cuda" else {}
    if arguments.quick:
        changes = dict(recipe_list.QUICK)
    for name in ("steps", "threads", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            if value < 1:
                raise SystemExit(f"--{name} is {value}, but must be at least 1")
            changes[name] = value
    return recipe_list.Config(**changes, device=device)


def choose_device(wanted: str | None, ranks: int | None = None) -> str:
    from moe_demo import device

    reason = device.why_no_cuda() or device.why_not_so_many(ranks or 1)
    if wanted == "cuda" and reason:
        raise SystemExit(f"--device cuda: {reason}")
    return wanted or ("cpu" if reason else "cuda")


def choose_recipes(names: list[str] | None, device: str) -> list[recipe_list.Recipe]:
    if not names:
        return [r for r in recipe_list.recipes_for_this_machine(device) if runs_on(r, device)]
    return [next(r for r in recipe_list.RECIPES if r.name == name) for name in names]


def runs_on(recipe: recipe_list.Recipe, device: str) -> bool:
    from moe_demo.device import why_not

    is_asked = device == "cuda" or recipe.experts == "grouped_mm"
    reason = why_not(recipe, device) if is_asked else ""
    if reason:
        print(f"without {recipe.name}: {reason}")
    return not reason


def compare_ranks(arguments: argparse.Namespace, config: recipe_list.Config) -> int:
    from moe_demo import ranks

    name, *others = arguments.recipes or ["moire-fp32"]
    recipe = next(r for r in recipe_list.RECIPES if r.name == name)
    if others or recipe.experts != "moire":
        raise SystemExit(f"--ranks takes one of moire's recipes, found {arguments.recipes}")
    for word, count in (("experts", config.experts), ("sequences of a batch", config.batch)):
        if arguments.ranks < 1 or count % arguments.ranks:
            raise SystemExit(f"--ranks is {arguments.ranks}, but must divide the {count} {word}")
    data = text.load(arguments.text, config.seed)
    print(f"text: {data.source}\n{describe(config)}, {arguments.ranks} ranks, {recipe.note}")
    return 0 if ranks.compare(arguments.ranks, recipe, config, data) else 1


def work(arguments: argparse.Namespace, config: recipe_list.Config) -> int:
    """The child: trains one recipe, a round for each line on stdin, and writes one JSON object per
    event to stdout."""
    from moe_demo import training

    def write(event: str, **values: object) -> None:
        print(json.dumps({"event": event, **values}), flush=True)

    def wait_for_turn() -> None:
        write("pause")
        if not sys.stdin.readline():
            sys.exit("the parent is gone")

    sys.stdin.readline()
    recipe = next(r for r in recipe_list.RECIPES if r.name == arguments.worker)
    training.train(recipe, config, text.load(arguments.text, config.seed), write, wait_for_turn)
    return 0


def describe(config: recipe_list.Config) -> str:
    return (
        f"model: {config.layers} layers, hidden {config.hidden}, {config.experts} experts of width"
        f" {config.width}, top {config.top_k}; {config.steps} steps of"
        f" {config.tokens_per_step} tokens on {config.device};"
        f" {config.expert_parameters / 1e6:.0f} million parameters in experts"
    )


def machine() -> dict[str, str]:
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        name = models[0] if models else name
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "cpu": name,
        **gpu,
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    sys.exit(main())
