"""What came out: the rows of the table, and whether the run shows what it should."""

from __future__ import annotations

from typing import Any

Results = dict[str, Any]  # what results.json holds

# Bits per byte between the final validations that another order of FP32 sums and the rounding to
# BF16 may grow into over a run.
SAME_CURVE = 0.05
WELL_UNDER = 0.85  # of the text's order-0 entropy
NEAR_BF16 = 0.01  # of the final bits per byte: what operands of 8 bits may cost

HEADER = [
    "experts",
    "validation bits/byte",
    "tokens/s",
    "MoE layers ms/step",
    "MoE share",
    "peak memory",
    "first-step gradients",
]


def table(results: Results) -> list[list[str]]:
    tokens = results["config"]["batch"] * results["config"]["context"]
    rows = []
    for run in results["runs"]:
        difference = run["gradient_difference"]["value"]
        rows.append(
            [
                run["name"],
                f"{final_bits(run):.3f}",
                f"{tokens / run['step_seconds']:,.0f}",
                f"{1000 * run['moe_seconds']:.0f}",
                f"{100 * run['moe_share']:.0f} %",
                f"{run['peak_bytes'] / 2**20:,.0f} MiB",
                "the reference" if run is results["runs"][0] else f"{difference:.1e} off",
            ]
        )
    return rows


def as_text(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def final_bits(run: dict[str, Any]) -> float:
    return run["validation"][-1][1]


def findings(results: Results) -> list[tuple[bool, str]]:
    """(holds, sentence) for each thing that the demo is there to show."""
    baseline, *others = results["runs"]
    moire = [run for run in others if run["experts"] == "moire"]
    entropy = results["text"]["entropy"]
    worst = max(results["runs"], key=final_bits)
    found = [
        (
            final_bits(worst) <= WELL_UNDER * entropy,
            f"every run learned: at most {final_bits(worst):.2f} bits per byte,"
            f" where the text's order-0 entropy is {entropy:.2f}",
        )
    ]
    if moire:
        apart = max(moire, key=lambda run: abs(final_bits(run) - final_bits(baseline)))
        gap = abs(final_bits(apart) - final_bits(baseline))
        found.append(
            (
                gap <= SAME_CURVE,
                f"the curves lie on each other: at the end at most {gap:.3f} bits apart"
                f" ({apart['name']})",
            )
        )
    by_name = {run["name"]: run for run in moire}
    if {"moire-bf16", "moire-mxfp8"} <= by_name.keys():
        bf16, mxfp8 = (final_bits(by_name[name]) for name in ("moire-bf16", "moire-mxfp8"))
        found.append(
            (
                abs(mxfp8 - bf16) <= NEAR_BF16 * bf16,
                f"8-bit operands train as BF16 does: {mxfp8:.3f} and {bf16:.3f} bits per byte,"
                f" {100 * (mxfp8 / bf16 - 1):+.1f} %",
            )
        )
    for run in moire:
        if run["products"] != "as_stored":
            continue  # 8-bit operands are for tensor cores; a CPU decodes them
        ratio = baseline["moe_seconds"] / run["moe_seconds"]
        sentence = f"MoE layers of {run['name']}: {ratio:.2f} × the speed of {baseline['name']}"
        for other in others:  # torch's grouped_mm in the same dtype, which may be ahead
            if other["name"] == run["name"].replace("moire", "grouped_mm"):
                beside = other["moe_seconds"] / run["moe_seconds"]
                sentence += f", {beside:.2f} × that of {other['name']}"
        found.append((ratio > 1, sentence))
    return found
