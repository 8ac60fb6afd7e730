"""build/demo/report.html: one file that needs nothing else, readable in light and dark."""

from __future__ import annotations

from html import escape
from pathlib import Path

from . import charts
from .results import HEADER, Results, findings, table

STYLE = (Path(__file__).parent / "report.css").read_text()


def render(results: Results) -> str:
    runs, config = results["runs"], results["config"]
    base = escape(runs[0]["name"])
    tokens = config["batch"] * config["context"] * config["steps"]
    title = f"A mixture-of-experts model, trained {len(runs)} times from one start"
    summary = (
        f"{config['layers']} layers of {config['experts']} experts, top {config['top_k']}, "
        f"{runs[0]['parameters'] / 1e6:.1f} million parameters, trained on {tokens:,} bytes of "
        f"{escape(results['text']['source'])}. Only the expert layers differ."
    )
    sections = [
        section("", "", checks(results)),
        section("", "", f'<div class="scroll">{html_table(results)}</div>'),
        section(
            "Loss",
            f"Bits per byte. Lines: training, mean of {charts.window(config['steps'])} steps; "
            "dots: held-out text. The curves should lie on each other, so the first is drawn wide "
            "and the others on top of it.",
            charts.loss(runs, results["text"]["entropy"]),
        ),
        section(
            f"Apart from {base}",
            f"The same training loss minus that of {base}, in thousandths of a bit per byte.",
            charts.difference(runs),
        ),
        section(
            "One training step",
            "Milliseconds, median. Solid: the MoE layers, forward and backward; pale: attention, "
            "loss and optimizer, which are PyTorch’s in every run.",
            charts.step_times(runs),
        ),
        section("How it was made", "", details(results)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>moire: demo</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{title}</h1><p class="soft">{summary}</p>{"".join(sections)}'
        "</main></body></html>\n"
    )


def section(title: str, note: str, body: str) -> str:
    head = f"<h2>{title}</h2>" if title else ""
    soft = f'<p class="soft">{note}</p>' if note else ""
    return f"<section>{head}{soft}{body}</section>\n"


def checks(results: Results) -> str:
    items = [
        f'<li class="{"yes" if holds else "no"}">{escape(sentence)}</li>'
        for holds, sentence in findings(results)
    ]
    return f"<ul>{''.join(items)}</ul>"


def html_table(results: Results) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    rows = []
    for index, row in enumerate(table(results)):
        dot = f'<i class="dot" style="background: {charts.colour(index, results["runs"])}"></i>'
        cells = [dot + escape(row[0])] + [escape(cell) for cell in row[1:]]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def details(results: Results) -> str:
    machine, config = results["machine"], results["config"]
    differences = []
    for run in results["runs"][1:]:
        found = run["gradient_difference"]
        differences.append(f"{run['name']} {found['value']:.1e} ({found['tensor']})")
    entries = {
        "command": results["command"],
        "experts": "; ".join(f"{run['name']}: {run['note']}" for run in results["runs"]),
        "machine": f"{machine['cpu']}, {machine['threads']} threads, {machine['instructions']}",
        "software": f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}",
        "model": (
            f"hidden {config['hidden']}, expert width {config['width']} (SwiGLU), "
            f"{config['heads']} heads, {config['context']} bytes of context, "
            f"{config['batch'] * config['context']} tokens a step"
        ),
        "training": (
            f"{config['steps']} steps of AdamW, learning rate {config['learning_rate']} after "
            f"{config['warmup']} steps, then linearly to zero, seed {config['seed']}; weights, "
            "gradients and everything outside the MoE layers in FP32"
        ),
        "first-step gradients": (
            "largest difference over the largest value of each MoE layer's gradients, given the "
            "same input and weights, against the PyTorch loop over experts in FP32: "
            + (", ".join(differences) or "only the reference ran")
        ),
        "peak memory": "of the whole process, PyTorch included; each run has its own",
    }
    rows = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in entries.items())
    return f"<dl>{rows}</dl>"
