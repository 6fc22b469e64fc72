"""The command `llm-op-guard`: arguments and exit codes, nothing else. The only module that ends the process."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llm_op_guard import __version__, catalogue, checking, demo, doctor, formatting, injecting, replaying, run, seeking
from llm_op_guard.benching import command as benching
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.policy import OFF, Policy, current
from llm_op_guard.report import digest
from llm_op_guard.report.terminal import Terminal

OK, FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code.

    0: yes. 1: no (a contract is wrong, or warned of under --strict; nothing is guarded, a bad input was not stopped).
    2: the command was not given what it needs. `run` and `nan` have the exit code of the program that they
    run; `nan` has 1 where it found something.
    """
    try:
        arguments = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except SystemExit as end:  # of argparse, or of the program that ran
        return _code(end)
    except LlmOpGuardError as error:
        Terminal(sys.stderr).error(str(error))
        return MISUSED
    except BrokenPipeError:
        # Whoever read our output has gone. Without this, Python complains at exit, when it flushes.
        with contextlib.suppress(OSError, ValueError, AttributeError):  # somebody replaced stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or OK
    Terminal(sys.stderr).line(str(end.code))
    return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-op-guard", description="Contracts for LLM operators: checked at the call, explained when broken."
    )
    parser.add_argument("--version", action="version", version=f"llm-op-guard {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("demo", help="a tiny Llama with and without guards, then bad inputs side by side")
    command.set_defaults(command=_demo)

    command = commands.add_parser(
        "run",
        help="run a script or module with guards installed before its first line",
        usage="llm-op-guard run [-h] [--record FILE] (SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    command.add_argument(
        "--record",
        metavar="FILE",
        help="write violations to FILE, and stop no call for them unless LLM_OP_GUARD says so",
    )
    command.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    command.add_argument("target", metavar="TARGET", help="the script, or with -m the module")
    command.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="what the program is given")
    command.set_defaults(command=_run)

    command = commands.add_parser(
        "nan",
        help="run a script or module up to its first NaN or infinity, and say which module made it",
        usage="llm-op-guard nan [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    command.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    command.add_argument("target", metavar="TARGET", help="the script, or with -m the module")
    command.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="what the program is given")
    command.set_defaults(command=_nan)

    command = commands.add_parser("doctor", help="what is guarded here, what is not, and why")
    command.add_argument("--library", default="transformers", help="the library to look at (default: %(default)s)")
    command.add_argument("modules", metavar="MODULE", nargs="*", help="modules to load and look at")
    command.set_defaults(command=_doctor)

    command = commands.add_parser("check", help="read contract files: whether they are right, and what says nothing")
    command.add_argument("--strict", action="store_true", help="fail for warnings, too")
    command.add_argument("--json", dest="as_json", action="store_true", help="as JSON, for programs")
    command.add_argument("files", metavar="FILE", nargs="+")
    command.set_defaults(command=_check)

    command = commands.add_parser("fmt", help="write contract files in one style, comments kept")
    command.add_argument("--check", dest="check_only", action="store_true", help="only say which would be changed")
    command.add_argument("files", metavar="FILE", nargs="+", help="of stubs (.contract) or of the JSON form (.json)")
    command.set_defaults(command=_fmt)

    command = commands.add_parser("contracts", help="the shipped contracts, or one with its rules and reasons")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", dest="as_json", action="store_true", help="in the JSON form, for programs")
    form.add_argument("--schema", dest="schema", action="store_true", help="the JSON Schema of the JSON form")
    command.add_argument(
        "name", metavar="NAME", nargs="?", help="an operator, a contract as it is listed, a FILE, or FILE:OPERATOR"
    )
    command.set_defaults(command=_contracts)

    _add_proof(commands)

    command = commands.add_parser("bench", help="what guards cost here, beside checks by hand and other libraries")
    command.add_argument("--quick", action="store_true", help="a sample in seconds, to see that it runs")
    command.add_argument(
        "--threads", type=_positive, default=1, metavar="N", help="threads of torch (default: %(default)s)"
    )
    command.add_argument("--json", dest="json_file", metavar="FILE", help="write all that was found as JSON")
    command.add_argument("--plots", dest="plots_folder", metavar="FOLDER", help="draw it, into PNG files there")
    command.set_defaults(command=_bench)

    command = commands.add_parser("report", help="what the files of `run --record` and LLM_OP_GUARD_RECORD say")
    command.add_argument("--json", dest="as_json", action="store_true", help="as JSON, for programs")
    command.add_argument("--html", dest="html_file", type=_page, metavar="FILE.html", help="write it as a page too")
    command.add_argument("files", metavar="FILE", nargs="+", help="with its rotated ones: guards.jsonl*")
    command.set_defaults(command=_report)
    return parser


def _add_proof(commands: Any) -> None:
    """The commands that make calls: `inject` and `replay`."""
    command = commands.add_parser("inject", help="calls made from contracts, valid and broken, with guards and without")
    command.add_argument(
        "targets", metavar="TARGET", nargs="*", help="a shipped contract, a FILE, FILE:OPERATOR, or MODULE:FUNCTION"
    )
    command.add_argument("--all", dest="every", action="store_true", help="every shipped contract")
    command.add_argument("--seed", type=int, default=0, help="what all calls are made from (default: %(default)s)")
    command.add_argument("--case", metavar="ID", help="this mutant alone, in full")
    command.add_argument(
        "--valid",
        type=_positive,
        default=injecting.VALID,
        metavar="N",
        help="valid calls (default: %(default)s)",
    )
    command.add_argument("--jobs", type=_positive, metavar="N", help="processes (default: one for each core)")
    command.add_argument("--json", dest="json_file", metavar="FILE", help="write all that was found as JSON")
    command.add_argument("--junit", dest="junit_file", metavar="FILE", help="write the cases as JUnit's XML")
    command.add_argument("--html", dest="html_file", type=_page, metavar="FILE.html", help="write it as a page")
    command.set_defaults(command=_inject)

    command = commands.add_parser("replay", help="a violation again, from its capsule")
    command.add_argument("file", metavar="FILE", help="a capsule, or a file of `run --record` (its first violation)")
    command.add_argument(
        "--contract", metavar="NAME", help="where it is not shipped: FILE, FILE:OPERATOR, MODULE:FUNCTION"
    )
    command.add_argument("--unguarded", action="store_true", help="show too what happens without a guard")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--pytest", dest="as_test", action="store_true", help="write a test instead")
    form.add_argument("--script", dest="as_script", action="store_true", help="write a small program instead")
    command.set_defaults(command=_replay)


def _demo(_: argparse.Namespace) -> int:
    out, complaints = Terminal(sys.stdout), Terminal(sys.stderr)
    if absent := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        complaints.error(f"the demo needs {' and '.join(absent)}: pip install 'llm-op-guard[transformers]'")
        return MISUSED
    if current(Policy()) == OFF:
        complaints.error("LLM_OP_GUARD=off switches every guard off; unset it for the demo")
        return MISUSED
    return OK if demo.main(out) else FAILED


def _run(arguments: argparse.Namespace) -> int:
    start = run.module if arguments.is_module else run.script
    return start(arguments.target, arguments.arguments, Terminal(sys.stderr), arguments.record)


def _nan(arguments: argparse.Namespace) -> int:
    return seeking.main(Terminal(sys.stderr), arguments.target, arguments.arguments, is_module=arguments.is_module)


def _doctor(arguments: argparse.Namespace) -> int:
    findings = doctor.main(Terminal(sys.stdout), Terminal(sys.stderr), arguments.library, arguments.modules)
    if arguments.modules and findings.unloadable:
        return MISUSED
    return OK if findings.guarded else FAILED


def _check(arguments: argparse.Namespace) -> int:
    found = checking.main(Terminal(sys.stdout), Terminal(sys.stderr), arguments.files, as_json=arguments.as_json)
    if found.unreadable:
        return MISUSED
    return FAILED if found.wrong or (arguments.strict and found.warnings) else OK


def _fmt(arguments: argparse.Namespace) -> int:
    changed, failed = formatting.main(
        Terminal(sys.stdout), Terminal(sys.stderr), arguments.files, check_only=arguments.check_only
    )
    return MISUSED if failed else FAILED if changed and arguments.check_only else OK


def _contracts(arguments: argparse.Namespace) -> int:
    out = Terminal(sys.stdout)
    if arguments.schema:
        catalogue.show_schema(out)
        return OK
    return OK if catalogue.main(out, Terminal(sys.stderr), arguments.name, as_json=arguments.as_json) else MISUSED


def _inject(arguments: argparse.Namespace) -> int:
    wanted = injecting.Wanted(
        tuple(arguments.targets),
        every=arguments.every,
        seed=arguments.seed,
        case=arguments.case,
        valid=arguments.valid,
        jobs=arguments.jobs,
        json_file=arguments.json_file,
        junit_file=arguments.junit_file,
        html_file=arguments.html_file,
    )
    return OK if injecting.main(Terminal(sys.stdout), Terminal(sys.stderr), wanted) else FAILED


def _replay(arguments: argparse.Namespace) -> int:
    wanted = replaying.Wanted(
        arguments.file,
        contract=arguments.contract,
        unguarded=arguments.unguarded,
        as_test=arguments.as_test,
        as_script=arguments.as_script,
    )
    return OK if replaying.main(Terminal(sys.stdout), Terminal(sys.stderr), wanted) else FAILED


def _bench(arguments: argparse.Namespace) -> int:
    wanted = benching.Wanted(
        quick=arguments.quick,
        threads=arguments.threads,
        json_file=arguments.json_file,
        plots_folder=arguments.plots_folder,
    )
    benching.main(Terminal(sys.stdout), Terminal(sys.stderr), wanted)
    return OK


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a number from 1 on")
    return number


def _page(text: str) -> str:
    if not text.endswith((".html", ".htm")):  # `--html guards.jsonl*` would overwrite the first of the files
        raise argparse.ArgumentTypeError(f"{text!r} is overwritten with a page: name a file that ends in .html")
    return text


def _report(arguments: argparse.Namespace) -> int:
    out, complaints = Terminal(sys.stdout), Terminal(sys.stderr)
    told, unreadable = digest.main(
        out, complaints, arguments.files, as_json=arguments.as_json, html_file=arguments.html_file
    )
    return MISUSED if unreadable else OK if told else FAILED
