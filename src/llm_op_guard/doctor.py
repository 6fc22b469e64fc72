"""Looks at an environment: what is guarded in it, what is not, and why."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_op_guard import __version__, api
from llm_op_guard.guard import fast
from llm_op_guard.install.site import Refusal
from llm_op_guard.native.program import Refused as NotNative
from llm_op_guard.policy import CLASSES, ENVIRONMENT_VARIABLE, OFF, Layer, Policy, Setting, from_environment
from llm_op_guard.report.overview import Group, render_facts, render_groups
from llm_op_guard.report.terminal import Terminal

_PREFIX = "transformers.models."

# Modules load lazily, so these are loaded to be looked at when nobody names others.
SAMPLE = {
    "transformers": tuple(
        f"{_PREFIX}{name}.modeling_{name}"
        for name in ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "phi3", "gpt_neox", "falcon", "gpt2")
    )
}


@dataclass
class Findings:
    """What was found: places guarded by contract, places refused by reason, modules that could not be loaded."""

    guarded: list[Group] = field(default_factory=list)
    refused: list[Group] = field(default_factory=list)
    unloadable: list[Refusal] = field(default_factory=list)
    native: Group = field(default_factory=lambda: Group("", []))


def examine(library: str, modules: Sequence[str]) -> Findings:
    """Load the modules with guards installed and say what became of each operator in them.

    Raises InstallError for a library that nothing is known of.
    """
    findings = Findings()
    api.install(library)
    # Where the library is absent, the refusal of `install` says so.
    for module in modules if _version(library) else ():
        try:
            importlib.import_module(module)
        except Exception as error:
            findings.unloadable.append(Refusal(module, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    contracts: dict[str, list[str]] = {}
    for site in api.sites():
        contracts.setdefault(site.guard.contract.id, []).append(_short(site.name))
    findings.guarded = [Group(f"{name} ({len(places)})", places) for name, places in sorted(contracts.items())]
    reasons: dict[str, list[str]] = {}
    for refusal in api.status().refused:
        reasons.setdefault(refusal.reason, []).append(_short(refusal.site))
    findings.refused = [Group(reason, places) for reason, places in reasons.items()]
    findings.native = _native()
    return findings


def _native() -> Group:
    """Whether metadata is checked natively here, and which contracts have rules of which it is not, and why."""
    extension = fast.usable()
    if isinstance(extension, NotNative):
        return Group(f"no, in Python: {extension.reason}", [])
    contracts = {site.guard.contract.id: site.guard.contract for site in api.sites() if "A" in site.guard.classes}
    lines: list[str] = []
    in_part = 0
    for name, contract in sorted(contracts.items()):
        native, reasons = fast.natively(contract)
        if reasons:
            in_part += native
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            lines.append(f"{name}{' (in part)' if native else ''}: {reasons[0]}{more}")
    whole = len(contracts) - len(lines)
    title = f"yes, for {whole} of the {len(contracts)} contracts that are used here"
    return Group(f"{title}, and in part for {in_part}" if in_part else title, lines)


def _short(site: str) -> str:
    """`llama.LlamaModel.forward` for `transformers.models.llama.modeling_llama.LlamaModel.forward`."""
    if not site.startswith(_PREFIX):
        return site
    family, _, rest = site.removeprefix(_PREFIX).partition(".")
    return f"{family}.{rest.partition('.')[2] or rest}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_policy() -> str:
    """The policy in force and where it comes from; raises PolicyError for a bad LLM_OP_GUARD."""
    layer = from_environment()
    if layer == Layer(OFF):
        return f"off, from {ENVIRONMENT_VARIABLE}: no guard checks anything"
    parts = []
    for name in CLASSES:
        setting: Setting | None = getattr(layer.general, name)
        if setting is not None:
            parts.append(f"{name}={setting} (from {ENVIRONMENT_VARIABLE})")
        else:
            parts.append(f"{name}={_DEFAULTS[name]}")
    if layer.general.default is not None:
        parts.append(f"default={layer.general.default} in place of raise (from {ENVIRONMENT_VARIABLE})")
    for scoped in layer.scoped:
        settings = [f"{name}={value}" for name, value in _named(scoped.policy) if value is not None]
        parts.append(f"{scoped.operator}: {' '.join(settings)} (from {ENVIRONMENT_VARIABLE})")
    return "; ".join(parts)


def _named(policy: Policy) -> list[tuple[str, object]]:
    return [("A", policy.A), ("B", policy.B), ("default", policy.default)]


def describe_waivers() -> list[tuple[str, str]]:
    """How many waivers hold here and how many have expired, when there are any; raises PolicyError for a bad one."""
    waivers = api.waivers()
    expired = sum(waiver.expired for waiver in waivers)
    if not waivers:
        return []
    return [("waivers", f"{len(waivers)}" + (f", of which {expired} expired and hold no longer" if expired else ""))]


_DEFAULTS = {
    "A": "raise (default)",
    "B": "raise in contracts of your own and for token ids, off in the other shipped contracts (default)",
}


def main(out: Terminal, complaints: Terminal, library: str, modules: Sequence[str]) -> Findings:
    """Print what `examine` finds in these modules, or in a sample of the library's where none is named.

    Raises InstallError and PolicyError.
    """
    # First: with a bad LLM_OP_GUARD or pyproject.toml there is nothing to look at.
    policy, waivers = describe_policy(), describe_waivers()
    asked = list(modules) or list(SAMPLE.get(library, ()))
    findings = examine(library, asked)
    facts = [
        ("llm-op-guard", __version__),
        ("python", f"{platform.python_version()} on {platform.system()}"),
        *((name, _version(name) or "not installed") for name in dict.fromkeys(("torch", library))),
        ("policy", policy),
        ("libraries", f"{', '.join(api.known_libraries())} (those that guards are known for)"),
        *waivers,
        ("native", findings.native.title),
    ]
    out.line(render_facts(facts))
    if not modules and _version(library):
        short = ", ".join(module.removeprefix(_PREFIX).partition(".")[0] for module in asked)
        out.line(f"\nLooked at a few model families, as no module was named: {short}.")
        out.line(f"To look at another: llm-op-guard doctor {_PREFIX}olmo2.modeling_olmo2")
    for title, groups, style in (("Guarded", findings.guarded, "green"), ("Not guarded", findings.refused, "yellow")):
        count = sum(len(group.places) for group in groups)
        out.line(f"\n{out.paint(f'{title}: {count}', 'bold')}")
        if groups:
            out.line(render_groups(groups, out, style))
    if findings.native.places:
        out.line(f"\n{out.paint(f'Checked in Python: {len(findings.native.places)}', 'bold')}")
        for place in findings.native.places:
            out.line(f"  {place}")
    for refusal in findings.unloadable:
        complaints.error(f"cannot load {refusal}")
    return findings
