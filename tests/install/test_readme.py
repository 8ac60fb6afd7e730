"""The programs of README and guides are the files under examples/, which other tests compile and
run.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "page, name",
    [
        ("README.md", "examples/huggingface.py"),
        ("README.md", "examples/pytorch.py"),
        ("README.md", "examples/grouped_mlp.cpp"),
        ("docs/guides/pytorch.md", "examples/mxfp8.py"),
        ("docs/guides/pytorch.md", "examples/quantized_gradient.py"),
    ],
)
def test_a_page_shows_the_example_as_it_is(page, name):
    text = (ROOT / page).read_text()
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found, f"{page} has no block marked {name}"
    assert found[1] == (ROOT / name).read_text()


def test_every_link_to_a_file_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
