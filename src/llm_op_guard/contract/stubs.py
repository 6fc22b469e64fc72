"""The contracts of a `.contract` file, each read when it is asked for: of a library few operators may be loaded."""

from __future__ import annotations

import ast
from typing import Any

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import opened, read_constant, read_stub
from llm_op_guard.contract.source import Source


class Stubs:
    """What `parse_stubs` reads of a text that it is known to accept; raises KeyError for a name that it has not."""

    def __init__(self, text: str, file: str) -> None:
        self._source, _, statements = opened(Source(file, text))
        self._stubs = {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}
        self._read: dict[str, Contract] = {}
        self._constants: dict[str, Any] = {}
        for node in statements:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    self._constants[name] = read_constant(name, node, self._constants, self._source)

    def __getitem__(self, name: str) -> Contract:
        if name not in self._read:
            self._read[name] = read_stub(self._stubs[name], self._source, self._constants, proven=True)
        return self._read[name]
