"""One HTML page: its frame, and the matrix whose cells open.

The page needs nothing beside itself and runs no script: cells open with the browser's own popovers. Whatever is shown
(texts of contracts, messages, values that were printed) is put into a tree that is written out at the end, so that no
text can become a tag; and the page's own policy lets nothing be loaded or run.
"""

from __future__ import annotations

import base64
import hashlib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from importlib.resources import files

from llm_op_guard.frozen import frozen

Node = ET.Element
Content = Node | str | None

# What a cell says at a glance, by the first word of its look; page.css has the colours.
SIGNS = {
    "missed": "✗",
    "alarm": "✗",
    "broken": "✗",
    "other": "≈",
    "caught": "✓",
    "suspect": "!",
    "waived": "w",
    "unchecked": "?",
    "none": "-",
}
_MOST_SHOWN = 5000


@frozen
class Cell:
    """A cell of a matrix: its look, its number, notes below, words for screen readers only, and what it opens."""

    look: str
    count: str
    notes: tuple[str, ...] = ()
    spoken: str = ""
    opens: tuple[Node, ...] = ()


@frozen
class Row:
    """A line of a matrix: cells by column, or the reason why there are none. A finding is what somebody has to see."""

    name: str
    cells: Mapping[str, Cell]
    is_finding: bool = False
    reason: str = ""


def page(title: str, *content: Content) -> str:
    """The text of a page."""
    style = files("llm_op_guard.report").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    css = ET.Element("style")
    css.text = style  # is written as it stands, unlike all other text
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} - llm-op-guard"),
        css,
    )
    body = element("body", element("header", element("h1", title)), element("main", *content))
    root = element("html", head, body, lang="en")
    return f"<!DOCTYPE html>\n{ET.tostring(root, 'unicode', method='html')}\n"


# ---------------------------------------------------------------- the matrix


def matrix(corner: str, columns: Sequence[str], rows: Sequence[Row], finding: str, signs: Mapping[str, str]) -> Node:
    """A table, what its cells open, and a box that leaves the rows with a finding.

    `finding` says what is one, `signs` what the looks of cells mean.
    """
    panels: list[Node] = []
    lines = [_line(number, row, columns, panels) for number, row in enumerate(rows)]
    titles = [element("th", title, scope="col", role="columnheader") for title in (corner, *columns)]
    table = element(
        "table",
        element("thead", element("tr", *titles, role="row"), role="rowgroup"),
        element("tbody", *lines, role="rowgroup"),
        role="table",  # on a narrow screen its lines become blocks, which would take the meaning of a table away
        aria_label=f"each {corner} and what was found",
    )
    found = sum(row.is_finding for row in rows)
    above = element("p", f"{'Each' if found else 'No'} row has a finding ({finding}).")
    if 0 < found < len(rows):
        box = element("input", type="checkbox", id="findings")
        above = element("label", box, f" only the rows with a finding ({finding}): {found} of {len(rows)}")
    # What the looks mean comes before a table of which the end may be some screens away.
    return section("Matrix", _legend(signs), above, table, *panels)


def _line(number: int, row: Row, columns: Sequence[str], panels: list[Node]) -> Node:
    before, colon, name = row.name.rpartition(":")
    title = element("th", element("small", before + colon) if before else None, name, scope="row", role="rowheader")
    if row.reason:
        cells = [element("td", row.reason, colspan=str(len(columns)), role="cell", class_="reason")]
    else:
        cells = [
            element("td", _cell(f"cell-{number}-{place}", f"{row.name}: {column}", column, row.cells[column], panels))
            if column in row.cells
            else element("td", SIGNS["none"], class_="none")
            for place, column in enumerate(columns)
        ]
        for cell in cells:
            cell.set("role", "cell")
    return element("tr", title, *cells, role="row", class_="finding" if row.is_finding else "fine")


def _cell(name: str, title: str, column: str, cell: Cell, panels: list[Node]) -> Node:
    shown = (
        element("span", f"{column} ", class_="column"),
        element("span", f"{_sign(cell.look)} ", aria_hidden="true"),
        element("b", cell.count),
        element("span", f" {cell.spoken} ", class_="spoken"),
        *(element("small", note) for note in cell.notes),
    )
    look = f"cell {cell.look}"
    if not cell.opens:
        return element("span", *shown, class_=look)
    close = element("button", "Close", type="button", autofocus="", popovertarget=name, popovertargetaction="hide")
    header = element("header", element("h2", title, id=f"{name}-title"), close)
    is_printed = _sign(cell.look) in (SIGNS["missed"], SIGNS["other"])
    panel = element("section", header, *cell.opens, class_="panel printed" if is_printed else "panel")
    for attribute, value in {"id": name, "popover": "", "role": "dialog", "aria-labelledby": f"{name}-title"}.items():
        panel.set(attribute, value)
    panels.append(panel)
    return element("button", *shown, type="button", popovertarget=name, class_=look)


def _sign(look: str) -> str:
    return SIGNS[look.partition(" ")[0]]


def _legend(signs: Mapping[str, str]) -> Node:
    lines = [
        element("li", element("span", _sign(look), class_=f"cell {look}", aria_hidden="true"), text)
        for look, text in signs.items()
    ]
    return element("ul", *lines, class_="legend")


# ---------------------------------------------------------------- around it


def section(title: str, *content: Content) -> Node:
    """A part of the page with a title."""
    return element("section", element("h2", title), *content)


def figures(numbers: Mapping[str, str], wrong: Sequence[str] = ()) -> Node:
    """Named numbers; those named in `wrong` stand out."""
    lines = [
        element("div", element("dt", name), element("dd", number), class_="wrong" if name in wrong else None)
        for name, number in numbers.items()
    ]
    return element("dl", *lines)


def folded(title: str, lines: Sequence[str]) -> Node:
    """A list behind its title and length; where there is nothing to list, a line that says so."""
    if not lines:
        return element("p", f"{title}: none", class_="faint")
    return element("details", element("summary", f"{title}: {len(lines)}"), listed(lines))


def listed(lines: Sequence[str]) -> Node:
    """A list."""
    return element("ul", *(element("li", line) for line in lines))


def beside(*sides: Node) -> Node:
    """Things side by side, where there is room."""
    return element("div", *sides, class_="sides")


def side(title: str, *content: Content) -> Node:
    """One of the sides of a case."""
    return element("div", element("h4", title), *content)


def badge(look: str, text: str) -> Node:
    """A verdict on a case."""
    return element("p", element("span", text, class_=f"badge {look.replace(' ', '-')}"))


def counted(count: int, noun: str) -> str:
    """`1 rule`, `2 rules`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def element(tag: str, *content: Content, **attributes: str | None) -> Node:
    """An element; `class_` and `aria_label` are written `class` and `aria-label`, what is None is left out."""
    named = {name.rstrip("_").replace("_", "-"): _shown(v) for name, v in attributes.items() if v is not None}
    made = ET.Element(tag, named)
    for part in content:
        if isinstance(part, ET.Element):
            made.append(part)
        elif part is not None and len(made):
            made[-1].tail = (made[-1].tail or "") + _shown(part)
        elif part is not None:
            made.text = (made.text or "") + _shown(part)
    return made


def _shown(text: str) -> str:
    """A text of bounded length; characters that cannot be seen, or turn others around, as Python would write them."""
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
