"""CUDA graphs for the tests."""

import torch


def captured(step):
    """(the replay of one step() that was captured, what the step returned)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = step()
    return graph.replay, returned
