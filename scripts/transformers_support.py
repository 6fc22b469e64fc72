"""What `og.install("transformers")` guards in the installed Transformers, written into docs/transformers-support.md.

    transformers_support.py            writes the tables of the installed version, and `versions=` of code it has
    transformers_support.py --check    only says, by its exit code and what it prints, whether any of these is old
    transformers_support.py --draft [--beside PYTHON]
                                       shows the code that no contract was written for, and drafts the lines to add

Every module in which there may be an operator is imported, in child processes, and the integration is asked for its
candidates; so is code that contracts ask about, and every `forward` for what its syntax shows. What has become fewer
is named. `--beside` names the Python of an environment with a Transformers whose code is known: what is refused there
too is left out, and the rest is shown beside the known code that it is most like.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from packaging.version import Version

from llm_op_guard.install.recognise import Fingerprint, Refused, fingerprint, function_syntax, innermost
from llm_op_guard.integrations import transformers as integration
from llm_op_guard.integrations.transformers import forwards
from llm_op_guard.integrations.transformers.known import Code

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "src" / "llm_op_guard" / "integrations" / "transformers"
PAGE = ROOT / "docs" / "transformers-support.md"
_MODELS, _INTEGRATIONS = "transformers.models.", "transformers.integrations."
_NAMED = 6  # how many models a row names
_SHOWN = 24  # how many lines of a difference are shown
_LIKE = 0.6  # what is less like any known code is shown without a difference
_FACTS: tuple[Callable[[FunctionType], object], ...] = (
    forwards.table_of_ids,
    forwards.module_asked_for_table,
    forwards.embeds_as_given,
    forwards.rotates_positions,
    forwards.looks_positions_up,
    forwards.runs_every_layer,
    forwards.hands_cache_on,
    forwards.fills_its_layer,
    forwards.fails_without_tokens,
    forwards.learns_next_tokens,
    forwards.hands_on_to_super,
)


@dataclass(frozen=True)
class Place:
    """A candidate: where it is, of which part of the integration, under which contract or why under none.

    Or code of the kind `part` of which contracts ask, without a contract.

    `digest` and `source` are those of the function and of what it calls, empty where it has none.
    """

    part: str
    site: str
    contract: str
    reason: str
    digest: str
    source: str

    @property
    def model(self) -> str:
        """The model whose file it is in, or the module."""
        if self.site.startswith(_MODELS):
            return self.site.removeprefix(_MODELS).partition(".")[0]
        return self.site.removeprefix("transformers.").rpartition(".")[0]

    @property
    def why(self) -> str:
        """The reason without what tells apart one body of code from another, which stands in parentheses."""
        return re.sub(r" \(.*\)$", "", self.reason)

    @property
    def unknown(self) -> bool:
        """Whether it was refused because nobody has read its code."""
        return bool(self.digest) and f"fingerprint {self.digest}" in self.reason


@dataclass(frozen=True)
class Survey:
    """What was found in one version.

    `places` are the candidates, `failed` the modules that cannot be imported, with the error, `beside` the code that
    contracts ask about, and `facts` says of how many forwards the answer to each question is yes.
    """

    version: str
    places: tuple[Place, ...]
    failed: tuple[tuple[str, str], ...]
    beside: tuple[Place, ...] = ()
    facts: tuple[tuple[str, int], ...] = ()


# ---------------------------------------------------------------- looking


def survey(python: str = sys.executable) -> Survey:
    """Look through the Transformers of a Python, a process for each core."""
    processes = os.cpu_count() or 1
    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(lambda k: _in_a_child(python, k, processes), range(processes)))
    return Survey(
        found[0].version,
        tuple(sorted((place for part in found for place in part.places), key=lambda place: place.site)),
        tuple(sorted(failure for part in found for failure in part.failed)),
        tuple(sorted((place for part in found for place in part.beside), key=lambda place: place.site)),
        _added(fact for part in found for fact in part.facts),
    )


def _in_a_child(python: str, share: int, of: int) -> Survey:
    environment = dict(os.environ)
    if python != sys.executable:  # a path that leads to one Transformers would hide the other
        environment["PYTHONPATH"] = str(ROOT / "src")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "survey.json"  # the modules write to stdout
        command = [python, __file__, "--survey", str(share), str(of), str(out)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            raise RuntimeError(f"{python} could not look through its Transformers:\n{process.stderr[-2000:]}")
        found = json.loads(out.read_text(encoding="utf-8"))
    return Survey(
        found["version"],
        tuple(Place(**place) for place in found["places"]),
        tuple((module, error) for module, error in found["failed"]),
        tuple(Place(**place) for place in found["beside"]),
        tuple((fact, number) for fact, number in found["facts"]),
    )


def modules() -> list[str]:
    """The modules of the installed Transformers in which there may be operators, or code of which contracts ask."""
    import transformers  # noqa: PLC0415 - only the children load it

    root = Path(transformers.__file__).parent
    names = (".".join(file.relative_to(root.parent).with_suffix("").parts) for file in sorted(root.rglob("*.py")))
    asked = integration.TransformersIntegration()
    beside = {known.module for known in integration.KNOWN}
    return [name for name in names if asked.wants(name) or name in beside]


def looked_through(names: Iterable[str]) -> Survey:
    """What these modules of the installed Transformers hold."""
    import transformers  # noqa: PLC0415

    places: list[Place] = []
    failed: list[tuple[str, str]] = []
    beside: list[Place] = []
    facts: list[tuple[str, int]] = []
    seen: set[int] = set()  # as the installer does: one function under two names is one site
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            if name.startswith(_INTEGRATIONS):  # it is for another library, which is not here
                continue
            failed.append((name, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
            continue
        beside += _beside(module)
        facts += _facts(module)
        for part in integration.PARTS:
            for candidate in part.candidates(module):
                if candidate.function is not None and id(candidate.function) in seen:
                    continue
                seen.add(id(candidate.function))
                function = candidate.function or _found_at(candidate.site, module)
                kind = part.__name__.rpartition(".")[2]
                contract = candidate.contract.id.replace(".contract:", ":") if candidate.contract else ""
                places.append(Place(kind, candidate.site, contract, candidate.reason, *_code(function)))
    return Survey(transformers.__version__, tuple(places), tuple(failed), tuple(beside), _added(facts))


def _defined(module: Any) -> Iterator[tuple[str, Any]]:
    """The functions of a module and the methods of its classes, by qualified name."""
    for name, found in list(vars(module).items()):
        if getattr(found, "__module__", None) != module.__name__:
            continue
        yield name, found
        if isinstance(found, type):
            for method, inner in vars(found).items():
                yield f"{name}.{method}", inner.fget if isinstance(inner, property) else inner


def _beside(module: Any) -> Iterator[Place]:
    """The code of a module of which contracts ask, known or not."""
    for name, found in _defined(module):
        site = f"{module.__name__}.{name}"
        for known in integration.KNOWN:
            if re.fullmatch(known.site, site) and (code := _code(found))[0]:
                reason = "" if code[0] in known.code else f"unknown (fingerprint {code[0]})"
                yield Place(known.name, site, "", reason, *code)


def _facts(module: Any) -> Iterator[tuple[str, int]]:
    """What the forwards of a module show; 1 for each."""
    for name, found in _defined(module):
        function = innermost(found) if name.endswith(".forward") else None
        if isinstance(function, FunctionType):
            yield from ((fact.__name__, 1) for fact in _FACTS if fact(function) not in (None, False))


def _added(facts: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    total: Counter[str] = Counter()
    for fact, number in facts:
        total[fact] += number
    return tuple(sorted(total.items()))


def _found_at(site: str, module: Any) -> object:
    """What stands where a refused candidate is."""
    found = module
    for name in site.removeprefix(f"{module.__name__}.").split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found


def _code(found: object) -> tuple[str, str]:
    """The fingerprint of a function, and its source with that of what it calls; empty where it has none."""
    function = innermost(found)
    if isinstance(function, Refused):
        return "", ""
    known = fingerprint(function)
    if not isinstance(known, Fingerprint):
        return "", ""
    reached = [function.__globals__.get(entry.partition("=")[0]) for entry in known.reaches if ":" not in entry]
    functions = [function, *(callee for callee in reached if isinstance(callee, FunctionType))]
    syntax = [function_syntax(one) for one in dict.fromkeys(functions)]
    return known.digest, "\n".join(ast.unparse(tree) for tree in syntax if not isinstance(tree, Refused))


# ---------------------------------------------------------------- the tables


def tables(found: Survey, right: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """The tables of a version and that of the families, by name, in Markdown; `right` is what `untrue` says."""
    guarded = [place for place in found.places if place.contract]
    refused = [place for place in found.places if not place.contract]
    parts = sorted({place.part for place in found.places})
    counts = [
        (part, str(sum(p.part == part for p in guarded)), str(sum(p.part == part for p in refused))) for part in parts
    ]
    contracts = Counter(place.contract for place in guarded)
    facts = [(fact.__name__, str(dict(found.facts).get(fact.__name__, 0))) for fact in _FACTS]
    groups: dict[tuple[str, str], list[Place]] = {}
    for place in refused:
        groups.setdefault((place.part, place.why), []).append(place)
    reasons = [
        (part, reason, str(len(places)), str(len({p.digest or p.reason for p in places})), _models(places))
        for (part, reason), places in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1])))
    ]
    missing = [f"`{module.removeprefix(_MODELS)}` ({error})" for module, error in found.failed]
    lines = [
        _table(("operators", "guarded", "refused"), [*counts, ("all", str(len(guarded)), str(len(refused)))]),
        "",
        _table(("contract", "sites"), [(name, str(number)) for name, number in sorted(contracts.items())]),
        "",
        _table(("what the syntax of a forward shows", "forwards"), facts),
        "",
        _table(("refused", "reason", "sites", "bodies of code", "where"), reasons),
        "",
        f"Not looked at, as they cannot be imported here: {', '.join(missing)}." if missing else "All were looked at.",
    ]
    return {found.version: "\n".join(lines), "families": families(right)}


def families(right: dict[str, tuple[str, ...]]) -> str:
    """The table of the code that is known."""
    rows = [
        (name, f"`{digest}`", code.where, ", ".join(right.get(digest, code.versions)))
        for name, digest, code in known_code()
        if not code.reason
    ]
    return _table(("contract, or what is told by it", "fingerprint", "where", "versions"), rows)


def known_code() -> Iterator[tuple[str, str, Code]]:
    """All code that was read, by its contract or what is told by it, and fingerprint; without a contract by no name."""
    named = [(family.contract, family.code) for family in integration.FAMILIES]
    named += [(known.name, known.code) for known in integration.KNOWN]
    for name, bodies in [*named, ("", integration.LEFT_OUT)]:
        yield from ((name, digest, code) for digest, code in bodies.items())


def fallen(old: str, new: str) -> Iterator[str]:
    """The numbers of contracts and of what forwards show that are lower in a new text of a version's tables."""
    before, after = (
        {name: int(number) for name, number in re.findall(r"^\| ([\w:]+) \| (\d+) \|$", text, re.MULTILINE)}
        for text in (old, new)
    )
    for name, number in before.items():
        if after.get(name, 0) < number:
            yield f"{name} fell from {number} to {after.get(name, 0)}"


def _models(places: Iterable[Place]) -> str:
    names = list(dict.fromkeys(place.model for place in places))
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def renewed(page: str, fresh: dict[str, str]) -> str:
    """The page with these tables written anew; those of other versions stay. Raises KeyError where one has no place."""
    for name, text in fresh.items():
        place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(page):
            raise KeyError(f"docs/{PAGE.name} has no place for a table {name}")
        page = place.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
    return page


def untrue(found: Survey) -> dict[str, tuple[str, ...]]:
    """The code of which `versions=` says something else than was found, by fingerprint: what it should be.

    Nothing where no version has it any more.
    """
    guarded = {place.digest for place in found.places if place.contract}
    left_out = {place.digest for place in found.places if not place.contract}
    beside = {place.digest for place in found.beside}
    contracts = {family.contract for family in integration.FAMILIES}
    right: dict[str, tuple[str, ...]] = {}
    for name, digest, code in known_code():
        seen = left_out if code.reason else guarded if name in contracts else beside
        others = {*code.versions} - {found.version}
        versions = others | ({found.version} if digest in seen else set())
        if versions != {*code.versions}:
            right[digest] = tuple(sorted(versions, key=Version))
    return right


def corrected(source: str, right: dict[str, tuple[str, ...]]) -> str:
    """The source of a file of the integration, `versions=` of these fingerprints written anew, to be formatted."""
    lines = source.splitlines(keepends=True)
    entries = [
        (key.value, value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value in right and isinstance(value, ast.Call)
    ]
    for digest, call in sorted(entries, key=lambda entry: -entry[1].lineno):
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "versions"]
        if right[digest] != Code("").versions:
            call.keywords.append(ast.keyword("versions", ast.Constant(right[digest])))
        assert call.end_lineno is not None
        before = lines[call.lineno - 1].encode()[: call.col_offset].decode()
        after = lines[call.end_lineno - 1].encode()[call.end_col_offset :].decode()
        lines[call.lineno - 1 : call.end_lineno] = [f"{before}{ast.unparse(call)}{after}"]
    return "".join(lines)


# ---------------------------------------------------------------- the draft


def draft(found: Survey, beside: Survey | None) -> Iterator[str]:
    """What to do about the code of a version that is not known, line by line."""
    known = {digest: (name or "left out", code) for name, digest, code in known_code()}
    there = (*beside.places, *beside.beside) if beside else ()
    refused_before = {place.digest for place in there if place.unknown}
    here = (*found.places, *found.beside)
    sources = {place.digest: place for place in (*here, *there) if place.digest in known and not place.unknown}

    bodies: dict[str, list[Place]] = {}
    for place in here:
        bodies.setdefault(place.digest, []).append(place)
    for digest, places in sorted(bodies.items(), key=lambda body: -len(body[1])):
        name, code = known.get(digest, ("", None))
        if code is not None and found.version not in code.versions:
            yield f"{name} {digest}: the same code, {len(places)} sites; make support adds the version"
    for digest, places in sorted(bodies.items(), key=lambda body: -len(body[1])):
        if places[0].unknown and digest not in refused_before:
            yield ""
            yield from _draft_of(places, [p for p in sources.values() if p.part == places[0].part], found.version)
    again = [p for p in here if p.unknown and p.digest in refused_before]
    if beside is not None:
        yield f"\nleft out: {len(again)} sites whose code is refused in {beside.version} too"


def _draft_of(places: list[Place], candidates: list[Place], version: str) -> Iterator[str]:
    one = places[0]
    yield f"{one.part} {one.digest}: {len(places)} sites, {_models(places)}; {one.site}"
    if not candidates:
        yield "  nothing of this kind is known here; name a Python that has known code with --beside"
        return
    nearest, likeness = max(((other, _likeness(one.source, other.source)) for other in candidates), key=lambda n: n[1])
    yield f"  most like {nearest.contract or nearest.part} {nearest.digest}, {likeness:.0%}: {nearest.site}"
    if likeness < _LIKE:
        return
    lines = [
        line
        for line in difflib.unified_diff(nearest.source.splitlines(), one.source.splitlines(), lineterm="", n=1)
        if not line.startswith(("---", "+++"))
    ]
    yield from (f"  {line}" for line in lines[:_SHOWN])
    if len(lines) > _SHOWN:
        yield f"  and {len(lines) - _SHOWN} lines more"
    names = list(dict.fromkeys(place.model for place in places))
    where = ", ".join(names[:2]) + (f" and {len(names) - 2} others" if len(names) > 2 else "")
    yield "  once it was read, and the contract holds for it:"
    yield f'    "{one.digest}": Code("{where}: ...", versions=("{version}",)),'


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), autojunk=False).ratio()


# ---------------------------------------------------------------- as a program


def main() -> int:
    """Write the tables; or check them, or draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true")
    what.add_argument("--draft", action="store_true")
    what.add_argument("--survey", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--beside", metavar="PYTHON")
    options = parser.parse_args()
    if options.survey:
        share, of, out = options.survey
        Path(out).write_text(
            json.dumps(dataclasses.asdict(looked_through(modules()[int(share) :: int(of)]))), encoding="utf-8"
        )
        return 0
    found = survey()
    if options.draft:
        print(*draft(found, survey(options.beside) if options.beside else None), sep="\n")
        return 0
    right = untrue(found)
    page = PAGE.read_text(encoding="utf-8")
    fresh = renewed(page, tables(found, right))
    gone = [digest for digest, versions in right.items() if not versions]
    said = [f"{found.version}: no version has {digest} any more; take it out" for digest in gone]
    said += [f"{found.version}: {what}" for what in fallen(_table_named(page, found), _table_named(fresh, found))]
    if options.check:
        old = [f"versions= of {digest} should be {versions}" for digest, versions in right.items() if versions]
        old += [f"docs/{PAGE.name} is old"] if page != fresh else []
        said += [f"{found.version}: {what}; run: make support" for what in old]
    print(*said, sep="\n", end="\n" if said else "")
    if options.check:
        return int(bool(said))
    PAGE.write_text(fresh, encoding="utf-8")
    for file in FILES.glob("*.py"):
        file.write_text(corrected(file.read_text(encoding="utf-8"), right), encoding="utf-8")
    return int(bool(gone))


def _table_named(page: str, found: Survey) -> str:
    return page.partition(f"<!-- table: {found.version} -->")[2].partition("<!-- end -->")[0]


if __name__ == "__main__":
    sys.exit(main())
