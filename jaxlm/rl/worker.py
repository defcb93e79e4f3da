"""Call reward functions and tools of a user: the process that `workers` starts.

Runs alone, as `python -P worker.py REQUESTS RESULTS`, with two pipes and without this package. The
first line has `bytes`, the limit of memory, and `files`, each with its path, content and functions.
It is answered with null, or with the failure of a file. Each further line is a call; its answer has
`value`, or `error`, and `children` if processes are left that the function started.
"""

import contextlib
import ctypes
import inspect
import json
import numbers
import os
import re
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ARGUMENTS = ("prompt", "completion", "answer", "info", "seed", "reason", "tokens")
MOST = 300  # characters of an error
MOST_TEXT = 10_000  # characters of a text
Function = Callable[..., Any]


def main() -> None:
    """Answer the calls of a pipe until it closes."""
    requests, results = os.fdopen(int(sys.argv[1]), "rb"), int(sys.argv[2])
    for pipe in (requests.fileno(), results):
        os.set_inheritable(pipe, False)
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has them
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process, head = os.getpid(), json.loads(requests.readline())
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (head["bytes"], head["bytes"]))
    functions, problem = _loaded(head["files"])
    _write(results, problem)
    for line in requests:
        answer = _answer(functions, json.loads(line))
        if os.getpid() != process:  # a copy, which the function made by a fork
            os._exit(0)
        _write(results, answer | {"children": _has_children()})


def _loaded(files: list[dict[str, Any]]) -> tuple[dict[str, Function], dict[str, Any] | None]:
    """Return the functions of all files by `FILE:FUNCTION`, and the failure of a file, if any."""
    functions: dict[str, Function] = {}
    for file in files:
        path = file["path"]
        sys.path.insert(0, str(Path(path).resolve().parent))
        module = types.ModuleType(f"jaxlm_reward_{Path(path).stem}")
        module.__file__ = path
        sys.modules[module.__name__] = module
        try:
            exec(compile(file["content"], path, "exec"), module.__dict__)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == path] or [1]
            place = error.lineno if isinstance(error, SyntaxError) else lines[-1]
            return {}, {"path": path, "line": place, "error": _text(error)}
        for name in file["functions"]:
            function: Any = getattr(module, name, None)
            if why := _wrong(function):
                known = [each for each, value in vars(module).items() if not _wrong(value)]
                known = [each for each in known if not each.startswith("_")]
                return {}, {"path": path, "name": name, "error": why, "functions": known}
            functions[f"{file['name']}:{name}"] = function
    return functions, None


def _wrong(function: Any) -> str:
    """Return why a value is no reward function; empty if it is one."""
    if not inspect.isfunction(function):
        return "it has no such function" if function is None else "it is no function"
    required = [
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if unknown := [name for name in required if name not in ARGUMENTS]:
        return f"its argument {unknown[0]} is none of {', '.join(ARGUMENTS)}"
    return "" if required else "it has no argument"


def _answer(functions: Mapping[str, Function], request: dict[str, Any]) -> dict[str, Any]:
    try:
        sample = request["sample"]
        if "pattern" in request:
            return {"value": _matches(request["pattern"], sample)}
        function = functions[request["function"]]
        parameters = inspect.signature(function).parameters
        takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
        value = function(**{k: v for k, v in sample.items() if takes_all or k in parameters})
        if request.get("is_text"):
            if value is not None and not isinstance(value, str):
                return {"error": f"it returned {type(value).__name__}, not a text or None"}
            return {"value": value and value[:MOST_TEXT]}
        if value is None:
            return {"error": "it returned None"}
        if not isinstance(value, numbers.Real) and type(value).__name__ not in ("bool", "bool_"):
            return {"error": f"it returned {type(value).__name__}, not a number"}
        number = float(value)
        if number != number or number in (float("inf"), float("-inf")):
            return {"error": f"it returned {number}"}
        return {"value": number}
    except BaseException as error:
        return {"error": _text(error)}


def _matches(pattern: str, sample: Mapping[str, Any]) -> float:
    """Return 1 if the last match of a pattern, or its first group, is the answer.

    Without a pattern, the answer is the pattern of the whole completion.
    """
    answer, completion = sample["answer"].strip(), sample["completion"].strip()
    if not pattern:
        return float(re.fullmatch(answer, completion) is not None)
    matches = list(re.finditer(pattern, completion))
    if not matches:
        return 0.0
    part = matches[-1][1 if matches[-1].re.groups else 0]
    return float(part is not None and part.strip() == answer)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:MOST].rstrip(": ")


def _has_children() -> bool:
    """Return whether processes are left that a function started."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except OSError:  # there is none
        return False
    return True


def _write(pipe: int, answer: Any) -> None:
    os.write(pipe, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
