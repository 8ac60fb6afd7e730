"""Router, plan, permute and unpermute against plain PyTorch."""

import moire
import pytest
import torch
import truth

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_router_and_its_gradient(generator, kind, normalize):
    logits = truth.draw(generator, 9, 6).requires_grad_()
    topk_idx, weights = moire.router(logits, 3, kind=kind, normalize=normalize, scale=2.5)
    logits64 = truth.double(logits)
    scores = logits64.softmax(-1) if kind == "softmax" else logits64.sigmoid()
    wanted, idx = scores.topk(3, dim=-1)
    wanted = 2.5 * (wanted / wanted.sum(-1, keepdim=True) if normalize else wanted)
    assert torch.equal(topk_idx, idx) and topk_idx.dtype == torch.int64
    truth.assert_close(weights, wanted, torch.float32, 6)
    grad = truth.draw(generator, 9, 3)
    weights.backward(grad)
    wanted.backward(grad.double())
    truth.assert_close(logits.grad, logits64.grad, torch.float32, 6, steps=2)


def test_expert_bias_moves_the_choice_only(generator):
    logits = truth.draw(generator, 5, 4)
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0])
    topk_idx, weights = moire.router(logits, 1, kind="sigmoid", expert_bias=bias)
    assert (topk_idx == 2).all()
    truth.assert_close(weights, logits[:, 2:3].double().sigmoid(), torch.float32, 4)


def test_ties_go_to_the_lowest_index():
    topk_idx, _ = moire.router(torch.zeros(2, 5), 3)
    assert topk_idx.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_plan_is_stable_and_drops(index):
    topk_idx = torch.tensor(
        [[2, 0], [0, -1], [3, 2]], dtype=index
    )  # 3 groups: -1 and 3 are dropped
    plan = moire.make_plan(topk_idx, 3)
    assert plan.offsets.tolist() == [0, 2, 2, 4]
    assert plan.gather_idx.tolist() == [0, 1, 0, 2, -1, -1]
    assert plan.scatter_idx.tolist() == [[2, 0], [1, -1], [-1, 3]]
    assert plan.groups.num_groups == 3 and plan.groups.capacity == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permute_and_unpermute_and_their_gradients(generator, dtype):
    tokens, k, experts, hidden = 8, 2, 5, 12
    x = truth.draw(generator, tokens, hidden, dtype=dtype).requires_grad_()
    weights = torch.rand(tokens, k, generator=generator).requires_grad_()
    topk_idx = torch.randint(-1, experts + 1, (tokens, k), generator=generator)
    plan = moire.make_plan(topk_idx, experts)
    rows, probs = moire.permute(x, plan, topk_weights=weights)
    used = int(plan.offsets[-1])
    gather = plan.gather_idx[:used].long()
    assert torch.equal(rows[:used], x[gather]) and (rows[used:] == 0).all()
    y = moire.unpermute(rows, plan, weights=weights)
    x64, w64 = truth.double(x), truth.double(weights)
    kept = (plan.scatter_idx >= 0).double()
    wanted = (w64 * kept).sum(1, keepdim=True) * x64
    truth.assert_close(y, wanted, dtype, k)
    choice = plan.scatter_idx.long().clamp(0)
    wanted = wanted.sum() + ((w64 * kept) ** 2).sum()
    (y.float().sum() + (probs[choice] * kept.float() * weights).sum()).backward()
    wanted.backward()
    truth.assert_close(x.grad, x64.grad, dtype, k, steps=2, name="grad_x")
    truth.assert_close(weights.grad, w64.grad, torch.float32, hidden, steps=2, name="grad_weights")


def test_permute_without_weights_returns_rows_alone(generator):
    x = truth.draw(generator, 3, 4).requires_grad_()
    plan = moire.make_plan(torch.tensor([[0], [1], [0]]), 2)
    rows = moire.permute(x, plan)
    assert torch.equal(rows, x[[0, 2, 1]])
    rows.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))


def test_capacity_holds_what_is_routed():
    topk_idx = torch.tensor([[0], [1], [2], [2]])  # two of four are dropped
    plan = moire.make_plan(topk_idx, 2, capacity=3)
    assert plan.gather_idx.tolist() == [0, 1, -1]
    with pytest.raises(moire.InvalidArgument, match="permute_plan: "):
        moire.make_plan(topk_idx, 3, capacity=3)
        moire.check()  # a GPU says it later


def test_a_router_scale_of_zero_is_refused():
    with pytest.raises(moire.InvalidArgument, match="scale is 0"):
        moire.router(torch.randn(3, 4), 2, scale=0.0)
