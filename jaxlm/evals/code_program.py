"""Run a program that a model wrote, and report to a pipe if its tests passed.

Runs alone, as `python -I -S code_program.py PIPE`, without this package. Standard input has a JSON
object: `program`, the `tests` that follow it, the `examples` of a docstring as triples of source,
output and exception, `nonce`, limits of `seconds`, `memory` and `file` in bytes, and `visible`, the
paths that the program sees in a file system of its own; None leaves it that of the user.
"""

import ast
import builtins
import contextlib
import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1, 32, 4096, 16384
KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME  # a mount's, as MS_ flags
MNT_DETACH = 2
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CAPABILITIES = 0x20080522  # version 3 of the structure
SCRATCH = "size=16m,mode=700"
# Calls that concern processes, programs, signals, networks, mounts, tracing, keys: syscalls(2).
MACHINES = {  # architecture, and the numbers of the calls
    "x86_64": (
        0xC000003E,
        "56 57 58 435 59 322 62 129 200 234 297 424 438 41 101 155 161 165 166 272 308 310 311 321 "
        "298 248 249 250 323 425 426 427 304 428 429 432",
    ),
    "aarch64": (
        0xC00000B7,
        "220 435 221 281 129 130 131 138 240 424 438 198 117 41 51 40 39 97 268 270 271 280 241 "
        "217 218 219 282 425 426 427 265 428 429 432",
    ),
}
PLAIN = (bool, int, float, complex, str, bytes, type(None))
HOLDERS = (list, tuple, set, frozenset, dict)


def main() -> None:
    """Run the program of standard input under limits."""
    pipe = int(sys.argv[1])
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    tests = compile(strict(request["tests"]), "<tests>", "exec")
    examples = [
        (compile(source, "<example>", "single"), output, exception)
        for source, output, exception in request["examples"]
    ]
    if request["visible"] is not None:
        own_files(request["visible"])
    limits = {
        resource.RLIMIT_CPU: request["seconds"],
        resource.RLIMIT_AS: request["memory"],
        resource.RLIMIT_FSIZE: request["file"],
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))
    filter_calls()
    # The program may replace functions of modules, and its exit handlers must not run.
    write, leave, nonce = os.write, os._exit, request["nonce"]
    name_of, failure = type, BaseException
    functions, original = vars(builtins), dict(vars(builtins))
    compare, run_examples = same, check
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(request["program"], "<answer>", "exec"), scope)
        functions.clear()
        functions.update(original)
        scope |= {"__builtins__": builtins, "__same__": compare}
        exec(tests, scope)
        run_examples(examples, scope)
        result = "passed"
    except failure as error:
        result = name_of(error).__name__
    write(pipe, f"{nonce} {result}".encode())
    leave(0)


class Strict(ast.NodeTransformer):
    """Replace `a == b` by `__same__(a, b)`, and `a != b` by its negation."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Return the comparison of two values that a class of the program cannot decide."""
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            return node
        name = ast.Name("__same__", ast.Load())
        call = ast.Call(name, [node.left, node.comparators[0]], [])
        changed: ast.expr = (
            call if isinstance(node.ops[0], ast.Eq) else ast.UnaryOp(ast.Not(), call)
        )
        return ast.copy_location(changed, node)


def strict(source: str) -> Any:
    """Return the tree of tests whose comparisons are `same`."""
    return ast.fix_missing_locations(Strict().visit(ast.parse(source)))


def same(value: Any, other: Any) -> bool:
    """Return whether two values are equal.

    What is compared with a value of Python's own types must have one of them, to its last item: a
    class whose `__eq__` is always true equals nothing.
    """

    def is_plain(value: Any) -> bool:
        kind = type(value)
        if kind is dict:
            return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
        return kind in PLAIN or (kind in HOLDERS and all(map(is_plain, value)))

    if {type(value), type(other)} & {*PLAIN, *HOLDERS}:
        return is_plain(value) and is_plain(other) and value == other
    return bool(value == other)


def check(examples: Sequence[tuple[Any, str, str | None]], scope: dict[str, Any]) -> None:
    """Raise AssertionError unless each example prints its output, or raises its exception."""
    stdout, hook = sys.stdout, sys.displayhook
    for code, output, exception in examples:
        sys.stdout, sys.displayhook = (stream := io.StringIO()), sys.__displayhook__
        raised = None
        try:
            exec(code, scope)
        except Exception as error:
            raised = traceback.format_exception_only(error)[-1]
        sys.stdout, sys.displayhook = stdout, hook
        printed = stream.getvalue()
        if raised != exception or (exception is None and printed != output):
            raise AssertionError


def own_files(visible: Sequence[str]) -> None:
    """Make the working directory, on a file system in memory, the root of all files.

    Only the visible paths are there, read-only. Needs the privileges of a new user namespace, which
    are given up.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)

    def mount(
        source: str, target: str, kind: str | None, flags: int, data: str | None = None
    ) -> None:
        words = [word and word.encode() for word in (source, target, kind, data)]
        call("mount", *words[:3], ctypes.c_ulong(flags), words[3])

    root = os.getcwd()
    mount("none", root, "tmpfs", os.ST_NOSUID | os.ST_NODEV, SCRATCH)
    for path in visible:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT))
        mount(path, target, None, MS_BIND | MS_REC)
        if not path.startswith("/dev/"):
            flags = os.statvfs(target).f_flag & KEPT_FLAGS
            mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    os.mkdir(f"{root}/tmp")
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp")
    os.environ["HOME"] = "/tmp"
    header, empty = struct.pack("II", CAPABILITIES, 0), struct.pack("6I", *[0] * 6)
    call("capset", header, empty)


def filter_calls() -> None:
    """Let system calls that start processes, signal, connect or trace fail with EPERM.

    Does nothing on systems without such filters.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return
    architecture, numbers = MACHINES[platform.machine()]
    denied = [int(number) for number in numbers.split()]
    # Instructions of BPF: code, jump if true, jump if false, operand.
    load, equal, least, give = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(least, len(denied) + 1, 0, 0x40000000)]  # numbers of the x32 interface
    program += [(equal, len(denied) - n, 0, number) for n, number in enumerate(denied)]
    program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(content))
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0)


main()
