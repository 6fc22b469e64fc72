"""What a run found, as Markdown tables: for a terminal, and to be pasted."""

from __future__ import annotations

from collections.abc import Sequence

from llm_op_guard.benching.aims import Aim, aims
from llm_op_guard.benching.calls import CHECKING, Measured, Variant
from llm_op_guard.benching.estimate import Estimate
from llm_op_guard.benching.findings import Findings
from llm_op_guard.benching.growth import GIGABYTE, KILOBYTE, Curve
from llm_op_guard.benching.model import AB, A, Cost
from llm_op_guard.benching.start import MEGABYTE, Start

Rows = Sequence[Sequence[str]]


def rendered(findings: Findings) -> str:
    """Every table, the aims last."""
    parts = [_machine(findings)]
    for measured in findings.calls:
        parts += [f"## {measured.operator}: one call", _calls(measured)]
    parts += ["## What each variant holds", _rules(findings.calls)]
    for curve in (findings.arguments, findings.rules, findings.size):
        parts += [f"## Growth with {curve.of}: nanoseconds that are added to a call", _curve(curve)]
    parts += ["## A whole model", _models(findings.model)]
    parts += ["## Once in a process", _start(findings.start)]
    parts += ["## Aims", aims_table(aims(findings))]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Rows) -> str:
    """A Markdown table whose first column is text, the others figures; padded, so that it reads well as it is."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def number(value: float) -> str:
    """Three digits or more, as people write them."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    places = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3 if magnitude >= 0.1 else 4
    return f"{value:,.{places}f}"


def spread(estimate: Estimate | None, scale: float = 1.0) -> str:
    """A figure with its interval."""
    if estimate is None:
        return "-"
    scaled = estimate.scaled(scale)
    return f"{number(scaled.value)} [{number(scaled.low)}, {number(scaled.high)}]"


def percent(ratio: Estimate) -> str:
    """What a ratio is above 1, with its interval."""
    value, low, high = ((end - 1) * 100 for end in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _machine(findings: Findings) -> str:
    said = ", ".join(f"{name} {value}" for name, value in findings.machine.items())
    lines = [
        f"{said}; {findings.seconds:.0f} s.",
        "Medians; in brackets the middle 95 % over resampled rounds (bootstrap).",
    ]
    if findings.quick:
        lines.append("A quick run, to see that it runs: too few rounds for its figures to mean anything.")
    return "\n".join([*lines, *findings.notes])


def _calls(measured: Measured) -> str:
    if measured.left_out:
        return f"Left out: {measured.left_out}"
    rows = [_call(variant, measured) for variant in measured.variants if not variant.left_out]
    lines = [
        f"Rules of {measured.contract}, class A; the function beneath does nothing, but for the operator itself.",
        "",
        table(("variant", "ns a call", "ns added", "broken calls let through", "right calls refused"), rows),
    ]
    lines += [f"\nLeft out: {v.name}: {v.left_out}" for v in measured.variants if v.left_out]
    if measured.ratios:
        rows = [[ratio, spread(estimate)] for ratio, estimate in measured.ratios.items()]
        lines += ["", table(("of what they add", "ratio"), rows)]
    return "\n".join(lines)


def _call(variant: Variant, measured: Measured) -> list[str]:
    tried = ["", ""]
    if variant.checks:
        tried = [
            f"{len(variant.let_through)} of {len(measured.rules)}",
            f"{variant.wrongly_refused} of {measured.valid_calls}",
        ]
    return [variant.name, spread(variant.nanoseconds), spread(variant.added), *tried]


def _rules(calls: Sequence[Measured]) -> str:
    """Each rule of each operator, and who stops a call that breaks it."""
    rows = []
    for measured in calls:
        by_name = {variant.name: variant for variant in measured.variants}
        for rule in measured.rules:
            cells = [_holds(by_name[name], rule) for name in CHECKING]
            rows.append([f"{measured.operator}: {rule}", *cells])
    return table(("rule", *CHECKING), rows)


def _holds(variant: Variant, rule: str) -> str:
    return "" if variant.left_out else "no" if rule in variant.let_through else "yes"


def _curve(curve: Curve) -> str:
    lines = []
    if curve.added:
        at = [_size(size) for size in curve.at] if curve.of == "bytes" else [str(count) for count in curve.at]
        rows = [
            [name, *(number(one.value) if one else "-" for one in added), spread(curve.last_to_first.get(name))]
            for name, added in curve.added.items()
        ]
        lines.append(table(("variant", *at, "last ÷ first"), rows))
    return "\n".join([*lines, *(f"\n{note}" for note in curve.notes)])


def _size(size: int) -> str:
    for unit, name in ((GIGABYTE, "GB"), (MEGABYTE, "MB"), (KILOBYTE, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _models(costs: Sequence[Cost]) -> str:
    milliseconds = [
        [f"{cost.work}: {setting}", spread(cost.p50[setting]), spread(cost.p99[setting]), spread(rate)]
        for cost in costs
        for setting, rate in cost.tokens_per_second.items()
    ]
    added = [
        [
            f"{cost.work}: {setting}",
            *(percent(cost.ratios[setting][figure]) for figure in _RATIOS),
            str(cost.work.pairs),
        ]
        for cost in costs
        for setting in (A, AB)
    ]
    return "\n\n".join(
        [
            table(("Llama, by the clock", "P50, ms", "P99, ms", "tokens/s"), milliseconds),
            table(
                ("Llama, to the unguarded one", "a step, processor", "a step, wall", "P99, wall", "tokens/s", "pairs"),
                added,
            ),
        ]
    )


_RATIOS = ("step", "wall", "p99", "tokens_per_second")


def _start(start: Start) -> str:
    rows = [
        ["import llm_op_guard, ms", spread(start.import_seconds, 1e3)],
        [f'install("transformers") with Llama imported, {start.sites} sites, s', spread(start.install_seconds)],
        ["resident memory that it adds, MB", spread(start.resident_bytes, 1 / MEGABYTE)],
        [
            "functions that are not as before when guards are gone",
            f"{len(start.off_differs)} of {start.functions_looked_at}",
        ],
        ["a builtin taken while guarded, off: ns added to a call", spread(start.held_builtin)],
        ["a Python function that passes arguments on: ns added", spread(start.plain_call)],
    ]
    return table(("what", ""), rows)


def aims_table(judged: Sequence[Aim]) -> str:
    """Each aim, what was measured, and whether that is within it or by how much not."""
    return table(("aim", "measured", "at most", "reached"), [_aim(aim) for aim in judged])


def _aim(aim: Aim) -> list[str]:
    unit = f" {aim.unit}" if aim.unit else ""
    verdict = f"not measured: {aim.why}" if aim.reached is None else "yes"
    if aim.reached is False:
        verdict = f"no, by {number(aim.missed_by)}{unit}"
    by = ", by the upper end" if aim.judged_by == "high" else ""
    return [
        aim.what,
        f"{spread(aim.measured)}{unit if aim.measured else ''}",
        f"{number(aim.at_most)}{unit}{by}",
        verdict,
    ]
