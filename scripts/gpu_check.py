"""What late verdicts do on a CUDA device, checked and measured: a table, and an exit status. Meant for three minutes.

    python scripts/gpu_check.py

Exit status 0 when every check passed, 1 when one did not (speeds below what is aimed at are told and fail nothing), 2
where there is no CUDA device. Needs torch with CUDA and this package; Triton comes with torch.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import llm_op_guard as og
from llm_op_guard.guard.late import Probe, Range
from llm_op_guard.values import by_torch, late, ring

# (what was looked at, what came of it, what is aimed at, whether it is as it should be: None for what is only measured)
Row = tuple[str, str, str, bool | None]

NO_DEVICE = (
    "gpu_check: this torch sees no CUDA device, so nothing was checked. Run it on a machine with one; "
    "`make triton` tries the kernel in Triton's interpreter, and compiles it, without."
)
# A test without a device has another.
DEVICE = "cuda"
CONTRACT = "x: floating[N, _]\nrequire(finite(x), id='finite_x')\nrequire(absmax(x) < 100, id='small_x')"


@og.guard(CONTRACT)
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Something to guard."""
    return x * 2


def bad(size: int = 64) -> torch.Tensor:
    """On the device, with NaN as its last element but one."""
    x = torch.ones(size, size, device="cuda")
    x[-1, -2] = float("nan")
    return x


def asks_by_triton() -> Row:
    """Whether the kernel is used at all, or torch's operations in its place."""
    asked = late._launcher(torch.device("cuda", torch.cuda.current_device()))
    return "asked by", "Triton" if asked is not None else "operations of torch", "Triton", asked is not None


def answers() -> Row:
    """Both ways of asking against the definitions on the processor, of every dtype."""
    device = torch.device("cuda", torch.cuda.current_device())
    launch, memory, wrong, asked = late._launcher(device), ring.Ring(device), [], 0
    ranges = (None, Range(0, 2, high_open=True), Range(-1, 1, allow=(7,)))
    for name in ring.KINDS:
        kind = getattr(torch, name)
        for offset in (0, 1, 3):
            on_cpu = (torch.arange(70_001) % 2).to(kind)
            for place in (5, 40_000, 70_000):
                on_cpu[place] = 3 if name != "bool" else 1
                if kind.is_floating_point and place > 5:
                    on_cpu[place] = float("nan")
            x = on_cpu[offset:].cuda()
            probes = [Probe(x, one) for one in ranges]
            expected = _by_torch(ring.Ring(torch.device("cpu")), [Probe(on_cpu[offset:], one) for one in ranges])
            found = [_by_torch(memory, probes)]
            if launch is not None:
                sent = launch(memory, 1, asked + 1, probes)
                torch.cuda.synchronize()
                found.append(memory.answers(1, sent[0]) if sent is not None and memory.has(1, asked + 1) else [])
            asked += 1
            wrong += [f"{name} from {offset}" for one in found if _plain(one) != _plain(expected)]
    told = f"{asked} tensors as on the processor" if not wrong else f"wrong: {', '.join(wrong[:4])}"
    return "answers of every dtype", told, "as on the processor", not wrong


def _by_torch(memory: ring.Ring, probes: list[Probe]) -> list[tuple[int, int, int]]:
    by_torch.send(memory.memory, 0, 1, probes)
    torch.cuda.synchronize()
    return memory.answers(0, range(len(probes)))


def _plain(found: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """Where nothing is wrong, there is no place and no value."""
    return [answer if answer[0] else (0,) for answer in found]


def waits_for_nothing() -> Row:
    """Guarded calls while torch makes an error of every wait; then the verdict."""
    doubled(torch.ones(64, 64, device="cuda"))
    og.flush()
    x, wrong = torch.ones(64, 64, device="cuda"), bad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            doubled(x)
        doubled(wrong)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    try:
        og.flush()
    except og.GuardError as error:
        told = error.violations[0].observed
        return "no wait in async mode", told, "x[63, 62] = nan", told.startswith("x[63, 62] = nan")
    return "no wait in async mode", "the verdict did not come", "x[63, 62] = nan", False


LOOKED_UP = """
x: floating[N]
ids: int64[_]
require(finite(x), id="finite_x")
require(within(ids, 0, N), id="ids_in_x")
"""


@og.guard(LOOKED_UP)
def looked_up(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A table of numbers and what is looked up in it; `clamp` keeps an id that is wrong from ending the process."""
    return x[ids.clamp(0, len(x) - 1)] * 2


def warmed(call: Callable[[], Any]) -> None:
    """As before every capture: some runs on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    og.flush()


def flushed() -> dict[str, og.Violation]:
    """What has been found, by rule."""
    try:
        og.flush()
    except og.GuardError as error:
        return {violation.rule_id: violation for violation in error.violations}
    return {}


def replay_of(found: dict[str, og.Violation], rule: str, observed: str) -> tuple[Any, ...]:
    """Of a rule: the replay that broke it, how many broke since, and how many there were; what else was told, if so."""
    if rule not in found or not found[rule].observed.startswith(observed):
        return tuple(violation.observed for violation in found.values())
    late = found[rule].told_late
    told = None if late is None else late.replayed
    return ("no replay",) if told is None else (told.at, told.broken, told.replays)


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a call, captured while torch makes an error of every wait; and what the call returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return graph, call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def replays() -> list[Row]:
    """A guarded call in a CUDA graph: it computes what it does without, and is judged at each replay."""
    x, ids = torch.ones(4096, device=DEVICE), torch.zeros(64, dtype=torch.int64, device=DEVICE)
    warmed(lambda: looked_up(x, ids))
    graph, y = captured(lambda: looked_up(x, ids))
    x.fill_(21.0)
    graph.replay()
    right = not flushed() and bool((y == 42.0).all())
    rows = [("a graph computes", "as without guard" if right else "another result", "as without guard", right)]

    def row(what: str, found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
        rows.append((what, str(found), f"{wanted}: at, broken, replays", found == wanted))

    graph.replay()
    x[4000] = float("nan")
    for _ in range(3):
        graph.replay()
    x[7] = float("inf")
    graph.replay()
    row(
        "each replay is judged, the first that broke is kept",
        replay_of(flushed(), "finite_x", "x[4000] = nan"),
        (3, 4, 6),
    )
    graph.replay()
    row("and the next, once that was told", replay_of(flushed(), "finite_x", "x[7] = inf"), (7, 1, 7))
    x.fill_(1.0)
    graph.replay()
    row("a replay without a fault", tuple(flushed()), ())
    ids[3] = 4096
    graph.replay()
    row("ids, that are judged before a call elsewhere", replay_of(flushed(), "ids_in_x", "ids[3] = 4096"), (9, 1, 9))
    ids[3] = 0

    # What the kernel cannot read is asked by operations of torch, whose copies are in the graph.
    wide = torch.ones(64, 128, device=DEVICE)
    gaps = wide[:, ::2]
    warmed(lambda: doubled(gaps))
    other, _ = captured(lambda: doubled(gaps))
    other.replay()
    wide[5, 4] = float("nan")
    other.replay()
    other.replay()
    row("a tensor with gaps in a graph", replay_of(flushed(), "finite_x", "x[5, 2] = nan"), (2, 2, 3))
    return rows


def reduced_overhead() -> Row:
    """`torch.compile(mode="reduce-overhead")`: how often a bad run of a program in CUDA graphs is told of."""
    torch._dynamo.reset()
    program = torch.compile(looked_up, mode="reduce-overhead", fullgraph=True)
    x, ids = torch.ones(4096, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
    for _ in range(5):  # warms up, is captured, then is replayed
        torch.compiler.cudagraph_mark_step_begin()
        program(x, ids)
    calm, bad, told = not flushed(), x.clone(), 0
    bad[9] = float("nan")
    replayed = False
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        program(bad, ids)
        found = flushed().get("finite_x")
        told += found is not None
        replayed |= found is not None and found.told_late is not None and found.told_late.replayed is not None
    text = f"{told} of 3 bad runs{', in replays' if replayed else ''}{'' if calm else ', and a good one'}"
    return 'mode="reduce-overhead"', text, "3 of 3 bad runs, in replays", text == "3 of 3 bad runs, in replays"


CHILD = """
import sys
sys.path.insert(0, {path!r})
import torch, llm_op_guard as og
@og.guard("x: floating[_]\\nrequire(finite(x), id='finite_x')")
def doubled(x): return x * 2
og.set_policy(B="raise,async")
x = torch.ones(1000, device="cuda")
doubled(x)
og.flush()
x[7] = float("inf")
doubled(x)
torch.cuda.synchronize()
try:
    with og.watch():
        torch.nn.functional.embedding(torch.tensor([99], device="cuda"), torch.ones(3, 4, device="cuda"))
        torch.cuda.synchronize()
except RuntimeError as error:
    print("\\n".join(getattr(error, "__notes__", ())))
"""


def after_an_assertion() -> Row:
    """In a process whose context dies: what was found before stands in a note of the error."""
    program = CHILD.format(path=str(Path(__file__).resolve().parents[1] / "src"))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=90)
    right = "doubled: x[7] = inf" in ran.stdout
    told = "x[7] = inf in the note" if right else f"no such note: {(ran.stdout + ran.stderr).strip()[-200:]!r}"
    return "after a device-side assertion", told, "x[7] = inf in the note", right


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """The median time of a piece of work on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[rounds // 2]


def speeds() -> list[Row]:
    """One probe of large tensors against isfinite().all() and a copy, by the time on the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    launch, memory = late._launcher(device), ring.Ring(device)
    numbers = iter(range(1, 10**9))
    rows: list[Row] = []
    for name, megabytes in (("float32", 1), ("float32", 32), ("bfloat16", 1024), ("float32", 1024)):
        kind = getattr(torch, name)
        x = torch.ones(megabytes * 2**20 // kind.itemsize, dtype=kind, device="cuda")
        y, probe = torch.empty_like(x), [Probe(x, None)]

        def ours(probe: list[Probe] = probe) -> None:
            number = next(numbers)
            if launch is None or launch(memory, number % ring.SLOTS, number, probe) is None:
                by_torch.send(memory.memory, number % ring.SLOTS, number, probe)

        took = seconds(ours, 21)
        slow = seconds(lambda x=x: torch.isfinite(x).all(), 21)
        copied = seconds(lambda x=x, y=y: y.copy_(x), 21)
        size = x.numel() * kind.itemsize
        share = (size / took) / (2 * size / copied)
        rows.append(
            (
                f"{megabytes} MB of {name}",
                f"{size / took / 1e9:.0f} GB/s: {share:.2f} of a copy, {slow / took:.1f} times isfinite().all()",
                "0.8 of a copy" if megabytes == 1024 else "",
                None if megabytes < 1024 else share >= 0.8,
            )
        )
    return rows


def small() -> Row:
    """What an async probe of a small tensor takes of the host's time."""
    x = torch.ones(32, 32, device="cuda")

    def took(setting: str) -> float:
        with og.policy(B=setting):
            for _ in range(50):
                doubled(x)
            og.flush()
            start = time.perf_counter()
            for _ in range(200):  # fewer than the ring has slots
                doubled(x)
            spent = (time.perf_counter() - start) / 200
            og.flush()
        return spent

    with_probe, without = took("async"), took("off")
    return "a probe of 4 KB, host", f"{(with_probe - without) * 1e6:.1f} µs a call", "", None


def main() -> int:
    """Check, print, and say whether all is as it should be."""
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 2
    began = time.monotonic()
    og.set_policy(B="raise,async")
    rows: list[Row] = []
    checks = (asks_by_triton, answers, waits_for_nothing, replays, reduced_overhead, after_an_assertion, small)
    for check in checks:
        try:
            found = check()
            rows += found if isinstance(found, list) else [found]
        except Exception as error:
            rows.append((check.__name__, f"{type(error).__name__}: {error}"[:200], "", False))
    measured: list[Row] = []
    try:
        measured += speeds()
    except Exception as error:
        rows.append(("speeds", f"{type(error).__name__}: {error}"[:200], "", False))
    triton = getattr(sys.modules.get("triton"), "__version__", "none")
    versions = f"torch {torch.__version__}, Triton {triton}, Python {platform.python_version()}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    print("| what | came out | aim | |\n| --- | --- | --- | --- |")
    for what, found, aim, right in rows + measured:
        print(f"| {what} | {found} | {aim} | {'' if right is None else 'yes' if right else 'NO'} |")
    print(f"took {time.monotonic() - began:.0f} s")
    return int(any(right is False for *_, right in rows))


if __name__ == "__main__":
    sys.exit(main())
