"""What a call comes to without a guard: run in a process of its own, which may die or hang."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import types
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from llm_op_guard.faults.build import Unbuildable
from llm_op_guard.faults.differences import Difference, Part, differences, parts_of, said
from llm_op_guard.faults.operators import Operator
from llm_op_guard.faults.specimen import Unmade
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call
from llm_op_guard.policy import disable

Kind = Literal["clear error", "obscure error", "error", "silent", "harmless", "died", "hung", "not run"]

# A call that takes longer than that hangs; of so many that hang there is more to be learnt than of all others.
SECONDS = 20.0
_MOST_HANGS = 3
_LONGEST_TEXT = 300
# Of a generator so much is asked for.
_MOST_ITEMS = 100
EMPTY = "the result is empty"
# What a process tells first, and once a valid call has run: from then on it is the call made of it that dies or hangs.
_STARTED, _VALID_CALL_RAN = "started", "the valid call ran"
# For a process to start, whatever else the machine does.
_START_SECONDS = 120.0


@frozen
class Outcome:
    """What became of an unguarded call; `text` is the error, or how far off the result is.

    An error is clear or obscure where it is known what it ought to name.
    """

    kind: Kind
    text: str = ""


@frozen
class Trial:
    """A call to try, the valid one that it was made from, if any, and the names of which a clear error has one."""

    call: Call
    origin: Call | None
    names: tuple[str, ...] = ()


def outcomes(operator: Operator, trials: list[Trial], unfit: dict[Call, str] | None = None) -> Iterator[Outcome]:
    """What each of the calls comes to, in order. Raises what goes wrong with the comparison of results.

    `unfit` are valid calls that are known to end their process, or to hang, and why nothing is learnt of calls that
    were made of them; those that turn out to be so are added.
    """
    unfit = {} if unfit is None else unfit
    hangs: Counter[str] = Counter()
    # Loaded here it need not be loaded in each of the processes.
    importlib.import_module("torch._dynamo")
    done = 0
    while done < len(trials):
        origin = trials[done].origin
        if origin is not None and origin in unfit:
            found = iter([Outcome("not run", unfit[origin])])
        else:
            found = _in_a_process(operator, trials[done:], unfit, hangs)
        for outcome in found:
            yield outcome
            done += 1


def _in_a_process(
    operator: Operator, trials: list[Trial], unfit: dict[Call, str], hangs: Counter[str]
) -> Iterator[Outcome]:
    """What the calls come to until one of them is lost with its process, or nothing is to be learnt of the next one."""
    pending = list(itertools.takewhile(lambda trial: trial.origin is None or trial.origin not in unfit, trials))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(operator, pending, there), daemon=True)
    child.start()
    there.close()
    try:
        if _received(here, _START_SECONDS) != _STARTED:
            raise RuntimeError("the process that tries calls has not started")
        for trial in pending:
            seconds = SECONDS if hangs["made"] < _MOST_HANGS else SECONDS / 10
            found, valid_call = _received(here, seconds), trial.origin
            if found == _VALID_CALL_RAN:
                found, valid_call = _received(here, seconds), None
            if isinstance(found, Exception):
                raise found  # a fault of ours: it is none of the operator's
            if isinstance(found, Outcome):
                yield found
                continue
            if found is None:
                lost = Outcome("hung", f"no result after {seconds:g} s")
            else:
                child.join(1)
                lost = Outcome("died", f"the process ended with {child.exitcode}")
            hangs["made" if valid_call is None else "valid"] += lost.kind == "hung"
            if valid_call is None:
                yield lost
            else:
                _note(unfit, valid_call, lost)
                if hangs["valid"] == _MOST_HANGS:
                    why = f"not tried here: {_MOST_HANGS} valid calls before it hung"
                    unfit |= {one.origin: why for one in trials if one.origin is not None and one.origin not in unfit}
            return
    finally:
        child.kill()
        child.join()
        here.close()


def _note(unfit: dict[Call, str], valid_call: Call, lost: Outcome) -> None:
    unfit[valid_call] = f"the valid call {'hangs' if lost.kind == 'hung' else 'fails'} here: {lost.text}"


def _received(here: Connection, seconds: float) -> Any:
    """What a process tells; None where it takes longer, EOFError where it has ended."""
    try:
        return here.recv() if here.poll(seconds) else None
    except EOFError:
        return EOFError


def alone(operator: Operator, call: Call) -> Outcome:
    """What one call comes to, with nothing to compare its result with."""
    return next(iter(outcomes(operator, [Trial(call, None)])))


# ---------------------------------------------------------------- in the process


@frozen
class _Ran:
    """What a call that ran left: its result and, before and after it, each of its arguments, in parts."""

    result: list[Part]
    before: dict[str, list[Part]]
    after: dict[str, list[Part]]

    def changed(self) -> set[str]:
        """The arguments that are otherwise after the call."""
        return {name for name, parts in self.before.items() if differences(parts, self.after[name])}

    @property
    def is_empty(self) -> bool:
        """Whether there are tensors in the result, and none has elements."""
        sizes = [part.value.numel() for part in self.result if part.kind == "Tensor" and part.value is not None]
        return bool(sizes) and not any(sizes)


def _run(operator: Operator, trials: list[Trial], results: Connection) -> None:
    import torch  # noqa: PLC0415

    # Ctrl-C is for the process that waits for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # what is compiled differs for each call, and takes long
    warnings.simplefilter("ignore")
    disable()  # what was guarded already is to be seen without its guard
    with _silence():
        _try(operator, trials, results)
    results.close()


def _try(operator: Operator, trials: list[Trial], results: Connection) -> None:
    results.send(_STARTED)
    origins: dict[Call, tuple[Any, Any]] = {}
    needed = Counter(trial.origin for trial in trials)
    for trial in trials:
        origin = trial.origin
        if origin is not None and origin not in origins:
            # Twice, to see in what it differs from itself.
            origins[origin] = _ran(operator, origin), _ran(operator, origin)
        if origin is not None:
            results.send(_VALID_CALL_RAN)
        found = None if origin == trial.call else _ran(operator, trial.call, origin)
        try:
            outcome = _by_itself(found) if origin is None else _compared(*origins[origin], found, trial.names)
        except Exception as error:
            # As text: not every error survives being sent.
            results.send(RuntimeError(f"comparing the results of {trial.call}: {type(error).__name__}: {error}"))
            break
        results.send(outcome)
        needed[origin] -= 1
        if origin is not None and not needed[origin]:
            del origins[origin]


@contextmanager
def _silence() -> Iterator[None]:
    """What an operator prints is none of our results."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield


def _ran(operator: Operator, call: Call, origin: Call | None = None) -> _Ran | BaseException:
    """What a call comes to, or what it raises."""
    import torch  # noqa: PLC0415

    try:
        arguments = operator.arguments(call, origin)
        before = {name: parts_of(value) for name, value in arguments.items()}
        _seed(call.seed)
        with torch.no_grad():
            result = _driven(operator(arguments))
    except BaseException as error:  # SystemExit is the operator's, too
        return error
    return _Ran(parts_of(result), before, {name: parts_of(value) for name, value in arguments.items()})


def _seed(seed: int) -> None:
    import torch  # noqa: PLC0415

    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _driven(result: Any) -> Any:
    """What a coroutine comes to, and what a generator gives: neither has done anything yet."""
    if isinstance(result, types.CoroutineType):
        return asyncio.run(result)
    if isinstance(result, types.AsyncGeneratorType):
        return asyncio.run(_items(result))
    if isinstance(result, types.GeneratorType | map | filter | zip):
        return list(itertools.islice(result, _MOST_ITEMS))
    return result


async def _items(generator: AsyncIterator[Any]) -> list[Any]:
    found: list[Any] = []
    async for item in generator:
        found.append(item)
        if len(found) == _MOST_ITEMS:
            break
    return found


def _by_itself(found: Any) -> Outcome:
    if not isinstance(found, _Ran):
        return _failed(found, None)
    shapes = [str(list(part.value.shape)) for part in found.result if hasattr(part.value, "shape")]
    return Outcome("silent", f"it returns {' and '.join(shapes) or 'a value'}")


def _failed(error: BaseException, names: tuple[str, ...] | None) -> Outcome:
    if isinstance(error, Unmade | Unbuildable):
        return Outcome("not run", str(error))
    if not isinstance(error, Exception):  # nobody catches it: it ends the process
        return Outcome("died", _told(error))
    if names is None:
        return Outcome("error", _told(error))
    is_clear = any(re.search(rf"\b{re.escape(name)}\b", str(error)) for name in names)
    return Outcome("clear error" if is_clear else "obscure error", _told(error))


def _compared(right: Any, again: Any, found: Any, names: tuple[str, ...]) -> Outcome:
    """How a call differs from the valid one, which ran twice; `found` is None where it is that itself."""
    for one in (right, again):
        if not isinstance(one, _Ran):
            return Outcome("not run", f"the valid call fails here: {_told(one)}")
    steady = _difference(right, again)
    if found is None:
        return _outcome(right, steady)
    if not isinstance(found, _Ran):
        return _failed(found, names)
    loose = {(name, difference.place) for name, difference in steady}
    if any(difference.what == "form" for _, difference in steady):
        told = []  # it returns something else each time
    else:
        told = [
            (name, difference)
            for name, difference in _difference(right, found)
            if difference.what == "form" or (name, difference.place) not in loose
        ]
    if steady and not told:
        return Outcome("not run", f"the valid call differs from itself each time: {_outcome(right, steady).text}")
    return _outcome(right, told)


def _difference(right: _Ran, found: _Ran) -> list[tuple[str, Difference]]:
    """The differences between results (of no name), and between what is left in arguments, by their names."""
    told = [("", difference) for difference in differences(right.result, found.result)]
    touched = right.changed() | found.changed()
    for name in right.after:
        if name in touched and name in found.after:
            told += [(name, difference) for difference in differences(right.after[name], found.after[name])]
    return told


def _outcome(right: _Ran, told: list[tuple[str, Difference]]) -> Outcome:
    if not told:
        return Outcome("harmless", EMPTY if right.is_empty and not right.changed() else "")
    first = told[0][0]
    text = said([difference for name, difference in told if name == first])
    return Outcome("silent", f"leaves {first} changed otherwise: {text}" if first else text)


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
    return f"{type(error).__name__}: {text}"
