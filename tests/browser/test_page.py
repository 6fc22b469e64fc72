"""The pages in a browser: Chromium without a window, as Debian's package `chromium` installs it. `make browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import case, contract, injected, logged

from llm_op_guard.report.injection_page import GROUPS, injection_page
from llm_op_guard.report.log_page import log_page

pytestmark = pytest.mark.browser

WIDTHS = (1500, 1000, 390, 320)
GOOD, BAD = "lib/norm:good", "lib/norm:bad"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser does it")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium on the path: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        # The sandbox of Chromium does not start for root.
        browser = driver.chromium.launch(executable_path=found, chromium_sandbox=os.geteuid() != 0)
        yield browser
        browser.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Opened]:
    """Opens a page; whatever it says to the console, fetches or raises fails the test."""
    said: list[str] = []
    file = tmp_path / "page.html"

    def open_page(text: str, *, width: int = 1500, scheme: str = "light") -> Any:
        file.write_text(text, encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        view = context.new_page()
        view.set_default_timeout(10_000)
        view.on("console", lambda message: said.append(f"console: {message.text}"))
        view.on("pageerror", lambda error: said.append(f"error: {error}"))
        view.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        view.on("request", lambda request: request.url == file.as_uri() or said.append(f"request: {request.url}"))
        view.goto(file.as_uri())
        return view

    yield open_page
    assert said == []


def cell(view: Any, row: str, column: str) -> Any:
    name = row.rpartition(":")[2]
    line = view.get_by_role("row").filter(has=view.get_by_role("rowheader", name=name))
    return line.get_by_role("button", name=column)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("text", [injection_page(injected()), log_page(logged())], ids=["injection", "log"])
def test_it_fits_its_window_and_says_nothing(opened: Opened, text: str, width: int, scheme: str) -> None:
    view = opened(text, width=width, scheme=scheme)
    assert view.evaluate("document.documentElement.scrollWidth") == width
    view.locator("button.cell").first.click()
    panel = view.locator(":popover-open")
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth && panel.getBoundingClientRect().left >= 0")


def test_a_click_opens_the_calls_and_escape_closes_them(opened: Opened) -> None:
    view = opened(injection_page(injected()))
    panel = view.locator(":popover-open")
    assert panel.count() == 0
    cell(view, BAD, "values").click()
    assert panel.get_by_role("heading", level=2).inner_text() == "lib/norm:bad: values"
    first = panel.locator("article").first
    assert first.locator("pre").inner_text() == "x=float32[2] made by element -1"
    without, guarded = first.locator(".sides > div").all()
    assert without.inner_text().split("\n\n") == ["without a guard", "it hung", "no result after 20 s"]
    assert guarded.inner_text().split("\n\n")[:2] == ["with its guard", "missed"]
    box, other = without.bounding_box(), guarded.bounding_box()
    assert box["y"] == other["y"] and box["x"] < other["x"]
    view.keyboard.press("Escape")
    assert panel.count() == 0
    cell(view, BAD, "axes").click()
    assert panel.locator("article").count() == 2
    panel.get_by_role("button", name="Close").click()
    assert panel.count() == 0


def test_keys_alone_are_enough(opened: Opened) -> None:
    view = opened(injection_page(injected()))
    button = cell(view, GOOD, "sizes")
    button.focus()
    view.keyboard.press("Enter")
    assert view.locator(":focus").inner_text() == "Close"
    view.keyboard.press("Enter")
    assert view.locator(":popover-open").count() == 0
    assert view.locator(":focus").get_attribute("popovertarget") == button.get_attribute("popovertarget")
    view.keyboard.press("Tab")
    assert view.locator(":focus").inner_text().startswith("dtypes")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screen_reader_hears_a_table(opened: Opened, width: int) -> None:
    view = opened(injection_page(injected()), width=width)
    table = view.get_by_role("table", name="each contract and what was found")
    assert table.get_by_role("row").count() == 5
    assert table.get_by_role("columnheader").count() == len(GROUPS) + 4
    name = "sizes 2 mutants: 2 caught by the intended rule; without a guard: 1 silent"
    assert cell(view, GOOD, name).count() == 1  # without the sign, which says the same
    cell(view, GOOD, name).click()
    assert view.get_by_role("dialog", name="lib/norm:good: sizes").is_visible()


def test_the_box_leaves_the_rows_with_a_finding(opened: Opened) -> None:
    view = opened(injection_page(injected()))
    rows = view.locator("tbody tr:visible")
    assert rows.count() == 4
    view.get_by_label("only the rows with a finding").check()
    assert rows.count() == 1 and "bad" in rows.inner_text()
    view.get_by_label("only the rows with a finding").uncheck()
    assert rows.count() == 4


def test_a_narrow_screen_names_the_columns_in_the_cells(opened: Opened) -> None:
    narrow, wide = (opened(injection_page(injected()), width=width) for width in (390, 1500))
    assert cell(narrow, GOOD, "sizes").locator(".column").bounding_box()["height"] > 10
    assert cell(wide, GOOD, "sizes").locator(".column").bounding_box()["height"] <= 1
    assert narrow.locator("td.none:visible").count() == 0 < wide.locator("td.none:visible").count()


CONTRAST = """look => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true})
    const luminance = colour => {
        canvas.fillStyle = colour
        canvas.fillRect(0, 0, 1, 1)
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const style = getComputedStyle(look)
    const clear = style.backgroundColor === 'rgba(0, 0, 0, 0)'
    const ground = clear ? getComputedStyle(document.body).backgroundColor : style.backgroundColor
    const [one, other] = [luminance(ground), luminance(style.color)].sort((a, b) => b - a)
    return (one + 0.05) / (other + 0.05)
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("text", [injection_page(injected()), log_page(logged())], ids=["injection", "log"])
def test_texts_stand_out_from_their_ground(opened: Opened, text: str, scheme: str) -> None:
    """The 4.5 : 1 of WCAG 2.2, level AA."""
    view = opened(text, scheme=scheme)
    view.evaluate("document.querySelectorAll('.panel').forEach(panel => panel.removeAttribute('popover'))")
    looks = view.locator(".cell, .badge, .faint, dt, dd, thead th, td.none, td.reason, summary, h4").all()
    assert len(looks) > 40
    for look in looks:
        assert look.evaluate(CONTRAST) >= 4.5, look.evaluate("look => look.outerHTML")


def test_on_paper_stand_the_matrix_and_the_findings(opened: Opened) -> None:
    view = opened(injection_page(injected()), scheme="dark")
    view.emulate_media(media="print")
    assert view.locator("label:visible, .panel button:visible").count() == 0
    shown = [panel.locator("h2").inner_text() for panel in view.locator(".panel:visible").all()]
    assert shown == [f"{BAD}: {column}" for column in ("false alarms", "axes", "values", "numbers")]
    assert view.get_by_text("lib/norm:bad: y.shape").bounding_box()["height"] > 5  # of a folded list
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert view.pdf(prefer_css_page_size=True).startswith(b"%PDF")


HOSTILE = (
    "</style></script></pre></title><script>document.title = 'broken'</script>"
    "<img src=x onerror=\"document.title = 'broken'\">'\" onfocus=alert(1) autofocus <plaintext>"
)


def hostile(value: Any, end: str) -> Any:
    if isinstance(value, str):
        return value + end
    if isinstance(value, list):
        return [hostile(part, end) for part in value]
    return {key: hostile(part, end) for key, part in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("make", "data"), [(injection_page, injected()), (log_page, logged())], ids=["injection", "log"]
)
def test_hostile_texts_stay_texts(opened: Opened, make: Callable[[Any], str], data: Any) -> None:
    names = "[...document.querySelectorAll('*')].map(one => [one.tagName, ...one.getAttributeNames()].join(' '))"
    plain = opened(make(hostile(data, "x"))).evaluate(names)
    view = opened(make(hostile(data, HOSTILE)))
    assert view.evaluate(names) == plain
    for button in view.locator("button.cell").all():
        button.click()
        view.keyboard.press("Escape")
    assert "broken" not in view.title() and HOSTILE in view.locator("body").text_content()


def test_a_thousand_cases(opened: Opened) -> None:
    names = [f"lib/many:operator_{number}" for number in range(100)]
    document = injected() | {"contracts": [contract(name) for name in names], "left_out": []}
    document["cases"] = [
        case(name, "x.shape", f"{starts[0]}axis 0", "caught by the intended rule", "silent", "off by 0.3")
        for name in names
        for starts in GROUPS.values()
    ]
    view = opened(injection_page(document))
    assert view.locator("tbody tr").count() == 100
    last = cell(view, names[-1], "several")
    last.click()
    assert view.locator(":popover-open article").count() == 1
    view.keyboard.press("Escape")
    # The names of the columns stay in sight.
    assert view.locator("thead th").first.bounding_box()["y"] == 0 < view.evaluate("scrollY")
