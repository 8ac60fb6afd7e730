"""Experts spread over processes: torchrun --nproc-per-node 2 examples/expert_parallel.py

Each rank has its own tokens and its share of the experts; on GPUs over NCCL, on CPUs over gloo. The
first loss is that of one process with all experts. In the end they save one checkpoint, each its
shard, which any number of ranks reads: here one, with all experts.
"""

import os
import tempfile
import time

import moire
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.tensor import DTensor, Shard
except ImportError:  # before torch 2.5
    from torch.distributed._tensor import DTensor, Shard


def main():
    on_gpu = torch.cuda.is_available() and "cpu" not in moire.__version__
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size, device = dist.get_rank(), dist.get_world_size(), "cuda" if on_gpu else "cpu"
    experts, hidden, width, tokens = 8, 64, 128, 100

    torch.manual_seed(1)  # the same numbers on every rank: the router's copies start equal
    router = moire.nn.Router(hidden, experts, k=2, device=device)
    every = moire.nn.GroupedMLP(experts, hidden, width, device=device)
    x = torch.randn(size, tokens, hidden, device=device)

    group = moire.ExpertParallel(num_experts=experts, max_tokens=tokens)
    own = slice(group.first_expert, group.first_expert + group.num_local_experts)
    local = moire.nn.GroupedMLP(group.num_local_experts, hidden, width, device=device)
    with torch.no_grad():
        for mine, theirs in zip(local.parameters(), every.parameters()):
            mine.copy_(theirs[own])
    layer = moire.nn.MoE(local, router, group=group)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

    alone = moire.nn.MoE(every, router)(x).square().mean().item()
    for step in range(5):
        loss = layer(x[rank]).square().mean() / size
        optimizer.zero_grad()
        loss.backward()  # experts have the tokens of every rank, so theirs are whole
        dist.all_reduce(router.weight.grad)  # DistributedDataParallel's part: it is on every rank
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}" + f", alone {alone:.6f}" * (step == 0))

    mesh = init_device_mesh(device, (size,))
    shards = {  # experts are rows of all ranks' experts; the rest is on every rank
        name: DTensor.from_local(t, mesh, [Shard(0)]) if name.startswith("experts.") else t
        for name, t in layer.state_dict().items()
    }
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoints.save(shards, checkpoint_id=folder[0])
    whole = moire.nn.MoE(every, moire.nn.Router(hidden, experts, k=2, device=device))
    checkpoints.load(whole.state_dict(), checkpoint_id=folder[0])  # into the tensors it is given
    with torch.no_grad():
        apart = (whole(x[rank]) - layer(x[rank])).abs().max().item()
    if rank == 0:
        print(f"read by one rank: y is {apart:.0e} apart")


main()
# Threads of gloo let go of the last tensors, for which they need the GIL. Destroying the
# group, which nothing has any more, joins them: torch 2.4 does so with the GIL held, and a group
# that is not destroyed lets them abort a process whose Python has ended.
time.sleep(1)
dist.destroy_process_group()
