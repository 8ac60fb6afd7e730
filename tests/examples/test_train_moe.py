"""The demo: its expert layers agree, its measurements bite, and one quick run from end to end."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_moe  # noqa: E402
from moe_demo import charts, device, experts, model, results, text, training  # noqa: E402
from moe_demo.recipes import BASELINE, QUICK, RECIPES, Config  # noqa: E402

SMALL = Config(hidden=32, layers=2, heads=2, experts=4, width=24, context=16, batch=2, steps=4)
# Sums of at most a few hundred FP32 products in another order; operands rounded to BF16 (by 2^-9).
FP32_BOUND = 1e-5
BF16_BOUND = 5e-2
MXFP8_BOUND = 0.25  # operands of E4M3 (by 2^-4), in every product of forward and backward
RECIPE = {recipe.name: recipe for recipe in RECIPES}


@pytest.fixture(scope="module")
def words():
    sample = (b"for i in range(10):\n    print(i, i * i)\n" * 400)[: 16 * 1024]
    return text.Text(sample[:12000], sample[12000:], "a sample")


def filled(layer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for weight in layer.weights():
        weight.data = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
    return layer


def test_the_pytorch_layer_is_the_definition_of_a_mixture_of_experts():
    layer = filled(experts.PyTorchMoE(SMALL, "float32"))
    router, w1, w2 = (weight.detach().double() for weight in layer.weights())
    x = torch.randn(20, SMALL.hidden, generator=torch.Generator().manual_seed(1))
    want = torch.zeros(20, SMALL.hidden, dtype=torch.float64)
    for t, token in enumerate(x.double()):
        best = (router @ token).softmax(0).topk(SMALL.top_k)
        for weight, e in zip(best.values / best.values.sum(), best.indices):
            gate, up = (w1[e] @ token).chunk(2)
            want[t] += weight * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    difference = (layer(x).double() - want).abs().max() / want.abs().max()
    assert difference < FP32_BOUND


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("grouped_mm-fp32", FP32_BOUND),
        ("grouped_mm-bf16", BF16_BOUND),
        ("moire-fp32", FP32_BOUND),
        ("moire-bf16", BF16_BOUND),
        ("moire-mxfp8", MXFP8_BOUND),
    ],
)
def test_first_step_gradients_are_those_of_the_loop(name, bound, words):
    if name.startswith("grouped_mm") and (reason := device.why_not(RECIPE[name], "cpu")):
        pytest.skip(reason)
    found = training.first_gradient_difference(RECIPE[name], SMALL, words)
    assert found["value"] < bound, found
    # torch's grouped_mm may be such a loop itself, and the same to the bit.
    assert found["value"] > 0 or name.startswith("grouped_mm"), found


def test_the_gradient_difference_sees_swapped_gate_and_up(words, monkeypatch):
    class Swapped(experts.PyTorchMoE):
        def forward(self, x):
            halves = self.w1.unflatten(1, (2, -1)).flip(1).flatten(1, 2)
            parameters = {"router": self.router, "w1": halves, "w2": self.w2}
            return torch.func.functional_call(
                experts.PyTorchMoE(SMALL, "float32"), parameters, (x,)
            )

    monkeypatch.setattr(training, "make_moe", lambda *_: Swapped(SMALL, "float32"))
    assert training.first_gradient_difference(BASELINE, SMALL, words)["value"] > MXFP8_BOUND


def test_every_recipe_starts_from_the_same_weights():
    states = [
        [w.clone() for w in training.build(recipe, SMALL).blocks[1].moe.weights()]
        for recipe in RECIPES
    ]
    for state in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(state, states[0]))


def test_every_recipe_sees_the_same_tokens(words):
    first, second = (list(training.batches(words.train, SMALL)) for _ in range(2))
    assert len(first) == SMALL.steps
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[0], first[1])


def test_a_model_cannot_see_the_byte_that_it_predicts():
    net = training.build(BASELINE, SMALL)
    bytes_ = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(2))
    changed = bytes_.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = net(bytes_), net(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_the_stopwatch_covers_forward_and_backward():
    net = training.build(BASELINE, replace(SMALL, hidden=128, width=256))
    assert isinstance(net, model.ByteModel)
    loss = training.loss_of(net, torch.zeros(2, 17, dtype=torch.long))
    forward = sum(block.moe.seconds for block in net.blocks)
    loss.backward()
    assert 0 < forward < sum(block.moe.take_seconds() for block in net.blocks)
    assert sum(block.moe.take_seconds() for block in net.blocks) == 0


def test_order_0_entropy_of_known_bytes():
    assert text.Text(b"", b"abab", "").entropy == 1
    assert text.Text(b"", bytes(range(256)), "").entropy == 8


def test_held_out_text_is_not_trained_on(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 1000)
    loaded = text.load([str(p) for p in sorted(tmp_path.iterdir())], seed=3)
    assert len(loaded.train) + len(loaded.held_out) == 30_000
    assert len(loaded.held_out) == 0.2 * 30_000
    assert not set(loaded.train) & set(loaded.held_out)


def test_a_single_file_is_cut(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"a" * 800 + b"b" * 200)
    loaded = text.load([str(tmp_path / "one.txt")], seed=3)
    assert (loaded.train, loaded.held_out) == (b"a" * 800, b"b" * 200)


def test_the_learning_rate_rises_and_ends_at_zero():
    config = Config()
    factors = [training.learning_rate_factor(config, i) for i in range(1, config.steps + 2)]
    top = config.warmup - 1
    assert factors[top] == 1 and factors[-1] == 0 < factors[-2] < 0.01
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    few = replace(config, steps=6)  # ends while it still rises
    assert all(0 < training.learning_rate_factor(few, i) < 0.2 for i in range(1, 7))


def finished(name, bits, seconds):
    """What a run of this recipe reported."""
    return {
        **{k: getattr(RECIPE[name], k) for k in ("name", "experts", "note", "products")},
        "train": [[step, 8 - step] for step in range(1, 5)],
        "validation": [[9, bits]],
        "step_seconds": 2 * seconds,
        "moe_seconds": seconds,
        "moe_share": 0.5,
        "peak_bytes": 2**20,
        "parameters": 10**6,
        "gradient_difference": {"value": 0.01, "tensor": "w1 of layer 0"},
    }


@pytest.mark.parametrize(("bits", "seconds", "code"), [(2.5, 1, 0), (2.5, 3, 1), (2.7, 1, 1)])
def test_the_exit_code_tells_whether_all_findings_hold(bits, seconds, code, tmp_path, monkeypatch):
    runs = [finished("loop-fp32", 2.5, 2), finished("moire-fp32", bits, seconds)]
    (tmp_path / "text").write_bytes(bytes(range(256)) * 100)
    arguments = ["train_moe.py", "--device", "cpu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--text", str(tmp_path / "text")])
    monkeypatch.setattr(train_moe, "train_all", lambda *_: runs)
    assert train_moe.main() == code
    assert (tmp_path / "out" / "report.html").exists()


def test_the_help_says_what_the_exit_code_means():
    assert 'exit code is 1 where one of the findings below the table is "NO"' in " ".join(
        demo("--help").stdout.split()
    )


def test_findings_do_not_hide_a_run_that_went_astray():
    run = finished

    def holds(*runs):
        return [found for found, _ in results.findings({"text": {"entropy": 4.0}, "runs": runs})]

    reference = run("loop-fp32", 2.5, 2.0)
    assert holds(reference, run("moire-fp32", 2.51, 1.0)) == [True, True, True]
    assert holds(reference, run("moire-fp32", 3.9, 2.5)) == [False, False, False]
    found = results.findings(
        {
            "text": {"entropy": 4.0},
            "runs": [reference, run("grouped_mm-fp32", 2.5, 0.8), run("moire-fp32", 2.5, 1.0)],
        }
    )
    assert found[-1] == (
        True,
        "MoE layers of moire-fp32: 2.00 × the speed of loop-fp32, 0.80 × that of grouped_mm-fp32",
    )
    bf16 = run("moire-bf16", 2.50, 1.0)
    assert holds(reference, bf16, run("moire-mxfp8", 2.52, 9.0)) == [True, True, True, True]
    assert holds(reference, bf16, run("moire-mxfp8", 2.54, 9.0)) == [True, True, False, True]


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (2.5, 8.5, [3, 4, 5, 6, 7, 8]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_numbers(low, high, want):
    assert charts.ticks(low, high, 6) == want


def demo(*arguments):
    command = [sys.executable, str(EXAMPLES / "train_moe.py"), "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(bool(device.why_no_cuda()), reason="needs a GPU")
def test_the_demo_runs_on_a_gpu(tmp_path):
    done = demo("--device", "cuda", "--out", str(tmp_path), "--steps", "6")
    assert "on cuda" in done.stdout and (tmp_path / "results.json").exists(), done.stderr


def test_the_loss_of_two_ranks_is_that_of_one(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 100)
    few = ["--steps", "4", "--threads", "1", "--text", str(tmp_path / "text")]
    done = demo("--device", "cpu", "--ranks", "2", *few)
    assert re.search("yes  the loss of 2 ranks .gloo. is that of one", done.stdout), done.stderr


@pytest.mark.parametrize(
    "options, said",
    [
        (["--ranks", "3"], "must divide the 8 experts"),
        (["--ranks", "2", "--recipes", "loop-fp32"], "takes one of moire's recipes"),
        (["--ranks", "64", "--device", "cuda"], "--device cuda: "),
    ],
)
def test_ranks_that_cannot_be_are_refused(options, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_moe.py", "--quick", *options])
    with pytest.raises(SystemExit, match=said):
        train_moe.main()


def test_a_torch_without_grouped_mm_says_so(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    reason = device.why_not(RECIPE["grouped_mm-fp32"], "cpu")
    assert reason.startswith(f"torch {torch.__version__}: ") and "_grouped_mm" in reason


def test_a_gpu_gets_a_model_with_enough_in_its_experts():
    from moe_demo.recipes import CUDA, Config

    assert Config(**CUDA).expert_parameters >= 100e6


@pytest.mark.skipif(not device.why_no_cuda(), reason="a GPU can run it")
def test_cuda_without_a_gpu_says_what_is_missing():
    done = demo("--device", "cuda")
    assert done.returncode == 1
    assert done.stderr.startswith("--device cuda: ")
    assert re.search("CUDA|cuda|GPU", done.stderr.partition(": ")[2])


def test_an_unknown_recipe_is_refused_by_name():
    done = demo("--recipes", "fp4")
    assert done.returncode == 2
    assert "invalid choice: 'fp4' (choose from" in done.stderr


@pytest.mark.slow
def test_a_quick_run_from_end_to_end(tmp_path):
    done = demo("--out", str(tmp_path), "--device", "cpu", "--threads", "1")
    assert done.returncode == ("\nNO " in done.stdout), done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    runs = {run["name"]: run for run in found["runs"]}
    assert {"loop-fp32", "moire-fp32", "moire-bf16", "moire-mxfp8"} <= set(runs)
    for run in runs.values():
        assert len(run["train"]) == QUICK["steps"]
        assert results.final_bits(run) < found["text"]["entropy"] < run["train"][0][1]
        assert abs(results.final_bits(run) - results.final_bits(runs["loop-fp32"])) < 0.05
        assert 0 < run["moe_share"] < 1
        assert run["peak_bytes"] > 2**20
        assert run["name"] in done.stdout

    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
