"""Curves, where they say more than a table; none without matplotlib (the extra `bench`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.kit.report import Figure


def save(
    path: Path, figures: Sequence[Figure], curves: Mapping[str, Sequence[int]], quantity: str
) -> None:
    """Draw one panel a curve, one line a variant. Cases are called `CURVE = X`."""
    try:
        import matplotlib
    except ImportError:
        print(
            f"no {path.name}: matplotlib is not installed (pip install -e '.[bench]')",
            file=sys.stderr,
        )
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fsdp2"  # the same figures give the same file
    from matplotlib import pyplot

    path.parent.mkdir(exist_ok=True)
    values = {figure.key: figure.value for figure in figures}
    variants = list(dict.fromkeys(figure.variant for figure in figures))
    drawing, panels = pyplot.subplots(1, len(curves), figsize=(4 * len(curves), 3.5))
    for panel, (curve, xs) in zip(panels, curves.items(), strict=True):
        for variant in variants:
            ys = [values.get((f"{curve} = {x}", variant, quantity)) for x in xs]
            drawn = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
            if len(drawn) > 1:
                panel.plot(*zip(*drawn, strict=True), marker="o", label=variant)
        panel.set(xlabel=curve, ylabel=quantity, xscale="log", yscale="log", xticks=xs)
        panel.set_xticks(xs, labels=[str(x) for x in xs], minor=False)
        panel.minorticks_off()
    panels[0].legend(fontsize="small")
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None})
