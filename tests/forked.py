"""Processes of `jaxlm` that are forked from one that has imported everything.

Imports are a third of what a run of the tests' tiny model costs. A forked process has its own
words, environment, folder, files and signals. It differs from a new one in its hash seed, which is
that of the process it was forked from, and draws no plots. JAX reads some variables as it is
imported: if they differ, and for tests of the start, processes are new (`harness.start`).
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

AT_IMPORT = ("JAX_", "PYTHON", "LD_", "OPENBLAS_", "OMP_", "TF_")  # read before the fork
COMPILE_CACHE = "JAX_COMPILATION_CACHE_DIR"  # set again after the fork
MAX_BYTES = 200_000  # of the words and the environment
PR_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).parents[1]

_servers: dict[str, tuple[subprocess.Popen, socket.socket]] = {}


class Process(subprocess.Popen):
    """A child that a server has forked; its arguments are `PYTHON -m MODULE WORD ...`."""

    def _execute_child(self, args, *passed):
        cwd, env, pipes = passed[4], passed[5], passed[9:15]  # as subprocess orders them
        files = [fd if fd >= 0 else at for at, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {"words": args[2:], "cwd": str(cwd or Path.cwd()), "env": dict(env)}
        connection = _connection(env)
        # The fork's parent ends at once, and the kernel gives its child to this process.
        _adopt(True)
        try:
            socket.send_fds(connection, [json.dumps(request).encode()], files)
            self.pid = int(connection.recv(20))
        finally:
            _adopt(False)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess:
    """Return `jaxlm WORDS` after its end, with what it printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "jaxlm", *words]
    with Process(command, env=env, text=True, **pipes) as process:
        output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def _adopt(on: bool) -> None:
    """Make processes below this one, whose parent ends, children of this one; or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _connection(env: dict[str, str]) -> socket.socket:
    """Return the socket of the server with these variables, which is started if there is none."""
    fixed = {
        name: text
        for name, text in env.items()
        if name.startswith(AT_IMPORT) and name != COMPILE_CACHE
    }
    key = json.dumps(fixed, sort_keys=True)
    if key not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                env=os.environ | env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        _servers[key] = server, ours
    return _servers[key][1]


def close() -> None:
    """End the servers."""
    for server, connection in _servers.values():
        connection.close()
        server.wait()
    _servers.clear()


def serve(connection: socket.socket) -> dict | None:
    """Fork a process for each request.

    Returns the request in the forked process, and None in the server after its last request.
    """
    while True:
        message, files, *_ = socket.recv_fds(connection, MAX_BYTES, 3)
        if not message:
            return None
        ours, theirs = os.pipe()
        if _fork() == 0:
            if pid := _fork():
                os.write(theirs, str(pid).encode())
                os._exit(0)
            connection.close()
            os.close(ours)
            os.close(theirs)
            for at, fd in enumerate(files):
                os.dup2(fd, at)
                os.close(fd)
            return json.loads(message)
        os.wait()
        connection.send(os.read(ours, 20))
        for fd in (ours, theirs, *files):
            os.close(fd)


def _fork() -> int:
    with warnings.catch_warnings(action="ignore"):  # of threads: OpenBLAS has some, and copes
        return os.fork()


def main() -> None:
    """Import what a run needs, and run the words of a request in each forked process."""
    import jax

    from jaxlm.core import faults

    for name in ("cli.train", "cli.arguments", "recipes.train.run", "monitor.plots"):
        importlib.import_module(f"jaxlm.{name}")
    for name in ("grain", "grain.experimental", "jinja2", "ml_collections"):  # imported late
        importlib.import_module(name)
    from jaxlm.monitor import plots

    plots.draw = lambda _: []
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    jax.config.update("jax_compilation_cache_dir", os.environ.get(COMPILE_CACHE))
    faults._faults = faults.parse(os.environ.get(faults.VARIABLE, ""))
    module, *sys.argv[1:] = request["words"]
    sys.path[0] = os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
