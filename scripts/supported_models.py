#!/usr/bin/env python3
"""The models of the installed transformers whose experts moire runs, as the page
docs/guides/supported_models.md lists them: prints the lists, or with --write puts them there.

Every class that transformers decorates with use_experts_implementation is built without memory,
from the defaults of its model's config, and shown to moire.hf.recognise. Of models that share such
a class there is one line.
"""

import argparse
import ast
import importlib
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path

import moire
import torch
import transformers

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "supported_models.md"
PART = re.compile(r"<!-- transformers (?P<version>\S+) -->\n(?P<lists>.*)<!-- end -->", re.DOTALL)
# What the defaults of some models leave open; sizes decide nothing here.
SIZES = {"num_experts": 2, "num_local_experts": 2, "moe_intermediate_size": 8}
WIDTH = "intermediate_size"  # an argument of classes whose layers differ in it
WEIGHTS = {"out_in": "[E, {f}, H]", "in_out": "[E, H, {f}]"}


def experts_classes():
    """(folder of the model, class) of all that use transformers' ExpertsInterface."""
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "@use_experts_implementation" not in text:
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for node in ast.parse(text).body:
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
            if any(d.startswith("use_experts_implementation") for d in decorators):
                yield path.parent.name, getattr(module, node.name)


def built(cls):
    """An object of an experts class, on no device, of the config whose name is nearest to its own
    and whose defaults it can be built of.
    """
    found = [
        config
        for config in vars(sys.modules[cls.__module__]).values()
        if inspect.isclass(config) and issubclass(config, transformers.PretrainedConfig)
    ]
    found.sort(key=lambda config: -len(os.path.commonprefix([config.__name__, cls.__name__])))
    width = {WIDTH: 8} if WIDTH in inspect.signature(cls.__init__).parameters else {}
    reasons = []
    for complete in (lambda config: config, _completed):
        for config in found:
            try:
                with torch.device("meta"):
                    return cls(complete(config()), **width)
            except (AttributeError, TypeError, KeyError, ValueError) as e:
                reasons.append(f"{config.__name__}: {e}")
    raise LookupError(f"{cls.__name__} is built of no config: {'; '.join(reasons)}")


def _completed(config):
    for name, size in SIZES.items():
        if getattr(config, name, 0) is None:
            setattr(config, name, size)
    return config


def described(act):
    if act.kind != "clamped_swiglu":
        return act.kind
    return f"clamped_swiglu, limit {act.limit:g}, alpha {act.alpha:g}, offset {act.offset:g}"


def lists():
    """The part of the page that is generated."""
    runs, refused = [], []
    for model, cls in experts_classes():
        try:
            act, layout, weights = moire.hf.recognise(built(cls))
        except moire.Unsupported as e:
            reason = str(e).removeprefix(f"moire.hf: {cls.__name__} ").rsplit("; use another", 1)[0]
            item = f"- `{model}`, `{cls.__name__}`: {reason}."
            refused.append(textwrap.fill(item, 100, subsequent_indent="  ", break_on_hyphens=False))
        else:
            runs.append(
                f"| `{model}` | `{cls.__name__}` | {described(act)} | {layout} | "
                f"{WEIGHTS[weights].format(f='F' if layout.order == 'ungated' else '2F')} |"
            )
    return "\n".join(
        [
            f"{len(runs)} of {len(runs) + len(refused)} experts classes run:",
            "",
            "| Model | Experts | Activation | Gate and up | `gate_up_proj` |",
            "|---|---|---|---|---|",
            *runs,
            "",
            "These raise `moire.Unsupported`, with the reason:",
            "",
            *refused,
            "",
        ]
    )


def listed():
    """(version of transformers, lists) as the page has them."""
    part = PART.search(PAGE.read_text(encoding="utf-8"))
    return part["version"], part["lists"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    part = f"<!-- transformers {transformers.__version__} -->\n{lists()}<!-- end -->"
    if parser.parse_args().write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(PART.sub(lambda _: part, text), encoding="utf-8")
    else:
        print(part)


if __name__ == "__main__":
    main()
