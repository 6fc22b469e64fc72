"""A run as pictures, by matplotlib: `calls.png`, `growth.png` and `model.png`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_op_guard.benching.calls import BY_HAND, DLTYPE, JAXTYPING, NATIVE, PYTHON, TORCH_CHECK, Measured
from llm_op_guard.benching.estimate import Estimate
from llm_op_guard.benching.findings import Findings
from llm_op_guard.benching.growth import Curve
from llm_op_guard.benching.model import AB, A, Cost
from llm_op_guard.benching.report import number

# Okabe and Ito's colours, which people tell apart who do not see all of them.
COLOURS = {
    NATIVE: "#0072B2",
    PYTHON: "#56B4E9",
    BY_HAND: "#000000",
    TORCH_CHECK: "#999999",
    JAXTYPING: "#D55E00",
    DLTYPE: "#E69F00",
    A: "#0072B2",
    AB: "#D55E00",
}
_RESOLUTION = 130


def draw(findings: Findings, folder: Path) -> Iterator[Path]:
    """Draw each picture into the folder; the files, as they are written."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    for name, figure in (
        ("calls.png", _calls(pyplot, findings.calls)),
        ("growth.png", _growth(pyplot, (findings.arguments, findings.rules, findings.size))),
        ("model.png", _model(pyplot, findings.model)),
    ):
        figure.savefig(folder / name, dpi=_RESOLUTION)
        pyplot.close(figure)
        yield folder / name


def _errors(estimates: Sequence[Estimate]) -> list[list[float]]:
    """How far an interval goes to either side, as matplotlib wants it."""
    return [[one.value - one.low for one in estimates], [one.high - one.value for one in estimates]]


def _calls(pyplot: Any, calls: Sequence[Measured]) -> Any:
    """What each variant adds to a call, by operator; the label says how many of the rules it holds."""
    shown = [measured for measured in calls if not measured.left_out]
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(9, 0.6 + 1.9 * len(shown)), sharex=True, squeeze=False, layout="constrained"
    )
    for ax, measured in zip(axes[:, 0], shown, strict=True):
        bars = [variant for variant in measured.variants if variant.checks and variant.added is not None]
        added = [variant.added for variant in bars if variant.added is not None]
        places = range(len(bars))
        ax.barh(
            places,
            [one.value for one in added],
            xerr=_errors(added),
            color=[COLOURS[variant.name] for variant in bars],
            error_kw={"ecolor": "#666666", "capsize": 2, "elinewidth": 1},
        )
        for place, variant, one in zip(places, bars, added, strict=True):
            held = len(measured.rules) - len(variant.let_through)
            text = f" {number(one.value)} ns, {held} of {len(measured.rules)} rules"
            if variant.wrongly_refused:
                text += f", {variant.wrongly_refused} right call{'s' * (variant.wrongly_refused > 1)} refused"
            ax.text(one.high, place, text, va="center", fontsize=8)
        ax.set_yticks(places, [variant.name for variant in bars], fontsize=8)
        ax.invert_yaxis()
        ax.set_title(measured.operator, loc="left", fontsize=10, fontweight="bold")
        ax.set_xscale("log")
        ax.grid(axis="x", alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    most = max(v.added.high for measured in shown for v in measured.variants if v.checks and v.added is not None)
    axes[-1, 0].set_xlim(50, most * 25)  # room for the texts
    axes[-1, 0].set_xlabel("nanoseconds that checking adds to a call (log scale), with 95 % intervals")
    return figure


def _growth(pyplot: Any, curves: Sequence[Curve]) -> Any:
    figure, axes = pyplot.subplots(1, len(curves), figsize=(12, 3.8), layout="constrained")
    for ax, curve in zip(axes, curves, strict=True):
        for name, added in curve.added.items():
            points = [(at, one) for at, one in zip(curve.at, added, strict=True) if one is not None]
            ax.errorbar(
                [at for at, _ in points],
                [one.value for _, one in points],
                yerr=_errors([one for _, one in points]),
                color=COLOURS[name],
                marker="o",
                markersize=4,
                capsize=2,
                label=name,
            )
        if curve.of == "bytes":
            ax.set_xscale("log", base=2)
        ax.set_xticks(curve.at, [_tick(curve.of, at) for at in curve.at])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set_xlabel("size of each tensor (log scale)" if curve.of == "bytes" else f"number of {curve.of}")
        ax.set_ylabel("ns added to a call")
        ax.set_title("\n".join(curve.notes), fontsize=8)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _tick(of: str, at: int) -> str:
    if of != "bytes":
        return str(at)
    power, unit = next((p, u) for p, u in ((30, "GB"), (20, "MB"), (10, "KB")) if at >= 2**p)
    return f"{at >> power} {unit}"


def _model(pyplot: Any, costs: Sequence[Cost]) -> Any:
    """What guards add to a step, in per cent; each model has a scale of its own."""
    models = list(dict.fromkeys(cost.work.model for cost in costs))
    figure, axes = pyplot.subplots(1, len(models), figsize=(11, 3.8), squeeze=False, layout="constrained")
    for ax, name in zip(axes[0], models, strict=True):
        shown = [cost for cost in costs if cost.work.model == name]
        for offset, setting in ((-0.12, A), (0.12, AB)):
            steps = [cost.ratios[setting]["step"] for cost in shown]
            added = [Estimate(*((end - 1) * 100 for end in (one.value, one.low, one.high))) for one in steps]
            places = [place + offset for place in range(len(shown))]
            ax.errorbar(
                [one.value for one in added],
                places,
                xerr=_errors(added),
                fmt="o",
                color=COLOURS[setting],
                capsize=3,
                label=f"class {setting}" if setting == A else f"classes {setting}",
            )
            for place, one in zip(places, added, strict=True):
                ax.annotate(
                    f"{one.value:+.1f} %",
                    (one.high, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color=COLOURS[setting],
                )
        ax.axvline(0, color="black", linewidth=1)
        if name != "tiny":
            ax.axvline(1, color="#009E73", linestyle="--", linewidth=1, label="aim for A, decode: 1 %")
        ax.set_yticks(range(len(shown)), [f"{cost.work.phase}, batch {cost.work.batch}" for cost in shown])
        ax.invert_yaxis()
        ax.margins(x=0.18, y=0.15)
        config = shown[0].config
        ax.set_title(
            f"Llama, {config['num_hidden_layers']} layers, hidden {config['hidden_size']}", loc="left", fontsize=10
        )
        ax.set_xlabel("% of processor time that guards add to a step")
        ax.grid(axis="x", alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=len(labels))
    return figure
