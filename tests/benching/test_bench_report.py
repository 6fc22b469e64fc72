"""Tables and aims, from figures that are known."""

from __future__ import annotations

import pytest

from llm_op_guard.benching.aims import Aim, aims
from llm_op_guard.benching.calls import BY_HAND, JAXTYPING, NATIVE, PYTHON, Measured, Variant
from llm_op_guard.benching.estimate import Estimate
from llm_op_guard.benching.findings import Findings
from llm_op_guard.benching.growth import GIGABYTE, KILOBYTE, Curve
from llm_op_guard.benching.model import TWELVE_LAYERS, Cost, Work
from llm_op_guard.benching.report import aims_table, number, percent, rendered, spread, table
from llm_op_guard.benching.start import Start


def at(value: float) -> Estimate:
    return Estimate(value, value * 0.9, value * 1.1)


def cost(batch: int, added: Estimate) -> Cost:
    settings = {"unguarded": at(40.0), "A": at(41.0), "A+B": at(42.0)}
    ratios = {s: {"step": added, "wall": added, "p99": at(1.0), "tokens_per_second": at(1.0)} for s in ("A", "A+B")}
    work = Work("12 layers", "decode", batch, 30)
    return Cost(work, TWELVE_LAYERS, 120, dict(settings), dict(settings), dict(settings), ratios)


@pytest.fixture
def findings() -> Findings:
    rope = Measured(
        "RoPE",
        "rope.contract:apply_rotary_pos_emb",
        rules=["k is floating", "D is even"],
        valid_calls=3,
        variants=[
            Variant("unguarded", at(40.0), at(0.0)),
            Variant(NATIVE, at(300.0), at(260.0)),
            Variant(PYTHON, at(1500.0), at(1460.0)),
            Variant(BY_HAND, at(1040.0), at(1000.0)),
            Variant("torch._check", at(9040.0), at(9000.0), let_through=["D is even"], wrongly_refused=1),
            Variant(JAXTYPING, left_out="jaxtyping is not installed: pip install 'llm-op-guard[bench]'"),
            Variant("dltype", left_out="dltype is not installed: pip install 'llm-op-guard[bench]'"),
        ],
        ratios={f"{NATIVE} / {BY_HAND}": at(0.26), f"{PYTHON} / {BY_HAND}": at(1.46)},
    )
    curve = Curve("arguments", [2, 32], {NATIVE: [at(100.0), None]}, {}, ["not checked natively with 32 arguments"])
    size = Curve("bytes", [KILOBYTE, GIGABYTE], {NATIVE: [at(260.0), at(260.0)]}, {NATIVE: Estimate(1.0, 0.99, 1.01)})
    start = Start(at(0.040), at(0.75), 53, None, 53, [], Estimate(600, 590, 610), Estimate(195, 190, 200))
    costs = [cost(1, Estimate(1.004, 1.001, 1.009)), cost(8, Estimate(1.004, 1.001, 1.013))]
    return Findings({"cores": 2}, False, [rope], curve, curve, size, costs, start, 12.0)


def test_each_aim_is_judged(findings: Findings) -> None:
    judged = {aim.what: aim.reached for aim in aims(findings)}
    assert judged == {
        "RoPE, native guard ÷ ifs by hand": True,
        "RoPE, guard in Python ÷ ifs by hand": False,
        "RoPE, native guard ÷ jaxtyping+beartype": None,
        "decode step of Llama (12 layers, batch 1), A adds": True,
        "decode step of Llama (12 layers, batch 8), A adds": False,  # by the upper end
        "class A at 1 GB ÷ at 1 KB": True,
        "off: functions that are another object or have other code": True,
        "off: a builtin taken by reference while guarded adds (one plain call)": False,
        "import llm_op_guard": True,
        'install("transformers"), Llama imported': False,
    }


def test_the_table_of_aims_says_by_how_much(findings: Findings) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in aims_table(aims(findings)).split("\n")]
    assert rows[0] == ["aim", "measured", "at most", "reached"]
    by_name = {row[0]: row[1:] for row in rows[2:]}
    assert by_name["RoPE, guard in Python ÷ ifs by hand"] == ["1.46 [1.31, 1.61]", "1.30", "no, by 0.160"]
    assert by_name["RoPE, native guard ÷ jaxtyping+beartype"][2] == (
        "not measured: jaxtyping is not installed: pip install 'llm-op-guard[bench]'"
    )
    assert by_name["decode step of Llama (12 layers, batch 8), A adds"] == [
        "0.400 [0.1000, 1.30] %",
        "1.00 %, by the upper end",
        "no, by 0.300 %",
    ]
    assert by_name['install("transformers"), Llama imported'] == ["0.750 [0.675, 0.825] s", "0.500 s", "no, by 0.250 s"]


def test_everything_is_told(findings: Findings) -> None:
    text = rendered(findings)
    assert text.startswith("cores 2; 12 s.")
    assert "A quick run" not in text
    assert "Left out: dltype: dltype is not installed: pip install 'llm-op-guard[bench]'" in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("|")]
    assert ["torch._check", "9,040 [8,136, 9,944]", "9,000 [8,100, 9,900]", "1 of 2", "1 of 3"] in lines
    assert ["unguarded", "40.0 [36.0, 44.0]", "0 [0, 0]", "", ""] in lines
    assert ["RoPE: D is even", "yes", "yes", "yes", "no", "", ""] in lines
    assert ["variant", "1 KB", "1 GB", "last ÷ first"] in lines
    assert [NATIVE, "100", "-", "-"] in lines
    assert "not checked natively with 32 arguments" in text


def test_a_quick_run_says_that_it_was(findings: Findings) -> None:
    findings.quick = True
    assert "too few rounds for its figures to mean anything" in rendered(findings)


def test_an_operator_that_is_absent_leaves_its_aims_open(findings: Findings) -> None:
    findings.calls = [Measured("RoPE", "", left_out="its code is not one that is known")]
    rope = [aim for aim in aims(findings) if aim.what.startswith("RoPE")]
    assert [(aim.reached, aim.why) for aim in rope] == [(None, "its code is not one that is known")] * 3
    assert "Left out: its code is not one that is known" in rendered(findings)


def test_an_aim_that_is_met_exactly_is_reached() -> None:
    assert Aim("x", "", 0.35, Estimate(0.35, 0.3, 0.4)).reached
    assert not Aim("x", "", 0.35, Estimate(0.35, 0.3, 0.4), "high").reached
    with pytest.raises(ValueError, match="not measured: x"):
        _ = Aim("x", "", 0.35, None).missed_by


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345.6, "12,346"),
        (99.95, "100.0"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.1234, "0.123"),
        (-2.5, "-2.50"),
        (0.0071, "0.0071"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_figures_with_their_intervals() -> None:
    assert spread(Estimate(1.5, 1.0, 2.0)) == "1.50 [1.00, 2.00]"
    assert spread(Estimate(1.5, 1.0, 2.0), 1e3) == "1,500 [1,000, 2,000]"
    assert spread(None) == "-"
    assert percent(Estimate(1.012, 0.998, 1.03)) == "+1.2 % [-0.2, +3.0]"


def test_a_table() -> None:
    assert table(("what", "n"), [("a", "1"), ("bcdef", "1,000")]) == (
        "| what  |     n |\n| ----- | ----: |\n| a     |     1 |\n| bcdef | 1,000 |"
    )
