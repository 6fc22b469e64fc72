"""What runs and what a violation does. The only reader of the environment.

A policy gives each cost class a setting: an action (`raise`, `warn`, `record`, `off`), a time (`sync`, `async`), or
both; a time alone means raise. Class B, which reads tensors, may have a pace as well: `every=10` is every tenth call of
an operator, `sample=0.01` a call in a hundred by chance. Rules that protect a memory access keep no pace (`guard.pace`)
and are judged in the call, whatever the time (`guard.late`). Classes that it leaves open keep what was set before: by
`set_policy`, by `LLM_OP_GUARD`, or by the guard's own defaults. `default=` is for the rules that only those switch on.

Who wins: the innermost `with` block, then `set_policy`, then the environment, then the guard's defaults. Among the
settings of `set_policy`, and among those of the environment, one for an operator beats one for all; of several that
match, the last one set wins.
"""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Literal, Self

from llm_op_guard.errors import PolicyError
from llm_op_guard.frozen import frozen

_Path = os.PathLike[str]
ENVIRONMENT_VARIABLE = "LLM_OP_GUARD"
RECORD_VARIABLE = "LLM_OP_GUARD_RECORD"
INSTALL_VARIABLE = "LLM_OP_GUARD_INSTALL"
TRACK_VARIABLE = "LLM_OP_GUARD_TRACK"
NATIVE_VARIABLE = "LLM_OP_GUARD_NATIVE"
# Those that run in calls. Class C, imported predicates, is judged by og.verify and og.ingress alone.
CLASSES: tuple[Literal["A"], Literal["B"]] = ("A", "B")


class Action(StrEnum):
    """What a violation of a certain rule does; a suspect rule warns where this says raise."""

    RAISE = "raise"
    WARN = "warn"
    RECORD = "record"
    OFF = "off"


class Time(StrEnum):
    """When the verdict on values is waited for: in the call, or not at all where they are on a CUDA device."""

    SYNC = "sync"
    ASYNC = "async"


@frozen
class Setting:
    """What happens with the rules of one class, and in which calls they are judged: every so many, or by chance.

    Without a time, it is `async` for values on a CUDA device and `sync` for others.
    """

    action: Action
    time: Time | None = None
    every: int = 1
    sample: float = 1.0

    @property
    def is_paced(self) -> bool:
        """Whether rules are left out of some calls."""
        return (self.every, self.sample) != (1, 1.0)

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read `"raise"`, `"sync"`, `"warn,every=10"`; raises PolicyError for anything else."""
        if isinstance(text, cls):
            return text
        if not isinstance(text, str) or not text.strip():
            raise PolicyError(f"a policy setting is a text such as 'warn' or 'raise,sync', not {text!r}")
        said: dict[str, Any] = {}
        for word in (part.strip().lower() for part in text.split(",")):
            if word in list(Action) and "action" not in said:
                said["action"] = Action(word)
            elif word in list(Time) and "time" not in said:
                said["time"] = Time(word)
            elif (pace := _pace(word, text)) is not None and said.keys().isdisjoint(("every", "sample")):
                said |= pace
            else:
                known = ", ".join([*Action, *Time, "every=N or sample=P"])
                raise PolicyError(f"unknown or repeated {word!r} in the policy setting {text!r}; known: {known}")
        return cls(**{"action": Action.RAISE, **said})

    def __str__(self) -> str:
        time = f",{self.time}" if self.time is not None else ""
        every = f",every={self.every}" if self.every != 1 else ""
        return f"{self.action}{time}{every}{f',sample={self.sample:g}' if self.sample != 1 else ''}"


def _pace(word: str, text: str) -> dict[str, Any] | None:
    """What `every=10` or `sample=0.1` says; None for another word."""
    name, equals, number = word.partition("=")
    if name not in ("every", "sample") or not equals:
        return None
    try:
        value = int(number) if name == "every" else float(number)
    except ValueError:
        value = 0
    if not (value >= 1 if name == "every" else 0 < value <= 1):
        wanted = "a whole number from 1 on" if name == "every" else "a number above 0 and up to 1"
        raise PolicyError(f"{word!r} in the policy setting {text!r}: {name} takes {wanted}")
    return {name: value}


@frozen
class Policy:
    """The settings of the classes; None leaves a class as it was set before.

    `default` is what rules do that nobody set anything for and that the guard's defaults would let raise.
    """

    A: Setting | None = None
    B: Setting | None = None
    default: Action | None = None

    @classmethod
    def of(cls, **settings: object) -> Self:
        """Read keyword settings, `A="raise", B="warn,sync"`; raises PolicyError for an unknown class."""
        parsed: dict[str, Any] = {}
        for name, text in settings.items():
            if name == "C":
                raise PolicyError(
                    "rules of class C, which ask imported predicates, never run in a call, so there is nothing to set; "
                    "og.verify and og.ingress judge them, where they are called"
                )
            if name not in (*CLASSES, "default"):
                raise PolicyError(f"unknown cost class {name!r}; known: {', '.join(CLASSES)}")
            if text is not None:
                setting = Setting.parse(text)
                if setting.is_paced and name != "B":
                    raise PolicyError(f"{name}={str(text)!r}: a pace is for class B; metadata is judged in every call")
                if setting.time is Time.ASYNC and name != "B":
                    raise PolicyError(f"{name}={str(text)!r}: async is for class B; metadata is judged in the call")
                if setting.time is not None and name == "default":
                    raise PolicyError(f"default={str(text)!r}: it takes an action alone, such as 'record'")
                parsed[name] = setting if name in CLASSES else setting.action
        return cls(**parsed)

    def over(self, other: Policy) -> Policy:
        """The settings of this policy, and what `other` says of those that this one leaves open."""
        if self is _NOTHING_SET or other is _NOTHING_SET:
            return other if self is _NOTHING_SET else self
        return Policy(self.A or other.A, self.B or other.B, self.default or other.default)

    def over_defaults(self, defaults: Policy) -> Policy:
        """The settings of this policy; a guard's defaults, no harsher than `default`, for those that it leaves open."""
        chosen = self.default
        if chosen is not None:
            softened = {
                name: replace(setting, action=chosen)
                for name in CLASSES
                if (setting := getattr(defaults, name)) is not None and setting.action is not Action.OFF
            }
            defaults = replace(defaults, **softened)
        return self.over(defaults)

    def action(self, cost_class: str) -> Action:
        """What a violation in a class does; a class that nobody set is off."""
        setting: Setting | None = getattr(self, cost_class)
        return setting.action if setting is not None else Action.OFF


OFF = Policy(Setting(Action.OFF), Setting(Action.OFF))
_NOTHING_SET = Policy()


@frozen
class Scoped:
    """A policy for the operators whose name or site matches a shell-style pattern; for all of them without one."""

    policy: Policy
    operator: str | None = None

    @classmethod
    def of(cls, operator: object, settings: dict[str, object]) -> Self:
        """Read what `set_policy` and `policy` are given; raises PolicyError."""
        wanted = Policy.of(**settings)
        if operator is None:
            return cls(wanted)
        if not isinstance(operator, str) or not operator.strip():
            raise PolicyError(
                f"operator= is the name or the site of an operator, or a pattern such as "
                f"'transformers.models.llama.*', not {operator!r}"
            )
        if wanted == _NOTHING_SET:
            raise PolicyError(f"nothing is set for {operator!r}; add a setting such as A='warn'")
        return cls(wanted, operator)

    def matches(self, names: Sequence[str]) -> bool:
        """Whether it is for an operator with these names; upper and lower case differ."""
        return self.operator is None or any(fnmatch.fnmatchcase(name, self.operator) for name in names)


@frozen
class Layer:
    """Policies set at one place, the process or the environment: one for all operators, and scoped ones in order."""

    general: Policy = _NOTHING_SET
    scoped: tuple[Scoped, ...] = ()

    def with_set(self, wanted: Scoped) -> Layer:
        """The layer when one more policy has been set in it."""
        if wanted.operator is None:
            return replace(self, general=wanted.policy.over(self.general))
        kept = []
        for earlier in self.scoped:
            rest = _without(earlier.policy, wanted.policy) if earlier.operator == wanted.operator else earlier.policy
            if rest != _NOTHING_SET:  # else overruled for good: a program may set policies for ever
                kept.append(replace(earlier, policy=rest))
        return replace(self, scoped=(*kept, wanted))

    def policy_for(self, names: Sequence[str]) -> Policy:
        """What is set for an operator with these names."""
        found = _NOTHING_SET
        for scoped in reversed(self.scoped):
            if scoped.matches(names):
                found = found.over(scoped.policy)
        return found.over(self.general)


def _without(policy: Policy, overruling: Policy) -> Policy:
    kept = {name: getattr(policy, name) for name in (*CLASSES, "default") if not getattr(overruling, name)}
    return Policy(**kept)


def parse_environment(text: str) -> Layer:
    """Read the value of `LLM_OP_GUARD`: `A=raise B=warn,sync default=record`, or `off` for everything.

    `PATTERN:A=warn` sets a class for the operators whose name or site matches.
    """
    text = text.strip()
    if text.lower() == "off":
        return _ALL_OFF
    settings: dict[str | None, dict[str, object]] = {}
    for part in text.split():
        target, equals, value = part.partition("=")
        pattern, colon, name = target.rpartition(":")
        group = settings.setdefault(pattern if colon else None, {})
        if not equals or name in group:
            raise PolicyError(
                f"{ENVIRONMENT_VARIABLE}={text!r} cannot be understood at {part!r}; "
                f"write it as 'A=raise B=warn,sync', with 'OPERATOR:A=warn' for some operators, or 'off'"
            )
        group[name] = value
    layer = Layer()
    try:
        for operator, group in settings.items():
            layer = layer.with_set(Scoped.of(operator, group))
    except PolicyError as error:
        raise PolicyError(f"{ENVIRONMENT_VARIABLE}: {error}") from None
    return layer


_ALL_OFF = Layer(OFF)


class _State:
    """The policy of the process, and the policies that `with` blocks have in force somewhere."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.environment: Layer | None = None
        self.process = Layer()
        self.entered: list[tuple[Scoped, ...]] = []
        self.changed: list[Callable[[], None]] = []
        self.disabled = False

    def base(self, names: Sequence[str] = ()) -> Policy:
        environment = self.environment
        if environment is None:
            environment = self.environment = parse_environment(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        return self.process.policy_for(names).over(environment.policy_for(names))

    def forced_off(self) -> bool:
        """`off` in the environment is the last word of whoever runs the program: no code switches guards on again."""
        self.base()
        return self.disabled or self.environment == _ALL_OFF

    def in_a_fork(self) -> None:
        # A thread that is not in the child may have held it.
        self.lock = threading.RLock()


_state = _State()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_state.in_a_fork)
# Innermost first.
_local: contextvars.ContextVar[tuple[Scoped, ...]] = contextvars.ContextVar("llm_op_guard_policy", default=())


def current(defaults: Policy, names: Sequence[str] = ()) -> Policy:
    """What is in force here and now, for a guard with these defaults; `names` are its operator and its site."""
    if _state.forced_off():
        return OFF
    return _blocks(_local.get(), names).over(_state.base(names)).over_defaults(defaults)


def anywhere(defaults: Policy, names: Sequence[str] = ()) -> list[Policy]:
    """What is in force in the process, and in each `with` block that is open now, in any thread."""
    with _state.lock:
        if _state.forced_off():
            return [OFF]
        base = _state.base(names)
        return [_blocks(entered, names).over(base).over_defaults(defaults) for entered in ((), *_state.entered)]


def switched_on(policies: Sequence[Policy]) -> frozenset[str]:
    """The classes that are on in any of several policies."""
    return frozenset(name for name in CLASSES if any(p.action(name) is not Action.OFF for p in policies))


def _blocks(entered: Sequence[Scoped], names: Sequence[str]) -> Policy:
    found = _NOTHING_SET
    for scoped in entered:
        if scoped.matches(names):
            found = found.over(scoped.policy)
    return found


def on_change(callback: Callable[[], None]) -> None:
    """Call `callback` whenever `anywhere` may have changed."""
    _state.changed.append(callback)


def set_policy(*, operator: str | None = None, **settings: object) -> None:
    """Set the policy of the process: `set_policy(A="raise", B="warn,sync")`.

    With `operator`, for the operators whose name or site matches, as the shell matches file names:
    `set_policy(A="warn", operator="transformers.models.llama.*")`. That beats a setting for all operators; of several
    that match, the last one set wins. `default="record"` (or `"warn"`) is for rules that nobody set anything for:
    those that would raise are recorded.

    Merges with what is set; acts on guards already in place. Raises PolicyError for an unknown class or setting.
    """
    wanted = Scoped.of(operator, settings)
    with _state.lock:
        _state.base()  # a bad environment variable is reported here rather than in a guarded call
        _state.process = _state.process.with_set(wanted)
    _announce()


def policy(*, operator: str | None = None, **settings: object) -> contextlib.AbstractContextManager[None]:
    """A `with` block with another policy, for this thread or asyncio task; merges with what is set.

    Takes what `set_policy` takes; the innermost block wins over what was set outside it, for an operator or for all.
    Raises PolicyError for an unknown class or setting, where it is called.
    """
    wanted = Scoped.of(operator, settings)
    _state.base()
    return _entered(wanted)


@contextlib.contextmanager
def _entered(wanted: Scoped) -> Iterator[None]:
    merged = (wanted, *_local.get())
    with _state.lock:
        _state.entered.append(merged)
    token = _local.set(merged)
    try:
        _announce()
        yield
    finally:
        _local.reset(token)
        with _state.lock:
            # By identity: another thread may have an equal policy in force.
            _state.entered[:] = [p for p in _state.entered if p is not merged]
        _announce()


@contextlib.contextmanager
def policy_of_all_threads(*, A: str, B: str) -> Iterator[None]:
    """A `with` block with another policy of the process; afterwards it is what it was before."""
    before = _state.process
    set_policy(A=A, B=B)
    try:
        yield
    finally:
        with _state.lock:
            _state.process = before
        _announce()


def disable() -> None:
    """Switch every guard of the process off, at once and from any thread: each function has its own code again.

    Whatever policies say, here and in other threads, nothing is checked until `enable`. Calls in flight go through.
    """
    _switch(disabled=True)


def enable() -> None:
    """Take `disable` back: the policies hold again, those too that were set meanwhile."""
    _switch(disabled=False)


def _switch(*, disabled: bool) -> None:
    _state.disabled = disabled  # without the lock: one assignment, and a kill switch waits for nobody
    _announce()


def is_off() -> bool:
    """Whether `disable` was called, or `LLM_OP_GUARD=off` is set: nothing is to be judged in this process."""
    return _state.forced_off()


def is_disabled() -> bool:
    """Whether `disable` was called and `enable` was not."""
    return _state.disabled


def reset() -> None:
    """Forget what was set and read the environment again; for tests."""
    with _state.lock:
        _state.environment = None
        _state.process = Layer()
        _state.disabled = False
    _announce()


def _announce() -> None:
    for callback in list(_state.changed):
        callback()


# ---------------------------------------------------------------- the rest of the environment


def from_environment() -> Layer:
    """What `LLM_OP_GUARD` says; raises PolicyError where it cannot be understood."""
    _state.base()
    return _state.environment or Layer()


def record_file() -> str | None:
    """The file that `LLM_OP_GUARD_RECORD` names, if it names one."""
    return os.environ.get(RECORD_VARIABLE, "").strip() or None


def tracks() -> bool:
    """Whether `LLM_OP_GUARD_TRACK` is `1`; raises PolicyError where it is neither that nor `0`."""
    return _flag(TRACK_VARIABLE, "1 to track tensors, 0 not to") == "1"


def native_wanted() -> bool:
    """Whether checks may be native: not where `LLM_OP_GUARD_NATIVE` is `0`; raises PolicyError as `tracks` does."""
    return _flag(NATIVE_VARIABLE, "0 to check in Python alone, 1 for native checks where they can be had") != "0"


def _flag(variable: str, choice: str) -> str:
    if (value := os.environ.get(variable, "").strip()) not in ("", "0", "1"):
        raise PolicyError(f"{variable}={value!r} cannot be understood; write {choice}")
    return value


def libraries_to_install() -> tuple[str, ...]:
    """The libraries that `LLM_OP_GUARD_INSTALL` names: `transformers`, separated by commas or spaces."""
    return tuple(os.environ.get(INSTALL_VARIABLE, "").replace(",", " ").split())


def set_for_children(startup: _Path, libraries: Sequence[str], record: _Path | None, default: Action | None) -> None:
    """Have the Python processes that this one starts guard these libraries, record to that file, and so on.

    `startup` is the folder of a `sitecustomize`, which Python runs when it starts.
    """
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(startup)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(startup), *rest])
    os.environ[INSTALL_VARIABLE] = ",".join(libraries)
    if record is not None:
        os.environ[RECORD_VARIABLE] = str(record)
    if default is not None:
        os.environ[ENVIRONMENT_VARIABLE] = f"{os.environ.get(ENVIRONMENT_VARIABLE, '')} default={default}".strip()


@contextlib.contextmanager
def guarding_children(startup: _Path, libraries: Sequence[str], record: _Path, settings: str) -> Iterator[None]:
    """A `with` block in which that holds of the processes that are started; `settings` is their `LLM_OP_GUARD`.

    Where the environment has one already, it stays.
    """
    names = ("PYTHONPATH", INSTALL_VARIABLE, RECORD_VARIABLE, ENVIRONMENT_VARIABLE)
    before = {name: os.environ.get(name) for name in names}
    set_for_children(startup, libraries, record, None)
    os.environ.setdefault(ENVIRONMENT_VARIABLE, settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
