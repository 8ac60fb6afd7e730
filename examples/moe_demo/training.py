"""Trains one recipe and reports as it goes."""

from __future__ import annotations

import gc
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import PyTorchMoE, make_moe
from .model import ByteModel, initialise
from .recipes import Config, Recipe
from .runs import ROUND
from .text import Text
from .timing import Timed

BITS = 1 / math.log(2)  # nats to bits
FORGOTTEN_STEPS = 3  # first steps, which warm caches up, are left out of the timings

Report = Callable[..., None]


def train(
    recipe: Recipe,
    config: Config,
    text: Text,
    report: Report,
    wait_for_turn: Callable[[], None] = lambda: None,
) -> None:
    """Calls report("step", ...) and report("validation", ...) as it goes, then report("done");
    between rounds of steps, wait_for_turn()."""
    if config.threads:
        torch.set_num_threads(config.threads)
    model = build(recipe, config)
    optimizer = make_optimizer(model, config)
    held_out = sequences(text.held_out, config, config.final_sequences)
    every = max(1, config.steps // config.validations)
    step_seconds, moe_seconds = [], []

    for step, batch in enumerate(batches(text.train, config), start=1):
        start = time.perf_counter()
        set_learning_rate(optimizer, config, step)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bits = loss.item() * BITS
        step_seconds.append(time.perf_counter() - start)
        moe_seconds.append(sum(block.moe.take_seconds() for block in model.blocks))
        report("step", step=step, bits=bits, seconds=step_seconds[-1])
        if step % every == 0 and step < config.steps:
            report("validation", step=step, bits=validate(model, held_out[: config.sequences]))
        if step % ROUND == 0 and step < config.steps:
            wait_for_turn()
    report("validation", step=config.steps, bits=validate(model, held_out))

    parameters = sum(p.numel() for p in model.parameters())
    peak = peak_memory(config.device)
    del model, optimizer, loss
    gc.collect()
    first = FORGOTTEN_STEPS if config.steps > FORGOTTEN_STEPS else 0
    report(
        "done",
        parameters=parameters,
        threads=torch.get_num_threads(),
        step_seconds=statistics.median(step_seconds[first:]),
        moe_seconds=statistics.median(moe_seconds[first:]),
        moe_share=sum(moe_seconds[first:]) / sum(step_seconds[first:]),
        peak_bytes=peak,
        gradient_difference=first_gradient_difference(recipe, config, text),
    )


def build(recipe: Recipe, config: Config) -> ByteModel:
    model = ByteModel(config, lambda: Timed(make_moe(recipe, config)))
    initialise(model, config.seed)
    return model.to(config.device)


def make_optimizer(model: ByteModel, config: Config) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * learning_rate_factor(config, step)


def learning_rate_factor(config: Config, step: int) -> float:
    """Linear warm-up, then linearly down, to zero behind the last step."""
    left = (config.steps + 1 - step) / max(1, config.steps + 1 - config.warmup)
    return min(step / config.warmup, left, 1)


def batches(data: bytes, config: Config) -> Iterator[Tensor]:
    """[batch, context + 1] pieces from random places, the same for every recipe."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(tensor) - config.context, (config.batch,), generator=generator)
        pieces = [tensor[i : i + config.context + 1] for i in starts.tolist()]
        yield torch.stack(pieces).long().to(config.device)


def sequences(data: bytes, config: Config, count: int) -> Tensor:
    """Held-out pieces, spread evenly."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    step = (len(tensor) - config.context - 1) // count
    if step <= 0:
        raise SystemExit(
            f"the held-out text has {len(tensor)} bytes, too few for {count} pieces of"
            f" {config.context}"
        )
    pieces = [tensor[i * step : i * step + config.context + 1] for i in range(count)]
    return torch.stack(pieces).long().to(config.device)


def loss_of(model: ByteModel, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: ByteModel, held_out: Tensor) -> float:
    """Bits per byte."""
    losses = [loss_of(model, part).item() for part in held_out.split(8)]
    sizes = [len(part) for part in held_out.split(8)]
    for block in model.blocks:
        block.moe.take_seconds()
    return sum(x * n for x, n in zip(losses, sizes)) / sum(sizes) * BITS


def first_gradient_difference(recipe: Recipe, config: Config, text: Text) -> dict[str, object]:
    """How far the gradients of the first step are from those of the PyTorch layer in FP32.

    Every MoE layer's input and incoming gradient are recorded and given to a PyTorch layer with the
    same weights. The difference of a tensor is its largest absolute one over the largest absolute
    value; the largest of all is returned.
    """
    model = build(recipe, config)
    recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def record(index: int) -> Callable[..., None]:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0]
            x.retain_grad()
            output.retain_grad()
            recorded[index] = (x, output)

        return hook

    for index, block in enumerate(model.blocks):
        block.moe.register_forward_hook(record(index))
    loss_of(model, next(batches(text.train, config))).backward()

    worst: dict[str, object] = {"value": 0.0, "tensor": "none"}
    for index, block in enumerate(model.blocks):
        x, output = recorded[index]
        reference = PyTorchMoE(config, "float32").to(config.device)
        for target, source in zip(reference.weights(), block.moe.weights()):
            target.data.copy_(source.data)
        reference_x = x.detach().requires_grad_()
        reference(reference_x).backward(output.grad)
        names = ("router", "w1", "w2", "input")
        got = [w.grad for w in block.moe.weights()] + [x.grad]
        want = [w.grad for w in reference.weights()] + [reference_x.grad]
        for name, a, b in zip(names, got, want):
            value = ((a - b).abs().max() / b.abs().max()).item()
            if not value <= worst["value"]:
                worst = {"value": value, "tensor": f"{name} of layer {index}"}
    return worst


def peak_memory(device: str) -> int:
    """Bytes: of tensors on a GPU; else of this process alone (ru_maxrss would include what its
    parent had when it forked)."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
