"""The README's programs are the files under examples/, which other tests compile and run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "name", ["examples/huggingface.py", "examples/pytorch.py", "examples/grouped_mlp.cpp"]
)
def test_the_readme_shows_the_example_as_it_is(name):
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block marked {name}"
    assert found[1] == (ROOT / name).read_text()


def test_every_link_to_a_file_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
