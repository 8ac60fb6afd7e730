"""scatter_idx has to be the inverse of row_idx wherever both are given."""

import moire
import numpy as np
import pytest
import torch

TOKENS, K = 5, 2


def operands(framework):
    idx = torch.tensor([[0, 1], [2, 0], [1, -1], [2, 1], [0, 2]])
    plan = moire.make_plan(idx, 3)
    x, w = torch.ones(TOKENS, 8), torch.ones(3, 20, 8)
    if framework == "numpy":
        plan, x, w = moire.Plan(*(a.numpy() for a in plan)), x.numpy(), w.numpy()
    return x, w, plan


def changed(array, index, value):
    array = array.copy() if isinstance(array, np.ndarray) else array.clone()
    array[index] = value
    return array


def calls(x, w, plan, **indices):
    given = {"row_idx": plan.gather_idx, "scatter_idx": plan.scatter_idx, **indices}
    yield lambda: moire.grouped_linear(x, w, plan.groups, **given)
    w2 = w[:, :8, :4] if isinstance(w, np.ndarray) else w[:, :8, :4].contiguous()
    yield lambda: moire.grouped_mlp(x, w[:, :8], w2, plan.groups, **given)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_plan_is_accepted_and_its_perturbations_are_not(framework):
    x, w, plan = operands(framework)
    for call in calls(x, w, plan):
        call()
    scatter = plan.scatter_idx
    first, second, other = int(scatter[0, 0]), int(scatter[0, 1]), int(scatter[1, 0])
    for bad, message in [
        (changed(changed(scatter, (0, 0), other), (1, 0), first), "it must be the inverse"),
        (changed(scatter, (0, 0), -1), "scatter_idx names 8 rows up to 8, must name each of the 9"),
        (changed(scatter, (0, 0), 9), "names 9 rows up to 9, must name each of the 9 rows"),
        (changed(scatter, (0, 0), second), "to no token but row_idx takes it from token 0"),
        (changed(scatter, (0, 0), other), "it must be the inverse of row_idx"),
        (scatter[:4], "scatter_idx is [4, 2], must be [T, k] with T = 5"),
        (scatter[:, 0], "scatter_idx is [5], must have rank 2"),
    ]:
        for call in calls(x, w, plan, scatter_idx=bad):
            with pytest.raises(moire.InvalidArgument) as e:
                call()
            assert message in str(e.value)


def test_scatter_idx_needs_row_idx():
    x, w, plan = operands("torch")
    with pytest.raises(moire.InvalidArgument, match="scatter_idx is given but row_idx is absent"):
        moire.grouped_linear(x, w, moire.Groups(splits=[5, 0, 0]), scatter_idx=plan.scatter_idx)


def test_explaining_reads_no_values():
    x, w, _ = operands("torch")

    def layer():
        plan = moire.make_plan(torch.tensor([[0], [2], [1], [2], [0]]), 3)
        indices = {"row_idx": plan.gather_idx, "scatter_idx": plan.scatter_idx}
        moire.grouped_linear(x, w, plan.groups, **indices)

    assert [step["op"] for step in moire.explain(layer)] == ["permute_plan", "grouped_gemm"]
