"""The examples of the README and the guides run as they are."""

import contextlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    "name, needs, said",
    [
        ("pytorch", "torch", "torch.Size([100, 64]) torch.Size([8, 256, 64])"),
        ("mxfp8", "torch", "saved for the backward: "),
        ("quantized_gradient", "torch", "[True, True, True]"),
        ("huggingface", "transformers", "experts run by moire"),
    ],
)
def test_example_runs(capsys, name, needs, said):
    pytest.importorskip(needs)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out


def test_the_page_of_recipes_has_what_they_keep(capsys):
    pytest.importorskip("torch")
    runpy.run_path(str(EXAMPLES / "recipes.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("| `bf16` |")
    assert printed in (ROOT / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")


def test_experts_spread_over_two_processes_train():
    pytest.importorskip("torch.distributed.run")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, EXAMPLES / "expert_parallel.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)]
    alone = float(re.search(r"alone ([0-9.]+)", done.stdout)[1])
    assert float(re.search(r"y is (\S+) apart", done.stdout)[1]) <= 1e-6
    assert len(losses) == 5 and abs(losses[0] - alone) <= 2e-6 and losses[-1] < losses[0] / 2


@pytest.mark.parametrize("page", ["pytorch", "recipes", "transformer_engine"])
def test_every_block_of_a_guide_runs(page, monkeypatch, request, tmp_path):
    """One after the other, on what the guides leave to the reader; CUDA's are test_cuda's, those of
    several processes test_expert_parallel's.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.distributed.run")
    pytest.importorskip("safetensors")
    import moire
    from ranks import alone_in_gloo

    stack = contextlib.ExitStack()
    request.addfinalizer(stack.close)
    stack.enter_context(alone_in_gloo())
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guides" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        if "cuda" in block or "ExpertParallel" in block:
            continue
        splits = [10, 0, 35, 5, 20, 1, 9, 20]
        exec(
            block,
            dict(
                moire=moire,
                torch=torch,
                dist=torch.distributed,
                hidden=64,
                width=128,
                splits=splits,
                rows_per_expert=splits,
                groups=moire.Groups(splits=splits),
                x=torch.randn(100, 64),
                probs=torch.rand(100),
                w1=torch.randn(8, 256, 64).requires_grad_(),
                w2=torch.randn(8, 64, 128).requires_grad_(),
            ),
        )
