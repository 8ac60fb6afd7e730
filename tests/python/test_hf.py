"""Hugging Face models with experts_implementation="moire" against the same models with eager
experts.

Models are tiny, made from configs, with weights large enough that the experts matter. The bounds
are on the root mean square of the difference, relative to that of the eager result, for u = 2^-24
(FP32) or 2^-9 (BF16), half a unit in the last place:

    logits      two layers of experts, each rounding z, act, the expert's output, its product with
    the routing weight and
                the sum over experts: at most 5 roundings a layer in each of the two
                implementations, 20 u, times 4 for what the layers after it (attention, norms, head)
                make of a relative change of their input
    gradients   the same chain twice, forward and backward: 160 u

    router.bias sums a row's gradient over all tokens, whose terms may cancel to any fraction of
    themselves; it is held to its router.weight's root mean square where that is larger, which sums
    the same terms, each times an activation of order one

FP32 sums of up to K = 64 terms in another order add K u to each: 64 u is within the factor for the
logits, and doubled for the gradients.
"""

import moire
import pytest
import torch
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from ranks import alone_in_gloo

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("device")

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8},
    "Olmoe": {"intermediate_size": 24, "num_experts": 8},
    "GptOss": {
        "head_dim": 8,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    moire.hf.register()
    moire.hf.register()  # twice is fine


def build(name, layers=2, dtype=torch.float32):
    config = getattr(transformers, f"{name}Config")(
        **COMMON, **MODELS[name], num_hidden_layers=layers
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def run(model, implementation, ids):
    model.set_experts_implementation(implementation)
    model.zero_grad()
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return result.logits.detach().double(), gradients


def rms(t):
    return t.pow(2).mean().sqrt().item()


def assert_near(found, wanted, factor, dtype, name, size=0.0):
    """`size`: of the terms that `wanted` sums, where they cancel."""
    assert found.shape == wanted.shape
    bound = factor * UNIT[dtype] * max(rms(wanted), size)
    difference = rms(found - wanted)
    assert difference <= bound, f"{name}: differs by {difference:.2e} rms, bound {bound:.2e}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype, layers", [(torch.float32, 2), (torch.bfloat16, 1)])
def test_same_logits_and_gradients_as_eager(generator, name, dtype, layers):
    # One layer in BF16: with two, a rounding may change which experts the second layer's router
    # takes.
    model = build(name, layers, dtype)
    ids = torch.randint(64, (2, 12), generator=generator)
    wanted, wanted_gradients = run(model, "eager", ids)
    found, gradients = run(model, "moire", ids)
    assert_near(found, wanted, 80, dtype, "logits")
    assert gradients.keys() == wanted_gradients.keys()
    for key, gradient in gradients.items():
        of_weight = wanted_gradients.get(key.replace("router.bias", "router.weight"))
        size = rms(of_weight) if key.endswith("router.bias") else 0.0
        assert_near(gradient, wanted_gradients[key], 160, dtype, key, size)
    assert any(rms(g) > 0 for k, g in gradients.items() if "down_proj" in k)


def test_the_comparison_fails_on_a_wrong_layout(generator):
    model = build("Mixtral")
    ids = torch.randint(64, (2, 12), generator=generator)
    wanted, _ = run(model, "eager", ids)
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            right = moire.hf.recognise(module)
            module._moire_spec = right._replace(layout=moire.GluLayout(0, "up_first"))
    found, _ = run(model, "moire", ids)
    with pytest.raises(AssertionError, match="differs by"):
        assert_near(found, wanted, 80, torch.float32, "logits")


def test_an_activation_that_changes_is_recognised_anew():
    model = build("Mixtral")
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    assert moire.hf.recognise(experts).act.kind == "swiglu"
    experts.act_fn = torch.nn.GELU(approximate="tanh")
    assert moire.hf.recognise(experts).act.kind == "geglu_tanh"
    experts.act_fn = torch.nn.Tanh()
    with pytest.raises(moire.Unsupported, match="has an activation that moire has not"):
        moire.hf.recognise(experts)


def test_from_config_and_no_grad(generator):
    config = transformers.MixtralConfig(**COMMON, **MODELS["Mixtral"], num_hidden_layers=1)
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="moire")
    ids = torch.randint(64, (1, 6), generator=generator)
    with torch.no_grad():
        found = model(input_ids=ids).logits
        model.set_experts_implementation("eager")
        assert_near(found, model(input_ids=ids).logits, 80, torch.float32, "logits")
    steps = moire.explain(
        experts_of(model), torch.ones(3, 32), torch.zeros(3, 2).long(), torch.ones(3, 2)
    )
    assert steps == []  # eager: nothing of moire ran


def experts_of(model):
    return next(m for m in model.modules() if hasattr(m, "gate_up_proj"))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_sentinels_of_remote_experts_drop_the_choice(generator, name):
    experts = experts_of(build(name, 1))
    x = torch.randn(6, 32, generator=generator)
    weights = torch.rand(6, 2, generator=generator).requires_grad_()
    index = torch.tensor([[0, 1], [2, 4], [4, 4], [3, 0], [1, 2], [4, 3]])  # 4 = num_experts
    y = moire.hf.experts_forward(experts, x, index, weights)
    kept = index < 4
    every = [
        moire.hf.experts_forward(experts, x, index.clamp(max=3)[:, j : j + 1], torch.ones(6, 1))
        for j in (0, 1)
    ]
    wanted = sum((weights * kept)[:, j : j + 1] * every[j] for j in (0, 1))
    assert_near(y, wanted, 80, torch.float32, "y")
    y.sum().backward()
    assert (weights.grad[~kept] == 0).all() and (weights.grad[kept] != 0).all()


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_an_experts_module_compiles_whole(generator, name):
    experts = experts_of(build(name, 1))
    experts.config._experts_implementation = "moire"
    x = torch.randn(6, 32, generator=generator).requires_grad_()
    index, weights = (
        torch.randint(4, (6, 2), generator=generator),
        torch.rand(6, 2, generator=generator),
    )
    compiled = torch.compile(experts, fullgraph=COMPILES_WHOLE_GRAPHS, backend="aot_eager")
    y = compiled(x, index, weights)
    assert torch.equal(y, experts(x, index, weights))
    (mine,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad(experts(x, index, weights).sum(), x)
    assert torch.equal(mine, wanted)


@pytest.mark.skipif(not COMPILES_WHOLE_GRAPHS, reason="an older Torch breaks the graph")
def test_layers_that_ran_are_compiled_once(generator):
    """And once more where one computes otherwise."""
    torch._dynamo.reset()
    x, weights = torch.randn(6, 32, generator=generator), torch.rand(6, 2, generator=generator)
    args = x, torch.randint(4, (6, 2), generator=generator), weights
    experts = [experts_of(build("Mixtral", 1)) for _ in range(4)]
    experts[2].act_fn = torch.nn.GELU(approximate="tanh")
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    for module in experts:
        module.config._experts_implementation = "moire"
        wanted = module(*args)
        assert torch.equal(torch.compile(module, fullgraph=True, backend=counting)(*args), wanted)
    assert len(graphs) == 2


@pytest.mark.parametrize("strict", [False, True])
def test_an_experts_module_that_never_ran_is_exported(generator, strict):
    experts = experts_of(build("Mixtral", 1))
    experts.config._experts_implementation = "moire"
    x, weights = torch.randn(6, 32, generator=generator), torch.rand(6, 2, generator=generator)
    args = (x, torch.randint(4, (6, 2), generator=generator), weights)
    exported = torch.export.export(experts, args, strict=strict)
    assert torch.equal(exported.module()(*args), experts(*args))


def test_a_gate_is_recognised_under_the_modes_of_the_caller():
    experts = experts_of(build("Mixtral", 1))
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert moire.hf.recognise(experts) == (moire.Activation(), moire.GluLayout(), "out_in")


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_experts_without_a_gate_run(generator, recipe):
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = transformers.NemotronHConfig(hidden_size=32, moe_intermediate_size=24)
    experts = NemotronHExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    spec = moire.hf.recognise(experts)
    assert spec == (moire.Activation("reglu2"), moire.GluLayout(order="ungated"), "out_in")
    x = torch.randn(9, 32, generator=generator)
    topk_idx = torch.randint(0, config.n_routed_experts, (9, 2), generator=generator)
    topk_weights = torch.rand(9, 2, generator=generator)
    weights = experts.up_proj, experts.down_proj
    experts.config._experts_implementation = "eager"

    def reference():
        if recipe is None:
            return experts(x, topk_idx, topk_weights)
        options = {"act": "reglu2", "layout": "ungated", "recipe": recipe}
        return moire.moe(x, *weights, topk_idx, topk_weights, **options)

    def ours():
        of_recipe = None if recipe is None else moire.Recipe(recipe)
        return moire.hf.experts_forward(experts, x, topk_idx, topk_weights, of_recipe)

    results = []
    for run in (reference, ours):
        x.requires_grad_().grad = None
        experts.zero_grad()
        y = run()
        (y * y).sum().backward()
        results.append([y.detach(), x.grad, *(w.grad for w in weights)])
    bound = 80 * UNIT[torch.float32] if recipe is None else 0  # a recipe has its own bits
    for wanted, found in zip(*results):
        assert (found - wanted).norm() <= bound * wanted.norm()


def test_a_gated_module_without_its_weights_is_none():
    experts = experts_of(build("Mixtral", 1))
    del experts.gate_up_proj
    with pytest.raises(moire.InvalidArgument, match="a MixtralExperts without gate_up_proj, needs"):
        moire.hf.recognise(experts)


def test_fp8_checkpoints_are_refused_with_a_sentence():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = build("Mixtral", 1)
    fp8.replace_with_fp8_linear(
        model, ["lm_head"], transformers.FineGrainedFP8Config(), pre_quantized=True
    )
    (experts,) = (m for m in model.modules() if type(m).__name__ == "FP8Experts")
    model.set_experts_implementation("moire")
    with pytest.raises(moire.Unsupported) as e:
        experts(torch.ones(3, 32), torch.zeros(3, 2).long(), torch.ones(3, 2))
    assert "FP8Experts.gate_up_proj is torch.float8_e4m3fn, needs float32" in str(e.value)
    assert "dequantised as it is loaded" in str(e.value)


def spec_of(**changes):
    experts = experts_of(build("GptOss", 1))
    for key, value in changes.items():
        setattr(experts, key, value)
    return moire.hf.recognise(experts)


def test_gates_are_recognised():
    assert spec_of() == (moire.Activation.clamped_swiglu(), moire.GluLayout(1), "in_out")
    limited = spec_of(limit=3.0, alpha=1.1)
    assert limited.act == moire.Activation.clamped_swiglu(3.0, 1.1)
    mixtral = experts_of(build("Mixtral", 1))
    assert moire.hf.recognise(mixtral) == (moire.Activation(), moire.GluLayout(), "out_in")
    gelu = experts_of(build("Mixtral", 1))
    gelu.act_fn = torch.nn.GELU(approximate="tanh")
    assert moire.hf.recognise(gelu).act.kind == "geglu_tanh"


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"has_gate": False, "up_proj": torch.nn.Parameter(torch.ones(1)), "act_fn": torch.sin},
            "has an activation that moire has not: none of swiglu, geglu_tanh, reglu, reglu2 of a",
        ),
        ({"has_post_expert_norm": True}, "normalises each expert's output before the weighted sum"),
        ({"_apply_gate": lambda z: z[..., ::2]}, "clamped_swiglu in any layout of gate and up"),
        (
            {"_apply_gate": lambda z: 1 / 0},
            "could not be evaluated to recognise it (division by zero)",
        ),
        (
            {"down_proj": torch.nn.Parameter(torch.ones(4, 24, 32).to(torch.float8_e4m3fn))},
            "down_proj is torch.float8_e4m3fn, needs",
        ),
    ],
)
def test_what_moire_cannot_run_raises_with_the_reason(changes, message):
    with pytest.raises(moire.Unsupported) as e:
        spec_of(**changes)
    assert message in str(e.value)
    assert "use another experts_implementation" in str(e.value)


def test_exact_gelu_is_not_taken_for_tanh():
    experts = experts_of(build("Mixtral", 1))
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(moire.Unsupported, match="has an activation that moire has not"):
        moire.hf.recognise(experts)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_experts_run_in_8_bits_where_a_recipe_is_registered(generator, recipe):
    moire.hf.register(f"moire_{recipe}", recipe=recipe)
    model = build("Mixtral", 1)  # one layer: its router sees no rounding
    ids = torch.randint(64, (2, 12), generator=generator)
    wanted, wanted_gradients = run(model, "eager", ids)
    found, gradients = run(model, f"moire_{recipe}", ids)
    assert 0 < rms(found - wanted) < 0.2 * rms(wanted)
    for key, gradient in gradients.items():
        assert rms(gradient - wanted_gradients[key]) < 0.3 * rms(wanted_gradients[key]), key
    again, _ = run(model, f"moire_{recipe}", ids)
    assert torch.equal(again, found)
    with pytest.raises(moire.InvalidArgument, match="moire.hf.register: recipe is 'fp4', must be"):
        moire.hf.register("other", recipe="fp4")


@pytest.mark.parametrize("part", ["model", "experts"])
def test_experts_in_8_bits_follow_writes_through_data_once_they_are_said(generator, part):
    moire.hf.register("moire_mxfp8", recipe="mxfp8")
    model = build("Mixtral", 1)
    model.set_experts_implementation("moire_mxfp8")
    experts, ids = experts_of(model), torch.randint(64, (2, 12), generator=generator)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for p in experts.parameters():
            p.data.mul_(3)  # which nobody counts
        assert torch.equal(model(input_ids=ids).logits, before)
        moire.hf.weights_changed({"model": model, "experts": experts}[part])
        after = model(input_ids=ids).logits
        experts.__dict__.pop("_moire_copies")
        assert torch.equal(model(input_ids=ids).logits, after) and not torch.equal(after, before)
    moire.hf.weights_changed(torch.nn.Linear(2, 2))  # has no experts
    with pytest.raises(moire.InvalidArgument, match="weights_changed: model is 5, must be a torch"):
        moire.hf.weights_changed(5)


def test_names_that_others_registered_are_refused_and_stay_as_they_were():
    from transformers.integrations.moe import ExpertsInterface

    def theirs():
        pass

    ExpertsInterface.register("of_another_library", theirs)
    names = ["eager", "grouped_mm", "batched_mm", "of_another_library"]
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        registries = [ExpertsInterface]
    else:
        registries, names = [ExpertsInterface, EPImplementationInterface], [*names, "all_to_all"]
    before = [dict(registry()) for registry in registries]
    for name in names:
        with pytest.raises(moire.InvalidArgument) as e:
            moire.hf.register(name, recipe="mxfp8")
        assert f"name is {name!r}, which is an implementation of transformers or of" in str(e.value)
        assert "choose another name, such as 'moire'" in str(e.value)
    assert before == [dict(registry()) for registry in registries]


def test_a_name_keeps_its_recipe(generator):
    """Models may run under it."""
    quantized = moire.Recipe("mxfp8", save="input")
    for recipe in (quantized, moire.Recipe("mxfp8", save="input")):
        moire.hf.register("kept", recipe=recipe)
    model, ids = build("Mixtral", 1), torch.randint(64, (2, 12), generator=generator)
    model.set_experts_implementation("kept")
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        with pytest.raises(moire.InvalidArgument) as e:
            moire.hf.register("kept")
        assert torch.equal(model(input_ids=ids).logits, wanted)
    assert str(e.value) == (
        "moire.hf.register: name is 'kept', which is registered with Recipe('mxfp8', save='input'),"
        " and models may run it; register Recipe('as_stored') under another name"
    )
    moire.hf.register("kept", recipe=quantized)


def test_a_saved_model_is_told_its_implementation_again(tmp_path):
    """As the guide says of transformers."""
    model = build("Mixtral", 1)
    model.set_experts_implementation("moire")
    model.save_pretrained(tmp_path)
    load = transformers.MixtralForCausalLM.from_pretrained
    assert load(tmp_path).config._experts_implementation != "moire"
    again = load(tmp_path, experts_implementation="moire")
    assert again.config._experts_implementation == "moire"


@pytest.mark.parametrize("part", [lambda p: p, lambda p: p.to_local()], ids=["whole", "local"])
def test_experts_in_8_bits_follow_what_is_written_into_shards(generator, device, part):
    """Of FSDP2, applied to modules around them: gathering counts no write."""
    if device != "cpu":
        pytest.skip("gloo's shards lie on a CPU")
    fsdp, dist = pytest.importorskip("torch.distributed.fsdp"), torch.distributed
    if not (hasattr(fsdp, "fully_shard") and dist.is_gloo_available()):
        pytest.skip("this Torch has no FSDP2 on a CPU")
    moire.hf.register("moire_mxfp8", recipe="mxfp8")
    model = build("Mixtral")
    model.set_experts_implementation("moire_mxfp8")
    ids = torch.randint(64, (2, 12), generator=generator)
    weights = [f"model.layers.{i}.mlp.experts.down_proj" for i in (0, 1)]
    wanted = []
    with torch.no_grad():
        for _ in range(3):
            wanted.append(model(input_ids=ids).logits)
            for name in weights:
                model.get_parameter(name).mul_(0.5)
    model = build("Mixtral")
    model.set_experts_implementation("moire_mxfp8")
    with alone_in_gloo():
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in (*model.model.layers, model):
            fsdp.fully_shard(layer, mesh=mesh)
        with torch.no_grad():
            for logits in wanted:
                assert torch.equal(model(input_ids=ids).logits, logits)
                for name in weights:
                    part(model.get_parameter(name)).mul_(0.5)
