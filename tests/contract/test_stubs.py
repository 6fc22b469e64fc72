"""Stubs that are read one by one come to what the whole file does."""

import pytest

from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.contract.stubs import Stubs

TEXT = '''"""Of a file."""

WIDTHS = (64, 128)


def scale(x, w):
    """One."""
    x: floating[N, D]
    w: floating[D]


def narrow(x):
    x: floating[N, D]
    require(D in WIDTHS, id="width")
'''


def test_a_stub_is_that_of_the_whole_file() -> None:
    stubs, whole = Stubs(TEXT, "a.contract"), parse_stubs(TEXT, "a.contract")
    for name, contract in whole.items():
        assert stubs[name].hash == contract.hash
        assert stubs[name].id == contract.id
        assert stubs[name].rules == contract.rules
        assert stubs[name].clauses == contract.clauses
        assert stubs[name].constants == contract.constants


def test_a_stub_is_read_once() -> None:
    stubs = Stubs(TEXT, "a.contract")
    assert stubs["scale"] is stubs["scale"]


def test_a_stub_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        Stubs(TEXT, "a.contract")["other"]
