"""What runs and what a violation does. The only reader of the environment.

A policy gives each cost class a setting: an action (`raise`, `warn`, `record`, `off`), a time (`sync`), or both; a
time alone means raise. Classes that it leaves open keep what was set before: by `set_policy`, by `LLM_OP_GUARD`, or by
the guard's own defaults.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from llm_op_guard.errors import PolicyError

ENVIRONMENT_VARIABLE = "LLM_OP_GUARD"
CLASSES = ("A", "B")


class Action(StrEnum):
    """What a violation of a certain rule does; a suspect rule warns where this says raise."""

    RAISE = "raise"
    WARN = "warn"
    RECORD = "record"
    OFF = "off"


class Time(StrEnum):
    """When a rule is judged."""

    SYNC = "sync"


@dataclass(frozen=True)
class Setting:
    """What happens with the rules of one class."""

    action: Action
    time: Time = Time.SYNC

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read `"raise"`, `"sync"`, `"warn,sync"`; raises PolicyError for anything else."""
        if isinstance(text, cls):
            return text
        if not isinstance(text, str) or not text.strip():
            raise PolicyError(f"a policy setting is a text such as 'warn' or 'raise,sync', not {text!r}")
        action: Action | None = None
        time: Time | None = None
        for word in (part.strip().lower() for part in text.split(",")):
            if word in list(Action) and action is None:
                action = Action(word)
            elif word in list(Time) and time is None:
                time = Time(word)
            else:
                known = ", ".join([*Action, *Time])
                raise PolicyError(f"unknown or repeated {word!r} in the policy setting {text!r}; known: {known}")
        return cls(action or Action.RAISE, time or Time.SYNC)

    def __str__(self) -> str:
        return f"{self.action},{self.time}"


@dataclass(frozen=True)
class Policy:
    """The settings of the classes; None leaves a class as it was set before."""

    A: Setting | None = None
    B: Setting | None = None

    @classmethod
    def of(cls, **settings: object) -> Self:
        """Read keyword settings, `A="raise", B="warn,sync"`; raises PolicyError for an unknown class."""
        for name in settings:
            if name not in CLASSES:
                raise PolicyError(f"unknown cost class {name!r}; known: {', '.join(CLASSES)}")
        return cls(**{name: Setting.parse(text) for name, text in settings.items() if text is not None})

    def over(self, other: Policy) -> Policy:
        """The settings of this policy, and what `other` says of the classes that this one leaves open."""
        return Policy(self.A or other.A, self.B or other.B)

    def action(self, cost_class: str) -> Action:
        """What a violation in a class does; a class that nobody set is off."""
        setting: Setting | None = getattr(self, cost_class)
        return setting.action if setting is not None else Action.OFF


OFF = Policy(Setting(Action.OFF), Setting(Action.OFF))


def parse_environment(text: str) -> Policy:
    """Read the value of `LLM_OP_GUARD`: `A=raise B=warn,sync`, or `off` for everything."""
    text = text.strip()
    if text.lower() == "off":
        return OFF
    settings: dict[str, object] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or name in settings:
            raise PolicyError(
                f"{ENVIRONMENT_VARIABLE}={text!r} cannot be understood at {part!r}; "
                f"write it as 'A=raise B=warn,sync', or 'off'"
            )
        settings[name] = value
    try:
        return Policy.of(**settings)
    except PolicyError as error:
        raise PolicyError(f"{ENVIRONMENT_VARIABLE}: {error}") from None


class _State:
    """The policy of the process, and the policies that `with` blocks have in force somewhere."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.environment: Policy | None = None
        self.process = Policy()
        self.entered: list[Policy] = []
        self.changed: list[Callable[[], None]] = []

    def base(self) -> Policy:
        if self.environment is None:
            self.environment = parse_environment(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        return self.process.over(self.environment)

    def forced_off(self) -> bool:
        """`off` in the environment is the last word of whoever runs the program: no code switches guards on again."""
        self.base()
        return self.environment == OFF


_state = _State()
_NOTHING_SET = Policy()
_local: contextvars.ContextVar[Policy] = contextvars.ContextVar("llm_op_guard_policy", default=_NOTHING_SET)


def current(defaults: Policy) -> Policy:
    """What is in force here and now, for a guard with these defaults."""
    base = _state.base()
    return OFF if _state.forced_off() else _local.get().over(base).over(defaults)


def anywhere(defaults: Policy) -> frozenset[str]:
    """The classes that are on in the process or in any `with` block that is open now, in any thread."""
    with _state.lock:
        if _state.forced_off():
            return frozenset()
        base = _state.base().over(defaults)
        return frozenset(
            name
            for entered in (Policy(), *_state.entered)
            for name in CLASSES
            if entered.over(base).action(name) is not Action.OFF
        )


def on_change(callback: Callable[[], None]) -> None:
    """Call `callback` whenever `anywhere` may have changed."""
    _state.changed.append(callback)


def set_policy(**settings: object) -> None:
    """Set the policy of the process: `set_policy(A="raise", B="warn,sync")`.

    Merges with what is set; acts on guards already in place. Raises PolicyError for an unknown class or setting.
    """
    wanted = Policy.of(**settings)
    with _state.lock:
        _state.base()  # a bad environment variable is reported here rather than in a guarded call
        _state.process = wanted.over(_state.process)
    _announce()


def policy(**settings: object) -> contextlib.AbstractContextManager[None]:
    """A `with` block with another policy, for this thread or asyncio task; merges with what is set.

    Raises PolicyError for an unknown class or setting, where it is called.
    """
    wanted = Policy.of(**settings)
    _state.base()
    return _entered(wanted)


@contextlib.contextmanager
def _entered(wanted: Policy) -> Iterator[None]:
    merged = wanted.over(_local.get())
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


def reset() -> None:
    """Forget what was set and read the environment again; for tests."""
    with _state.lock:
        _state.environment = None
        _state.process = Policy()
    _announce()


def _announce() -> None:
    for callback in list(_state.changed):
        callback()
