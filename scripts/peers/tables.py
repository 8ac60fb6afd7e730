"""The tables of docs/performance.md, from what scripts/bench_peers.py reports: a row for each case
of each shape, a column for each peer."""


def markdown(rows):
    """Rows of one or more reports; a peer that none of them has gets no column."""
    rows = [row for row in rows if row["peers"]]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    head = ["shape, case", *map(_heading, names)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [_cell(row, name) if name in row["peers"] else "" for name in names]
        lines.append([f"{row['shape']}, {row['case']}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _heading(name):
    words = f"{name}: TFLOP/s, ms, GHz, W, mJ"
    if name == "dense":
        return words
    if name == "moire":
        return f"{words}; of dense"
    is_ours = name.startswith("moire")
    return f"{words}; " + ("torch's time over its" if is_ours else "its time over moire's")


def _cell(row, name):
    peer = row["peers"][name]
    figures = (
        f"{peer['tflops']:.0f}",
        f"{peer['ms']['median']:.2f}",
        number(peer["sm_mhz"], 2, 1e3),
        number(peer["watts"], 0),
        number(peer["mj"], 0),
    )
    ratio = row["of_dense"].get(name) if name == "moire" else _over_moire(row, name)
    return ", ".join(figures) + (f"; {_span(ratio)}" if ratio else "")


def _over_moire(row, name):
    """Of our own other variants: the time of torch, which computes the same, over theirs."""
    if name.startswith("moire"):
        return row["ratios"].get(f"{name} / torch")
    return row["ratios"].get(f"moire / {name}")


def _span(ratio):
    return f"**{ratio['median']:.3f}** [{ratio['least']:.3f}, {ratio['most']:.3f}]"


def number(value, digits, unit=1):
    """What is not known is a dash."""
    return "-" if value is None else f"{value / unit:.{digits}f}"
