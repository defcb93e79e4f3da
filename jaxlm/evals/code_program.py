"""Run a program that a model wrote, and report to a pipe if it ended well.

Runs alone, as `python -I -S code_program.py PIPE`, without this package. Standard input has a JSON
object: `program`, `nonce`, and limits of `seconds`, `memory` and `file` in bytes.
"""

import json
import os
import resource
import sys


def main() -> None:
    """Run the program of standard input under limits."""
    pipe = int(sys.argv[1])
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
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
    # The program may replace functions of modules, and its exit handlers must not run.
    write, leave, nonce = os.write, os._exit, request["nonce"]
    name_of, failure = type, BaseException
    try:
        exec(compile(request["program"], "<answer>", "exec"), {"__name__": "__main__"})
        result = "passed"
    except failure as error:
        result = name_of(error).__name__
    write(pipe, f"{nonce} {result}".encode())
    leave(0)


main()
