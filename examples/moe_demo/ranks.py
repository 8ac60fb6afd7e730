"""One training on one process and on several, over which the experts are spread: the same losses,
but for the order of sums. Over NCCL a GPU for each rank, over gloo on CPUs."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .experts import make_moe
from .model import ByteModel, initialise
from .recipes import Config, Recipe
from .results import SAME_CURVE
from .text import Text
from .training import BITS, batches, loss_of, make_optimizer, set_learning_rate

FIRST_STEP = 1e-5  # bits per byte: what another order of FP32 sums may change


def compare(ranks: int, recipe: Recipe, config: Config, text: Text) -> bool:
    """Trains on one rank and on `ranks`, prints both; whether they agree."""
    alone, together = (train(n, recipe, config, text) for n in (1, ranks))
    apart = [abs(a - b) for a, b in zip(alone["bits"], together["bits"])]
    print(f"\n{'step':>6}{'1 rank':>12}{f'{ranks} ranks':>12}{'apart':>12}")
    for step in sorted({1, *range(0, config.steps + 1, max(1, config.steps // 6))} - {0}):
        a, b = alone["bits"][step - 1], together["bits"][step - 1]
        print(f"{step:>6}{a:>12.6f}{b:>12.6f}{apart[step - 1]:>12.1e}")
    holds = apart[0] <= FIRST_STEP and max(apart) <= SAME_CURVE
    print(
        f"\n{'yes  ' if holds else 'NO   '}the loss of {ranks} ranks ({together['backend']}) is"
        f" that of one within rounding: {apart[0]:.1e} bits per byte apart at the first step, at"
        f" most {max(apart):.1e} of all {config.steps}"
    )
    print(f"     {alone['ms']:.1f} ms a step on one rank, {together['ms']:.1f} ms on {ranks}")
    return holds


def train(ranks: int, recipe: Recipe, config: Config, text: Text) -> dict[str, Any]:
    """What rank 0 found: the losses of all ranks, in bits per byte, and the time of a step."""
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, recipe, config, text, folder)
        torch.multiprocessing.spawn(work, args, nprocs=ranks)
        return json.loads((Path(folder) / "found").read_text())


def work(rank: int, ranks: int, recipe: Recipe, config: Config, text: Text, folder: str) -> None:
    on_gpu = config.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // ranks))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    found = {**steps(rank, ranks, recipe, config, text), "backend": backend}
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(found))
    # NOTE: threads of gloo let go of the last tensors, for which they need the GIL. Destroying the
    # group, which nothing has any more, joins them: torch 2.4 does so with the GIL held, and a
    # group that is not destroyed lets them abort a process whose Python has ended.
    time.sleep(1)
    dist.destroy_process_group()


def steps(rank: int, ranks: int, recipe: Recipe, config: Config, text: Text) -> dict[str, Any]:
    """Trains: the losses of all ranks, and the time of a step."""
    model = ByteModel(config, lambda: make_moe(recipe, config))
    initialise(model, config.seed)  # the same on every rank
    local = replace(config, experts=config.experts // ranks)
    for block in model.blocks:
        spread(block.moe, make_moe(recipe, local), rank)
    model.to(config.device)
    optimizer = make_optimizer(model, config)
    losses, begin = [], 0.0
    for step, batch in enumerate(batches(text.train, config), start=1):
        if step == 2:  # the first makes caches
            begin = time.perf_counter()
        set_learning_rate(optimizer, config, step)
        loss = loss_of(model, batch[rank::ranks]) / ranks  # the mean over all ranks' tokens
        loss.backward()
        reduce_and_clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() * BITS)
    ms = 1000 * (time.perf_counter() - begin) / max(1, config.steps - 1)
    return {"bits": losses, "ms": ms}


def spread(moe: torch.nn.Module, local: torch.nn.Module, rank: int) -> None:
    """Leaves a layer of moire's this rank's experts, in `local`; its router scores all of them."""
    import moire.nn

    whole, experts = moe.layer.experts, local.layer.experts
    first = rank * experts.num_groups
    with torch.no_grad():
        for mine, every in zip(experts.parameters(), whole.parameters()):
            mine.copy_(every[first : first + experts.num_groups])
    moe.layer = moire.nn.MoE(experts, moe.layer.router, group=dist.group.WORLD)


def reduce_and_clip(model: ByteModel, most: float) -> None:
    """Experts have the tokens of all ranks, so their gradients are whole; of what has a copy on
    every rank they are added. Then all are scaled as clip_grad_norm_ would on one rank."""
    of_experts = {p for block in model.blocks for p in block.moe.layer.experts.parameters()}
    square = {True: 0.0, False: 0.0}
    for p in model.parameters():
        is_whole = p in of_experts
        if not is_whole:
            dist.all_reduce(p.grad)
        square[is_whole] = square[is_whole] + p.grad.square().sum()
    dist.all_reduce(square[True])
    scale = (most / ((square[True] + square[False]).sqrt() + 1e-6)).clamp(max=1)
    for p in model.parameters():
        p.grad.mul_(scale)
