"""What a call comes to without a guard: run in a process of its own, which may die or hang."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from llm_op_guard.faults.build import Unbuildable
from llm_op_guard.faults.operators import Operator
from llm_op_guard.faults.specimen import Unmade
from llm_op_guard.guard.call import Call
from llm_op_guard.policy import disable

Kind = Literal["clear error", "obscure error", "error", "silent", "harmless", "died", "hung", "not run"]

# A call that takes longer than that hangs.
SECONDS = 20.0
_LONGEST_TEXT = 300
EMPTY = "the result is empty"


@dataclass(frozen=True)
class Outcome:
    """What became of an unguarded call; `text` is the error, or how far off the result is.

    An error is clear or obscure where it is known what it ought to name.
    """

    kind: Kind
    text: str = ""


@dataclass(frozen=True)
class Trial:
    """A call to try, the valid one that it was made from, if any, and the names of which a clear error has one."""

    call: Call
    origin: Call | None
    names: tuple[str, ...] = ()


def outcomes(operator: Operator, trials: list[Trial]) -> Iterator[Outcome]:
    """What each of the calls comes to, in order. Raises what goes wrong with the comparison of results."""
    done = 0
    context = multiprocessing.get_context("fork")
    while done < len(trials):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_run, args=(operator, trials[done:], there), daemon=True)
        child.start()
        there.close()
        try:
            while done < len(trials):
                if not here.poll(SECONDS):
                    yield Outcome("hung", f"no result after {SECONDS:.0f} s")
                    done += 1
                    break
                found = here.recv()
                if isinstance(found, Exception):
                    raise found  # a fault of ours: it is none of the operator's
                yield found
                done += 1
        except EOFError:
            child.join(1)
            yield Outcome("died", f"the process ended with {child.exitcode}")
            done += 1
        finally:
            child.kill()
            child.join()
            here.close()


def alone(operator: Operator, call: Call) -> Outcome:
    """What one call comes to, with nothing to compare its result with."""
    return next(iter(outcomes(operator, [Trial(call, None)])))


def _run(operator: Operator, trials: list[Trial], results: Any) -> None:
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # what is compiled differs for each call, and takes long
    warnings.simplefilter("ignore")
    disable()  # what was guarded already is to be seen without its guard
    origins: dict[Call, Any] = {}
    for trial in trials:
        if trial.origin is not None and trial.origin not in origins:
            origins[trial.origin] = _result(operator, trial.origin)
        found = _result(operator, trial.call, trial.origin)
        try:
            outcome = (
                _by_itself(found) if trial.origin is None else _compared(origins[trial.origin], found, trial.names)
            )
        except Exception as error:
            # As text: not every error survives being sent.
            results.send(RuntimeError(f"comparing the results of {trial.call}: {type(error).__name__}: {error}"))
            break
        results.send(outcome)
    results.close()


def _result(operator: Operator, call: Call, origin: Call | None = None) -> Any:
    import torch  # noqa: PLC0415

    torch.manual_seed(call.seed)
    try:
        with torch.no_grad():
            return [*_leaves(operator(call, origin))]
    except Exception as error:
        return error


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _by_itself(found: Any) -> Outcome:
    if isinstance(found, Unmade | Unbuildable):
        return Outcome("not run", str(found))
    if isinstance(found, Exception):
        return Outcome("error", _told(found))
    shapes = [str(list(value.shape)) for value in found if hasattr(value, "shape")]
    return Outcome("silent", f"it returns {' and '.join(shapes) or 'a value'}")


def _compared(right: Any, found: Any, names: tuple[str, ...]) -> Outcome:
    if isinstance(right, Exception):
        return Outcome("not run", f"the valid call fails here: {_told(right)}")
    if isinstance(found, Unmade | Unbuildable):
        return Outcome("not run", str(found))
    if isinstance(found, Exception):
        is_clear = any(re.search(rf"\b{re.escape(name)}\b", str(found)) for name in names)
        return Outcome("clear error" if is_clear else "obscure error", _told(found))
    return _difference(right, found)


def _difference(right: list[Any], found: list[Any]) -> Outcome:
    import torch  # noqa: PLC0415

    if len(right) != len(found):
        return Outcome("silent", f"{len(found)} results instead of {len(right)}")
    worst = 0.0
    for one, other in zip(right, found, strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(one) is not type(other):
                return Outcome("silent", f"a {type(other).__name__} instead of a {type(one).__name__}")
            continue
        if one.shape != other.shape:
            return Outcome("silent", f"a result of {list(other.shape)} instead of {list(one.shape)}")
        if one.device != other.device:
            return Outcome("silent", f"a result on {other.device} instead of {one.device}")
        if one.dtype != other.dtype:
            return Outcome("silent", f"a result in {other.dtype} instead of {one.dtype}")
        if one.device.type == "meta" or not one.numel():
            continue
        a, b = (
            one.to(torch.complex128 if one.is_complex() else torch.float64),
            other.to(torch.complex128 if one.is_complex() else torch.float64),
        )
        if bool((torch.isnan(b.abs()) & ~torch.isnan(a.abs())).any()):
            return Outcome("silent", "NaN in the result")
        apart = (a - b).abs().masked_fill(a == b, 0.0)  # equal infinities are not
        worst = max(worst, float(apart.masked_fill(torch.isnan(apart), 0.0).max()))
    if worst:
        return Outcome("silent", f"off by {worst:.2g}")
    sizes = [value.numel() for value in right if isinstance(value, torch.Tensor)]
    return Outcome("harmless", EMPTY if sizes and not any(sizes) else "")


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
    return f"{type(error).__name__}: {text}"
