"""The names that the source of one check uses: readable, and never one that is taken."""

from __future__ import annotations

import re
from typing import Any

from llm_op_guard.contract.model import Dtype, DtypeName, DtypeSet
from llm_op_guard.contract.path import Path
from llm_op_guard.guard.plan import Plan

# Builtins that the generated source uses; a parameter or symbol of that name gets another one there.
_BUILTINS = frozenset(
    {"Exception", "bool", "float", "int", "isinstance", "len", "list", "slice", "state", "str", "tuple", "type"}
)


class Names:
    """The names of one check: readable, and never one that is taken."""

    def __init__(self, plan: Plan) -> None:
        contract = plan.contract
        own = (*contract.parameters, *contract.symbols, *contract.assigned)
        self._taken = {*own, "result", *_BUILTINS}
        self._given: dict[str, str] = {}
        for name in own:
            # Names that begin with an underscore are those of the check's namespace.
            clashes = name in _BUILTINS or name.startswith("_")
            self._given[f"own {name}"] = self._local(f"own {name}", f"p{name}_") if clashes else name
        self.dtype_sets: dict[str, tuple[DtypeName | DtypeSet, ...]] = {}
        self.constants: dict[str, Any] = {}

    def _local(self, key: str, wish: str) -> str:
        if key not in self._given:
            name = wish
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            self._given[key] = name
        return self._given[key]

    def own(self, name: str) -> str:
        """A parameter, symbol or assigned name of the contract (or `result`) as it is spelt in the source."""
        return self._given.get(f"own {name}", name)

    def path(self, path: Path) -> str:
        """Where the value of a path is kept."""
        return self.own(path.root) if not path.steps else self._local(f"path {path}", _slug(str(path)))

    def size(self, path: Path, axis: int) -> str:
        """Where one size of a tensor is kept."""
        return self._local(f"size {path} {axis}", f"{_slug(str(path))}_{axis}")

    def kind(self, path: Path) -> str:
        """Where the alternative is kept that a path committed to."""
        return self._local(f"kind {path}", f"{_slug(str(path))}_kind")

    def snapshot(self, path: Path) -> str:
        """Where the shape, dtype and device are kept that a tensor had before the call."""
        return self._local(f"entry {path}", f"{_slug(str(path))}_at_entry")

    def model(self, path: Path) -> str:
        """Where a tensor is kept that another is compared with."""
        return self._local(f"model {path}", f"{_slug(str(path))}_model")

    def aspect(self, path: Path, aspect: str) -> str:
        """Where the dtype, shape or device of a tensor is kept that another must be like."""
        return self._local(f"{aspect} {path}", f"{_slug(str(path))}_{aspect}")

    def case(self, fact: str) -> str:
        """Where the outcome of a branch test is kept."""
        return self._local(f"case {fact}", fact)

    def dtypes(self, dtypes: tuple[Dtype, ...]) -> str:
        """The name of a set of dtypes in the namespace of the check."""
        fixed = tuple(d for d in dtypes if isinstance(d, DtypeName | DtypeSet))
        name = "_" + "_or_".join(d.name for d in fixed)
        self.dtype_sets[name] = fixed
        return name


def _slug(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")
