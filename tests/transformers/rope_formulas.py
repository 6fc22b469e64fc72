"""What the families of rotary embeddings compute, written element by element in float64, with samples of calls.

Run as a program it holds every function of the installed Transformers to the formula of its family, and prints a line
of JSON for each. It is one of its own since it loads all modeling files, and guards would then be put into all of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import Fingerprint, fingerprint
from llm_op_guard.integrations.transformers import rope

B, H, G, L, D = 2, 4, 2, 3, 8
Arguments = dict[str, Any]
Pairs = Callable[[int], list[tuple[int, int]]]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- formulas


def halves(width: int) -> list[tuple[int, int]]:
    return [(i, i + width // 2) for i in range(width // 2)]


def neighbours(width: int) -> list[tuple[int, int]]:
    return [(2 * i, 2 * i + 1) for i in range(width // 2)]


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: Pairs, *, once: bool = False, to: Pairs | None = None
) -> torch.Tensor:
    """x with each of its pairs of columns turned.

    The table has a value for each column, or, `once`, for each pair in its first columns. `to` says where a pair goes.
    """
    x, cos, sin = x.double(), cos.double(), sin.double()
    width = x.shape[-1]
    turned = torch.empty(torch.broadcast_shapes(x.shape, (*cos.shape[:-1], width)), dtype=torch.float64)
    for pair, ((i, j), (at_i, at_j)) in enumerate(zip(pairs(width), (to or pairs)(width), strict=True)):
        a, b = (pair, pair) if once else (i, j)
        turned[..., at_i] = x[..., i] * cos[..., a] - x[..., j] * sin[..., a]
        turned[..., at_j] = x[..., j] * cos[..., b] + x[..., i] * sin[..., b]
    return turned


def first(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: Pairs, *, once: bool = False) -> torch.Tensor:
    """As many columns turned as the table has, and the others as they are."""
    width = cos.shape[-1]
    return torch.cat([rotated(x[..., :width], cos, sin, pairs, once=once), x[..., width:].double()], -1)


def last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The last columns turned, twice as many as the table has."""
    start = x.shape[-1] - 2 * cos.shape[-1]
    return torch.cat([x[..., :start].double(), rotated(x[..., start:], cos, sin, neighbours, once=True)], -1)


Sample = tuple[Arguments, Any]
Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def both(width: int, turn: Turn, *, layouts: tuple[int, ...] = (1, 2)) -> Iterator[Sample]:
    """q and k, heads before tokens and after them, with one table and with one for each sequence."""
    q, k = numbers(B, H, L, D), numbers(B, G, L, D, seed=1)
    for tables in (1, B):
        cos, sin = numbers(tables, L, width, seed=2), numbers(tables, L, width, seed=3)
        turned = tuple(turn(x, cos[:, None], sin[:, None]) for x in (q, k))
        if 1 in layouts:
            yield {"q": q, "k": k, "cos": cos, "sin": sin}, turned
        if 2 in layouts:
            swapped = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "cos": cos, "sin": sin, "unsqueeze_dim": 2}
            yield swapped, tuple(x.transpose(1, 2) for x in turned)


def one(width: int, turn: Turn, sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Arguments]) -> Any:
    """One tensor, tokens before heads."""
    x, cos, sin = numbers(B, L, H, D), numbers(1, L, width, seed=2), numbers(1, L, width, seed=3)
    yield sample(x, cos, sin), turn(x, cos[:, :, None], sin[:, :, None])


def without_keys(samples: Iterator[Sample], alone: Callable[[torch.Tensor], Any]) -> Iterator[Sample]:
    """The samples, and each of them once more with no keys."""
    for arguments, (q, k) in samples:
        yield arguments, (q, k)
        yield {**arguments, "k": None}, alone(q)


def parts(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The two halves of the columns, each turned by itself."""
    return torch.cat([rotated(*(t[..., at : at + D // 2] for t in (x, cos, sin)), halves) for at in (0, D // 2)], -1)


def complex_table(*shape: int) -> torch.Tensor:
    return torch.complex(numbers(*shape, seed=2), numbers(*shape, seed=3))


def complex_numbers(axis: int, names: tuple[str, str, str]) -> Iterator[Sample]:
    """Pairs of neighbours times complex numbers; `axis` is that of the heads."""
    q, k, table = numbers(B, H, L, D), numbers(B, G, L, D, seed=1), complex_table(1, L, D // 2)
    turned = [rotated(x, table.real[:, None], table.imag[:, None], neighbours, once=True) for x in (q, k)]
    if axis == 2:
        q, k, *turned = (x.transpose(1, 2) for x in (q, k, *turned))
    yield dict(zip(names, (q, k, table), strict=True)), tuple(turned)


def last_queries() -> Iterator[Sample]:
    for queries in (1, 2, L):
        q, k = numbers(B, H, queries, D), numbers(B, G, L, D, seed=1)
        cos, sin = numbers(1, L, D, seed=2), numbers(1, L, D, seed=3)
        late = cos[:, None, L - queries :], sin[:, None, L - queries :]
        turned = rotated(q, *late, halves), rotated(k, cos[:, None], sin[:, None], halves)
        yield {"q": q, "k": k, "cos": cos, "sin": sin}, turned


def at_positions(names: tuple[str, ...]) -> Iterator[Sample]:
    states = {name: numbers(B, H, L, D, seed=seed) for seed, name in enumerate(names)}
    cos, sin, places = numbers(5, D, seed=3), numbers(5, D, seed=4), torch.tensor([[4, 0, 2]])
    turned = tuple(rotated(x, cos[places][:, None], sin[places][:, None], halves) for x in states.values())
    yield {**states, "cos": cos, "sin": sin, "position_ids": places}, turned


def three_tables(width: int, turn: Turn) -> Iterator[Sample]:
    """One table for time, one for height, one for width; each half of the columns takes a section of each."""
    q, k, sections = numbers(B, H, L, D), numbers(B, G, L, D, seed=1), [1, 1, width // 2 - 2]
    of_column = [i % 3 for i, size in enumerate(2 * sections) for _ in range(size)]
    for tables in (1, B):
        cos, sin = numbers(3, tables, L, width, seed=2), numbers(3, tables, L, width, seed=3)
        mixed = [torch.stack([t[of, ..., at] for at, of in enumerate(of_column)], -1)[:, None] for t in (cos, sin)]
        turned = tuple(turn(x, *mixed) for x in (q, k))
        yield {"q": q, "k": k, "cos": cos, "sin": sin, "mrope_section": sections}, turned


def cut_table() -> Iterator[Sample]:
    x, cos, sin = numbers(B, H, L, D), numbers(1, 1, L + 2, D, seed=2), numbers(1, 1, L + 2, D, seed=3)
    yield {"x": x, "cos": cos, "sin": sin}, rotated(x, cos[:, :, :L], sin[:, :, :L], halves)


def angles_of_patches() -> Iterator[Sample]:
    tensor, freqs = numbers(1, L, H, D), numbers(L, D // 2, seed=2)
    yield (
        {"tensor": tensor, "freqs": freqs},
        rotated(tensor, freqs.cos()[:, None], freqs.sin()[:, None], halves, once=True),
    )


def by_time() -> Iterator[Sample]:
    x, cos, sin = numbers(B, L, D), numbers(B, L, 4, seed=1), numbers(B, L, 4, seed=2)
    yield {"hidden_states": x, "cos": cos, "sin": sin}, first(x, cos, sin, neighbours)


def sines_first() -> Iterator[Sample]:
    q, k, v = (numbers(B, H, L, D, seed=seed) for seed in range(3))
    table = numbers(1, 1, L, D, seed=3)
    sin, cos = table[..., : D // 2], table[..., D // 2 :]
    turned = tuple(rotated(x, cos, sin, neighbours, once=True) for x in (q, k, v))
    arguments = {"sinusoidal_pos": table, "query_layer": q, "key_layer": k}
    yield arguments, turned[:2]
    yield {**arguments, "value_layer": v}, turned


def heads_in_columns() -> Iterator[Sample]:
    x, table = numbers(B, L, H * D), numbers(2, L + 1, 1, 1, D, seed=1)
    heads = rotated(x.view(B, L, H, D), *(t[None, :L, 0] for t in table), halves)
    of = SimpleNamespace(num_heads=H, head_size=D)
    yield {"self": of, "hidden_states": x, "relative_position_embeddings": table}, heads.view(B, L, H * D)


def patches_only() -> Iterator[Sample]:
    for prefix in (0, 2):
        q, k = numbers(B, H, prefix + L, D), numbers(B, G, prefix + L, D, seed=1)
        cos, sin = numbers(L, D, seed=2), numbers(L, D, seed=3)
        turned = tuple(
            torch.cat([x[:, :, :prefix].double(), rotated(x[:, :, prefix:], cos, sin, halves)], 2) for x in (q, k)
        )
        yield {"q": q, "k": k, "cos": cos, "sin": sin}, turned


def patches(turn: Turn, width: int = D) -> Iterator[Sample]:
    """[patches, heads, width]; also of several pictures, with one table and with one for each."""
    for leading, tables in (((), ()), ((B,), ()), ((B,), (1,)), ((B,), (B,))):
        q, k = numbers(*leading, L, H, D), numbers(*leading, L, G, D, seed=1)
        cos, sin = numbers(*tables, L, width, seed=2), numbers(*tables, L, width, seed=3)
        if leading and width != D:  # minimax_m3_vl takes patches in one row only
            continue
        turned = tuple(turn(x, cos.unsqueeze(-2), sin.unsqueeze(-2)) for x in (q, k))
        yield {"q": q, "k": k, "cos": cos, "sin": sin}, turned


def complex_patches() -> Iterator[Sample]:
    q, k, table = numbers(B, L, H, D), numbers(B, L, G, D, seed=1), complex_table(L, 1, D // 2)
    turned = tuple(rotated(x, table.real, table.imag, neighbours, once=True) for x in (q, k))
    yield {"query": q, "key": k, "freqs_ci": table}, turned


def pictures() -> Iterator[Sample]:
    q, k = numbers(B, H, L, D), numbers(B, H, L, D, seed=1)
    for leading in ((), (1,), (H,), (1, 1), (B, 1)):
        cos, sin = numbers(*leading, L, D, seed=2), numbers(*leading, L, D, seed=3)
        yield {"q": q, "k": k, "cos": cos, "sin": sin}, tuple(rotated(x, cos, sin, neighbours) for x in (q, k))


def pictures_and_memory() -> Iterator[Sample]:
    for frames, others in ((1, 0), (3, 0), (2, 2), (0, 2)):
        q, k = numbers(B, H, L, D), numbers(B, H, frames * L + others, D, seed=1)
        cos, sin = numbers(1, L, D, seed=2), numbers(1, L, D, seed=3)
        placed = rotated(k[:, :, : frames * L], cos.repeat(1, frames, 1), sin.repeat(1, frames, 1), neighbours)
        turned = rotated(q, cos, sin, neighbours), torch.cat([placed, k[:, :, frames * L :].double()], 2)
        arguments = {"q": q, "k": k, "cos": cos, "sin": sin, "num_k_exclude_rope": others}
        yield {**arguments, "repeat_freqs_k": True}, turned
        if frames in (0, 1):
            yield arguments, turned


def tables_of_their_own() -> Iterator[Sample]:
    q, k = numbers(B, H, L, D), numbers(B, H, 2 * (1 + 2) + 1, D, seed=1)  # twice: one without a place, two with; one
    cos, sin, cos_k, sin_k = (numbers(1, n, D, seed=seed) for seed, n in enumerate((L, L, 2, 2), start=2))
    turned = k.double()
    for start in (1, 4):
        turned[:, :, start : start + 2] = rotated(k[:, :, start : start + 2], cos_k, sin_k, neighbours)
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin, "cos_k": cos_k, "sin_k": sin_k}
    yield {**arguments, "num_k_exclude_rope": 1, "repeat_freqs_k": 2}, (rotated(q, cos, sin, neighbours), turned)


def three_directions() -> Iterator[Sample]:
    # Of 13 columns three times four are turned. The table repeats its first half, whatever columns are paired.
    x, places = numbers(B, H, L, 13), tuple(torch.tensor(p) for p in ([0, 1, 2], [3, 0, 1], [2, 2, 5]))
    turned = x.double()
    for part, place in enumerate(places):
        omega = 1 / 10000 ** (torch.arange(2, dtype=torch.float64) / 2)
        angle = (place[:, None] * omega).repeat(1, 2)
        columns = slice(4 * part, 4 * part + 4)
        turned[..., columns] = rotated(x[..., columns], angle.cos(), angle.sin(), neighbours)
    of = SimpleNamespace(d_dim=4, h_dim=4, w_dim=4, attention_head_size=13)
    yield {"self": of, "qk": x, "pos_ids": places}, turned


def turn(pairs: Pairs, **how: Any) -> Turn:
    return lambda x, cos, sin: rotated(x, cos, sin, pairs, **how)


def turn_first(pairs: Pairs, **how: Any) -> Turn:
    return lambda x, cos, sin: first(x, cos, sin, pairs, **how)


SAMPLES: dict[str, Callable[[], Iterator[Sample]]] = {
    "halves": lambda: both(D, turn(halves)),
    "halves, turned the other way": lambda: both(D, lambda x, cos, sin: rotated(x, cos, -sin, halves)),
    "neighbours": lambda: both(D, turn(neighbours)),
    "neighbours, first half of the table": lambda: both(D, turn(neighbours, once=True)),
    "neighbours, put into halves": lambda: both(D, turn(neighbours, once=True, to=halves)),
    "neighbours, put into halves first": lambda: both(
        D, lambda x, cos, sin: rotated(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin, halves)
    ),
    "neighbours, put into halves, keys optional": lambda: without_keys(
        both(D, turn(neighbours, once=True, to=halves)), lambda q: (q, None)
    ),
    "matrices of the first half of the table": lambda: both(D, turn(neighbours, once=True)),
    "halves of the first columns": lambda: both(4, turn_first(halves)),
    "halves of the first columns, keys optional": lambda: without_keys(both(4, turn_first(halves)), lambda q: q),
    "neighbours of the first columns": lambda: both(4, turn_first(neighbours)),
    "neighbours of the first columns, first half of the table": lambda: both(4, turn_first(neighbours, once=True)),
    "halves, half table": lambda: both(D // 2, turn(halves, once=True)),
    "neighbours, half table": lambda: both(D // 2, turn(neighbours, once=True)),
    "neighbours of one tensor, half table": lambda: one(
        D // 2, turn(neighbours, once=True), lambda x, cos, sin: {"tensor": x, "sin": sin, "cos": cos}
    ),
    "halves of one tensor": lambda: one(
        D, turn(halves), lambda x, cos, sin: {"x": x, "cos": cos, "sin": sin, "unsqueeze_dim": 2}
    ),
    "halves of each part of one tensor": lambda: one(
        D, parts, lambda x, cos, sin: {"x": x, "cos": cos, "sin": sin, "position_ids": torch.zeros(B, L, 2)}
    ),
    "neighbours of the last columns, half table": lambda: one(
        2, last, lambda x, cos, sin: {"x": x, "cos": cos, "sin": sin, "unsqueeze_dim": 2}
    ),
    "halves, queries of the last positions": last_queries,
    "halves at positions": lambda: at_positions(("q", "k", "v")),
    "halves at positions, no values": lambda: at_positions(("q", "k")),
    "halves, three tables": lambda: three_tables(D, turn(halves)),
    "halves of the first columns, three tables": lambda: three_tables(4, turn_first(halves)),
    "neighbours of the first columns, first half of three tables": lambda: three_tables(
        4, turn_first(neighbours, once=True)
    ),
    "halves of one tensor, table cut to its tokens": cut_table,
    "halves of one tensor, angles of patches": angles_of_patches,
    "complex numbers": lambda: complex_numbers(1, ("xq", "xk", "freqs_cis")),
    "complex numbers, tokens before heads": lambda: complex_numbers(2, ("xq", "xk", "freqs_cis")),
    "neighbours by time": by_time,
    "neighbours, sines before cosines": sines_first,
    "halves of heads in columns": heads_in_columns,
    "halves, patches only": patches_only,
    "halves, patches before heads": lambda: patches(turn(halves)),
    "neighbours, patches before heads": lambda: patches(turn(neighbours)),
    "halves of the first columns, patches before heads": lambda: patches(turn_first(halves), width=4),
    "complex numbers, patches before heads": complex_patches,
    "neighbours in a picture": pictures,
    "neighbours in a picture and its memory": pictures_and_memory,
    "neighbours in a picture, keys with a table of their own": tables_of_their_own,
    "neighbours by frame, height and width": three_directions,
}


# ---------------------------------------------------------------- every function of the installed Transformers


def candidates() -> Iterator[Candidate]:
    """What `rope.candidates` finds in all modeling files that can be loaded here."""
    models = Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "apply" not in text or not ("rotary" in text or "rope" in text):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        except ImportError:  # an optional dependency that is not here
            continue
        yield from rope.candidates(module)


def formula_of(function: Any) -> str | None:
    """The name of the formula whose family has the code of a function."""
    code = fingerprint(function)
    assert isinstance(code, Fingerprint)
    names = [name for name, family in rope.FORMULAS.items() if code.digest in family.code]
    assert len(names) <= 1, "one code, one formula"
    return names[0] if names else None


def computes(function: Any, name: str) -> bool:
    """Whether a function takes the samples of a formula and gives what they say."""
    return all(_gives(function, arguments, expected) for arguments, expected in SAMPLES[name]())


def _gives(function: Any, arguments: Arguments, expected: Any) -> bool:
    try:
        result = function(**arguments)
    except Exception:
        return False
    got, wanted = flat(result), flat(expected)
    return len(got) == len(wanted) and all(_same(one, other) for one, other in zip(got, wanted, strict=True))


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5)


def flat(result: Any) -> list[Any]:
    """The tensors of a result, and None."""
    return [part for item in result for part in flat(item)] if isinstance(result, tuple) else [result]


def main() -> None:
    """One line for each function: its site, its formula, what it computes, or why it is refused."""
    seen: dict[str, list[str]] = {}
    for candidate in candidates():
        line: dict[str, Any] = {"site": candidate.site, "operator": candidate.operator, "refused": candidate.reason}
        if candidate.function is not None:
            name = formula_of(candidate.function)
            line |= {"formula": name, "right": name is not None and computes(candidate.function, name)}
            if name is not None and name not in seen:
                seen[name] = [other for other in SAMPLES if other != name and computes(candidate.function, other)]
                line["others"] = seen[name]
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
