"""Random contracts of the language and random calls for them, small enough that rules are kept as often as broken."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from llm_op_guard.guard import memory

PARAMETERS = ("x", "y", "z", "mode", "n", "box")
_SIZES = (0, 1, 2, 3, 4)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def size(draw: st.DrawFn) -> str:
    return draw(
        st.sampled_from(
            ["B", "L", "D", "B", "L", "D", "B", "D", "1", "2", "_", "B | 1", "D | 2 | 1", "2 * D", "D / 2", "B + 1",
             "L - 1", "B + 5", "B * L", "n", "D % 2 + 1", "4 / B", "3 - L", "y.shape[0]", "D / n | 1", "max(B, L)",
             "n + 1 + L", "D / (n + 1)", "B * (L + n)", "L - (B - 1)", "highest(y) + 1", "m", "len(result)",
             "box.l[n]", "x.shape[n - 1]"]
        )
    )  # fmt: skip


def tensor(draw: st.DrawFn) -> str:
    dtype = draw(
        st.sampled_from(
            ["T", "T", "U", "floating", "integer", "boolean", "any", "float32", "(int64 | boolean)", "(T | int64)",
             "half", "y.dtype"]
        )
    )  # fmt: skip
    dims = [size(draw) for _ in range(draw(st.integers(0, 3)))]
    if draw(st.integers(0, 3)) == 0:
        dims.insert(draw(st.integers(0, len(dims))), draw(st.sampled_from(["...", "*lead", "*lead", "*y.shape"])))
    text = dtype
    if dims or draw(st.booleans()):
        text += f"[{', '.join(dims) or '()'}]"
    if draw(st.booleans()):
        text += draw(st.sampled_from([" @ dev", " @ dev", " @ cpu", " @ any", " @ (dev | cpu)", " @ y.device"]))
    return text


def declared(draw: st.DrawFn) -> str:
    kind = draw(st.integers(0, 9))
    if kind <= 4:
        return tensor(draw)
    if kind == 5:
        return f"{tensor(draw)} | {tensor(draw)}"
    if kind == 6:
        return f"optional[{tensor(draw)}]"
    if kind == 7:
        return f"like({draw(st.sampled_from(['x', 'y', 'box.w']))})"
    if kind == 8:
        return draw(st.sampled_from(["None | int | ", "None | T[B, L] | "])) + tensor(draw)
    return f"{draw(st.sampled_from(['', 'None | ']))}({tensor(draw)}, {tensor(draw)})"


def condition(draw: st.DrawFn, depth: int = 0) -> str:
    kind = draw(st.integers(0, 14 if depth < 2 else 11))
    name = draw(
        st.sampled_from(["B", "L", "D", "n", "m", "x.shape[0]", "y.ndim", "x.shape[-1]", "box.k", "mode", "lead"])
    )
    number = draw(st.sampled_from(["0", "1", "2", "3", "D", "L", "n", "B", "m", "D / 2", "6 // B", "2.5"]))
    match kind:
        case 0 | 1 | 2:
            return f"{name} {draw(st.sampled_from(['==', '!=', '<', '<=', '>', '>=']))} {number}"
        case 3:
            return f"{name} % {draw(st.sampled_from(['2', 'n', 'L']))} == 0"
        case 4:
            return draw(
                st.sampled_from(
                    ["T in floating", "T == float32", "T in (half, float32)", "x.dtype in (int64, float32)", "U != T"]
                )
            )
        case 5:
            if draw(st.integers(0, 2)) == 0:
                return draw(
                    st.sampled_from(
                        ["dev == cpu", "x.device in (cpu, meta)", "meta != y.device", "box.w.device not in (cpu,)",
                         "mode == cpu", "dev in [meta, cuda]", "m == meta", "(x.device if n else dev) != cpu",
                         "z[n].device == cpu", "get(z.device, dev) == meta", "all(t.device != meta for t in z)"]
                    )
                )  # fmt: skip
            return draw(st.sampled_from(["x is None", "y is not None", "has(box.w)", "has(z)", "box.w is None"]))
        case 6:
            return draw(
                st.sampled_from(
                    [
                        "get(box.k, 2) > 1",
                        "get(box.q.r, D) == D",
                        "len(x.shape) == 2",
                        "dense(x)",
                        "aligned(x, 16)",
                        "aligned(y, n * 4)",
                        "recall(box, 'size') == D",
                        "recall(box, 'kind') == T",
                    ]
                )
            )
        case 7:
            return draw(st.sampled_from(["broadcasts(z.shape, (B, L))", "broadcasts(x, (*lead, D))", "numel(y) < 9"]))
        case 8:
            return draw(
                st.sampled_from(["mode in (1, 2)", "mode == 'left'", "mode", "1 <= n < D", "not n", "-n < B * 2"])
            )
        case 9:
            return draw(
                st.sampled_from(
                    ["finite(x)", "within(y, 0, D)", "within(x, 0, n, allow=-1)", "finite(box.w)", "only(x, 0, n)",
                     "live_rows(x)", "live_rows(negated(y))", "any_per_row(y)", "all_true(x[..., :1])", "unique(y)",
                     "nondecreasing(x)", "equal(x, y)", "equal(x, y, where=y)", "equal(y, consecutive(y))"]
                )
            )  # fmt: skip
        case 10:
            return draw(
                st.sampled_from(
                    [
                        "highest(y) < L",
                        "D ** 2 < 10",
                        "(D if n else L) == 2",
                        "ceildiv(D, n) == B",
                        "lowest(x) // n > 0",
                        "absmax(x) == -lowest(y)",
                        "first(x) == last(y[:1])",
                        "count(x, 0) < n",
                    ]
                )
            )
        case 11:
            return draw(
                st.sampled_from(
                    ["box.l[n] == D", "x.shape[n] == L", "box.l[-n] < D", "get(box.l[n - 1], D) == D", "has(box.l[m])",
                     "z[mode] is None", "finite(z[n])", "(1, 2, 3)[n] == B", "box.l['a'] == D", "box.l[D / 2] == n",
                     "z[n - 1].shape[0] == B", "finite(z[n - 1][:, 0])", "box.l[D == n] == 1",
                     "x.shape[highest(y)] > 1",
                     "len(box.l[n]) == 1", "box.l[6 // B] in (1, 2)", "has(z[4 / n])", "box.l[x] == 1",
                     "ends_with(mode, 'ft')", "longest_run(mode) < 4", "misspelt(box.l, 'aaaaa', 'a') is None",
                     "equal(y, taken(x, z))", "equal(m, taken(y, x))", "has(m.shape)", "controls(box.k) == n",
                     "all(box.l[i] > 0 for i in box.l)", "any(t > 1 for t in z[n])",
                     "z", "not z", "box.l", "box.l and D > 1", "z == (1, 2)", "n in box.l", "D in z", "max(box.l) > n",
                     "max(z) < n or not z", "(D if z else L) == 2", "box.l == z", "z < box.l"]
                )
            )  # fmt: skip
        case 12:
            joined = f"{condition(draw, depth + 1)} and {condition(draw, depth + 1)}"
            loops = ["all(t > 0 for t in box.l)", "any(t == D for t in box.l)", "sum(t for t in box.l) == D",
                     "all(t.ndim == 2 for t in (x, y))", "all(a == b for a, b in zip(box.l, x.shape))",
                     "all(t < m for i, t in enumerate(box.l) if i > 0)", "any(finite(t) for t in z)",
                     "all(live_rows(t) for t in z)", "not any(highest(t) < n for t in z)"]  # fmt: skip
            return draw(st.sampled_from([joined, joined, *loops]))
        case 13:
            return f"{condition(draw, depth + 1)} or {condition(draw, depth + 1)}"
        case _:
            return f"not ({condition(draw, depth + 1)})"


def statement(draw: st.DrawFn, depth: int = 0) -> list[str]:
    kind = draw(st.integers(0, 9 if depth < 2 else 7))
    suspect = draw(st.sampled_from(["", "", "", "certain=False", "error=KeyError"]))
    match kind:
        case 0 | 1 | 2 | 3:
            path = draw(st.sampled_from(["x", "y", "z", "x", "y", "n", "mode", "box.w", "box.k", "m", "returns"]))
            why = f" = why({suspect})" if suspect else ""
            plain = draw(st.sampled_from(["int", "float", "str", "bool", "None | int", "object"]))
            return [f"{path}: {plain if path in ('n', 'mode', 'box.k') else declared(draw)}{why}"]
        case 4:
            return draw(
                st.sampled_from(
                    ["m = D + 1", "m = box.w", "m = x.device", "m = x.shape[0] / 2", "m, o = x.shape", "m = highest(y)",
                     "m, o = z", "m = len(result)", "m = taken(z, y)", "m = taken(x, y)\nensure(equal(result, m))",
                     "m = recall(box, 'size')", "remember(box, size=D + n, kind=T)", "remember(box, size=highest(y))"]
                )
            ).split("\n")  # fmt: skip
        case 5 if draw(st.integers(0, 3)) == 0:
            return draw(
                st.sampled_from(
                    [["for t in (x, y):", "    require(t.ndim == 2)"], ["for t in (x, z):", "    t: any[B, ...]"],
                     ["for i, t in enumerate(box.l):", "    if i > 0:", "        require(t < D)"],
                     ["for a, b in ((x, y), (y, z)):", "    require(a.dtype == b.dtype)"]]
                )
            )  # fmt: skip
        case 5 | 6 | 7:
            return [f"require({condition(draw)}{', ' + suspect if suspect else ''})"]
        case _:
            lines = [f"if {condition(draw, 1)}:"]
            for _ in range(draw(st.integers(1, 2))):
                lines += [f"    {line}" for line in statement(draw, depth + 1)]
            if draw(st.booleans()):
                lines.append("else:")
                lines += [f"    {line}" for line in statement(draw, depth + 1)]
            return lines


@st.composite
def contract_bodies(draw: st.DrawFn) -> list[list[str]]:
    """The statements of a contract, each a list of lines. Many are refused at load; that is for the test to assume."""
    body = [statement(draw) for _ in range(draw(st.integers(1, 6)))]
    if draw(st.booleans()):  # most random bodies bind nothing: give them something to start from
        body.insert(0, [draw(st.sampled_from(["x: T[B, L, D] @ dev", "x: T[B, D]", "x: T[*lead, D]", "y: any[L, B]"]))])
    return body


def _tensor(rng: random.Random) -> Any:
    shape = [rng.choice(_SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
    made = torch.zeros(shape, dtype=rng.choice(_DTYPES), device=rng.choice(("cpu", "cpu", "cpu", "meta")))
    if made.device.type == "cpu" and made.numel() and rng.random() < 0.3:
        made.view(-1)[rng.randrange(made.numel())] = (
            rng.choice((float("nan"), float("inf"), -1.0, 3.0)) if made.is_floating_point() else rng.choice((-1, 1))
        )
    return made.transpose(0, -1) if made.ndim > 1 and rng.random() < 0.2 else made


def value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.78:
        return _tensor(rng)
    return rng.choice(
        (
            None,
            0,
            1,
            2,
            2.0,
            "left",
            True,
            np.int64(2),
            np.zeros((2, 2)),
            (_tensor(rng), _tensor(rng)),
            (None, 3),
            object(),
            # What looks like a tensor and is none.
            SimpleNamespace(shape=(2, 1), ndim=2, dtype=torch.float32, device=torch.device("cpu")),
        )
    )


def scalar(rng: random.Random) -> Any:
    return rng.choice(
        (0, 1, 2, 2, 3, -1, 1.5, None, "left", True, np.int32(2), np.int8(3), np.float32(1.5), torch.tensor(2))
    )


def items(rng: random.Random) -> Any:
    return rng.choice(([scalar(rng) for _ in range(rng.randrange(4))], (1, 2), None, {"a": 1}, iter([1])))


def remember(arguments: dict[str, Any]) -> None:
    """Let something be known of the box, the same whatever calls were before."""
    memory.remember(arguments["box"], ("size", "kind"), {"size": 2, "kind": torch.float32})


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """One call and its `result`: mostly tensors whose sizes repeat, now and then something quite different."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    arguments = {name: value(rng) for name in ("x", "y", "z")}
    if rng.random() < 0.5 and isinstance(arguments["x"], torch.Tensor):
        arguments["y"] = arguments["x"].clone() if rng.random() < 0.5 else arguments["x"]
    box = SimpleNamespace(
        **{name: make(rng) for name, make in (("w", value), ("k", scalar), ("l", items)) if rng.random() < 0.8}
    )
    result = rng.choice((arguments["x"], arguments["y"], value(rng), value(rng)))
    return {
        **arguments,
        "result": result,
        "mode": scalar(rng),
        "n": scalar(rng),
        "box": rng.choice((box, box, box, None)),
    }
