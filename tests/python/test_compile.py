"""torch.compile, in whole graphs where this torch can, and what torch.library checks of the ops."""

import moire
import pytest
import torch
import truth
from moire import nn
from moire.dtypes import COMPILES_WHOLE_GRAPHS

pytestmark = pytest.mark.usefixtures("device")

SPLITS = [4, 0, 5]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compare(function, leaves, backend="aot_eager"):
    """Compiled and eager give the same result and gradients."""
    results = []
    for f in (function, torch.compile(function, fullgraph=COMPILES_WHOLE_GRAPHS, backend=backend)):
        fresh_leaves = [t.detach().clone().requires_grad_() for t in leaves]
        y = f(*fresh_leaves)
        y.sin().sum().backward()
        results.append([y.detach(), *(t.grad for t in fresh_leaves)])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def mlp_leaves(generator):
    shapes = [(9, 12), (3, 32, 12), (3, 12, 16), (9,), (3, 32), (3, 12)]
    return [truth.draw(generator, *shape) for shape in shapes]


def mlp(x, w1, w2, probs, b1, b2, splits):
    return moire.grouped_mlp(x, w1, w2, moire.Groups(splits=splits), probs=probs, b1=b1, b2=b2)


def test_grouped_mlp_with_its_groups_made_inside(generator):
    splits = torch.tensor(SPLITS)
    compare(lambda *t: mlp(*t, splits), mlp_leaves(generator))


def test_b2_with_a_scale_of_its_own(generator):
    idx, splits = torch.tensor([[0, 2], [1, 0], [2, -1]] * 3), torch.tensor(SPLITS)

    def both(x, w1, w2, probs, b1, b2, scale, weights, scales):
        given = {"probs": probs, "b1": b1, "b2": b2, "b2_scale": scale}
        y = moire.grouped_mlp(x, w1, w2, moire.Groups(splits=splits), **given)
        return moire.moe(y, w1, w2, idx, weights, b2=b2, b2_scale=scales)

    own = [truth.draw(generator, *shape) for shape in ((9,), (9, 2), (9, 2))]
    compare(both, [*mlp_leaves(generator), *own])


def test_the_gradient_of_gathered_rows_is_one_op(generator):
    """Of its parts a compiler would make additions in any order."""
    row_idx, graphs = torch.tensor([0, 3, 3, 1, 0, 3, 2, 2, 0]), []

    def backend(graph, inputs):
        compiler = torch._dynamo.backends.common.aot_autograd(
            fw_compiler=lambda g, _: g, bw_compiler=lambda g, _: graphs.append(g) or g
        )
        return compiler(graph, inputs)

    def gathered(x, w):
        return moire.grouped_linear(x, w, moire.Groups(splits=SPLITS), row_idx=row_idx)

    leaves = [truth.draw(generator, *shape) for shape in ((4, 12), (3, 16, 12))]
    compare(gathered, leaves, backend)
    names = [str(node.target) for g in graphs for node in g.graph.nodes]
    assert any("rows_to_tokens" in name for name in names) == COMPILES_WHOLE_GRAPHS
    assert not any("index_put" in name or "index_add" in name for name in names)


def test_splits_may_change_between_calls(generator):
    compiled = torch.compile(mlp, fullgraph=COMPILES_WHOLE_GRAPHS, backend="aot_eager")
    leaves = mlp_leaves(generator)
    for splits in ([4, 0, 5], [9, 0, 0], [1, 2, 3]):
        splits = torch.tensor(splits)
        assert torch.equal(compiled(*leaves, splits), mlp(*leaves, splits))


@pytest.mark.skipif(COMPILES_WHOLE_GRAPHS, reason="this torch compiles whole graphs")
def test_an_older_torch_says_since_when_whole_graphs_compile(generator):
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="part of a graph since torch 2.11"):
        compiled(*mlp_leaves(generator), torch.tensor(SPLITS))


def test_moe_and_router(generator):
    def layer(x, router, w1, w2):
        topk_idx, weights = moire.router(x @ router.T, 2, normalize=True)
        return moire.moe(x, w1, w2, topk_idx, weights)

    shapes = [(7, 12), (3, 12), (3, 32, 12), (3, 12, 16)]
    compare(layer, [truth.draw(generator, *shape) for shape in shapes])


def test_numbers_may_be_symbolic(generator):
    """A router's scale, of which layers that are compiled one by one have each its own."""
    x = truth.draw(generator, 6, 16)
    for scale in (1.0, 2.5):
        layer = nn.MoE(nn.GroupedMLP(4, 16, 24), nn.Router(16, 4, 2, scale=scale))
        compiled = torch.compile(layer, fullgraph=COMPILES_WHOLE_GRAPHS, backend="eager")
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.skipif(not COMPILES_WHOLE_GRAPHS, reason="this torch compiles in parts")
def test_a_refusal_in_a_whole_graph_says_its_sentence():
    layer = nn.MoE(nn.GroupedMLP(4, 16, 24), nn.Router(16, 4, 2))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"MoE: x is \[6, 17\], must be \[..., 16\]"):
        compiled(torch.ones(6, 17))


def test_linear_glu_layouts_and_listed_weights(generator):
    groups = moire.Groups(splits=SPLITS)

    def layer(x, a, b, c):
        z = moire.grouped_linear(x, [moire.interleave_glu_tensor(w, 8) for w in (a, b, c)], groups)
        return moire.glu(z, layout=8)

    compare(
        layer, [truth.draw(generator, 9, 12), *(truth.draw(generator, 32, 12) for _ in range(3))]
    )


def test_permute_and_unpermute(generator):
    topk_idx = torch.tensor([[0, 1], [2, -1], [1, 1]])

    def there_and_back(x, weights):
        plan = moire.make_plan(topk_idx, 3)
        rows, probs = moire.permute(x, plan, topk_weights=weights)
        return moire.unpermute(rows * probs[:, None], plan, weights=weights)

    compare(there_and_back, [truth.draw(generator, 3, 8), torch.rand(3, 2, generator=generator)])


def test_grouped_mm(generator):
    offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    leaves = [truth.draw(generator, 9, 12), truth.draw(generator, 3, 12, 8)]
    compare(lambda a, b: moire.grouped_mm(a, b, offs), leaves)


@pytest.mark.parametrize("packed", [True, False])
def test_modules(generator, packed):
    torch.manual_seed(0)
    experts = nn.GroupedMLP(3, 12, 16, bias=True, packed=packed, compute_dtype=torch.bfloat16)
    layer = nn.MoE(experts, nn.Router(12, 3, 2))
    compare(layer, [truth.draw(generator, 7, 12)])


def test_settings_and_explain_hold_between_the_graphs(generator):
    layer, x = nn.GroupedLinear(3, 12, 16), truth.draw(generator, 9, 12)

    def one_thread(x):
        with moire.settings(num_threads=1):
            seen.append(moire.context.settings_now().num_threads)
            found.append(moire.explain(layer, x, SPLITS))
            return layer(x + 1, SPLITS) * 2

    def another_implementation(x):
        with moire.strict(), moire.settings(implementation="none"):
            return layer(x + 1, SPLITS)

    seen, found, wanted = [], [], layer(x + 1, SPLITS) * 2
    for _ in range(2):
        assert torch.equal(torch.compile(one_thread, backend="eager")(x), wanted)
    assert seen == [1, 1] and all(found) and len(found) == 2
    for _ in range(2):
        with pytest.raises(moire.Unsupported, match="none"):
            torch.compile(another_implementation, backend="eager")(x)
    assert moire.context.settings_now().num_threads is None


@pytest.mark.slow
def test_inductor(generator):
    splits = torch.tensor(SPLITS)
    leaves = mlp_leaves(generator)
    compiled = torch.compile(lambda *t: mlp(*t, splits) * 2, fullgraph=COMPILES_WHOLE_GRAPHS)
    truth.assert_close(compiled(*leaves), 2 * mlp(*leaves, splits).double(), torch.float32, 16)


def test_ops_keep_their_word_about_mutation_and_shapes(generator):
    """torch.library.opcheck: schema (nothing undeclared is written), fake kernel, dispatch."""
    x, w1, w2, probs, b1, b2 = mlp_leaves(generator)
    offsets = moire.Groups(splits=SPLITS).offsets
    values = {
        "x": x,
        "w1": [w1],
        "w2": [w2],
        "probs": probs,
        "b1": b1,
        "b2": b2,
        "offsets": offsets,
    }
    sizes = {"num_groups": 3, "capacity": 9, "activation": [0.0] * 4, "layout": [0, 0]}
    outputs = {"y": torch.zeros(9, 12), "z": torch.zeros(9, 32), "act": torch.zeros(9, 16)}
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.moire.grouped_mlp, (), {**values, **sizes, **outputs}, test_utils=tests
    )
    target = torch.zeros(1, 32, 12)
    layouts = {"dim": 1, "from_": [0, 0], "to_": [8, 0]}
    values = {"source": w1[:1], "target": target, **layouts}
    torch.library.opcheck(torch.ops.moire.convert_glu, (), values, test_utils=tests)


def test_ops_that_begin_with_a_list_see_that_its_tensors_are_fake():
    w = torch.empty(2, 8, 64, device="meta")
    tensor = moire.quantize(w, columnwise=True)
    assert tensor.device.type == "meta" and tensor.dequantize().shape == w.shape
    rows = moire.quantize(w[0]).requantize()
    assert rows.columnwise.data.is_meta
    assert moire.convert_glu(moire.quantize(w), "halves", 2, 1).device == w.device


def test_schemas_come_from_the_header():
    schema = str(torch.ops.moire.grouped_linear.default._schema)
    assert (
        "Tensor? x=None" in schema
        and "Tensor[]? w=None" in schema
        and "Tensor(a!)? y=None" in schema
    )
