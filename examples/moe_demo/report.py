"""build/demo/report.html: one file that needs nothing else, readable in light and dark."""

from __future__ import annotations

from html import escape
from pathlib import Path

from . import charts
from .results import HEADER, Results, findings, table

STYLE = (Path(__file__).parent / "report.css").read_text()


def render(results: Results) -> str:
    config, entropy = results["config"], results["text"]["entropy"]
    runs = results["runs"]
    marks = "".join(
        f'<li class="{"yes" if holds else "no"}">{escape(sentence)}</li>'
        for holds, sentence in findings(results)
    )
    tokens = config["batch"] * config["context"] * config["steps"]
    body = f"""
<h1>A mixture-of-experts model, trained {len(runs)} times from one start</h1>
<p class="soft">{config["layers"]} layers of {config["experts"]} experts, top {config["top_k"]},
{runs[0]["parameters"] / 1e6:.1f} million parameters, {tokens:,} bytes of {escape(results["text"]["source"])}.
Only the expert layers differ.</p>
<section><ul>{marks}</ul></section>
<section><div class="scroll">{html_table(results)}</div></section>
<section><h2>Loss</h2><p class="soft">Bits per byte. Lines: training, mean of
{charts.window(config["steps"])} steps; dots: held-out text. The curves should lie on each other, so the first is drawn
wide and the others on top of it.</p>
{charts.loss(runs, entropy)}</section>
<section><h2>Apart from {escape(runs[0]["name"])}</h2><p class="soft">The same training loss minus that of
{escape(runs[0]["name"])}, in thousandths of a bit per byte.</p>{charts.difference(runs)}</section>
<section><h2>One training step</h2><p class="soft">Milliseconds, median. Solid: the MoE layers, forward and backward; pale:
attention, loss and optimizer, which are PyTorch’s in every run.</p>{charts.step_times(runs)}</section>
<section><h2>How it was made</h2>{details(results)}</section>"""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>moire: demo</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


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
    differences = ", ".join(
        f"{run['name']} {run['gradient_difference']['value']:.1e} ({run['gradient_difference']['tensor']})"
        for run in results["runs"][1:]
    )
    entries = {
        "command": f"<code>{escape(results['command'])}</code>",
        "machine": escape(
            f"{machine['cpu']}, {machine['threads']} threads, {machine['instructions']}"
        ),
        "software": escape(
            f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}"
        ),
        "model": escape(
            f"hidden {config['hidden']}, expert width {config['width']} (SwiGLU), {config['heads']} heads, "
            f"{config['context']} bytes of context, {config['batch'] * config['context']} tokens a step"
        ),
        "training": escape(
            f"{config['steps']} steps of AdamW, learning rate {config['learning_rate']}, seed {config['seed']}; weights, "
            "gradients and everything outside the MoE layers in FP32"
        ),
        "first-step gradients": escape(
            "largest difference over the largest value of each MoE layer's gradients, given the same input and weights, "
            f"against the PyTorch layer in FP32: {differences or 'only the reference ran'}"
        ),
        "peak memory": "of the whole process, PyTorch included; each run has its own",
    }
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in entries.items()) + "</dl>"
