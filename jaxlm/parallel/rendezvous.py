"""Rendezvous of the ranks before `jax.distributed.initialize`.

JAX ends a process without an exception if a rank is missing at the timeout. This rendezvous names
the missing ranks on every present rank, and a rank that fails before reports why to the others.
"""

import contextlib
import json
import re
import socket
import sys
import time
from collections.abc import Iterator

from jaxlm.core.errors import CommandError, JaxlmError, PeerLost
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.parallel.cluster import port as default_port

MAX_LINE_BYTES = 1024  # of a rank's own message
MAX_REASON = 200  # letters of the reason why a rank fails
SILENCE_SECONDS = 2.0  # timeout of a connection without a message
REPORT_SECONDS = 10.0  # for a failing rank to reach the others
Roll = tuple[list[int], str]  # the ranks that are present, and what is wrong


@contextlib.contextmanager
def report_failure_to_peers(place: ProcessSpec) -> Iterator[None]:
    """Report an error before the rendezvous to the other ranks, so that they do not wait."""
    try:
        yield
    except JaxlmError as error:
        if place.coordinator is not None and place.rank is not None and place.count is not None:
            why = f"{error.what}, {error.where}"[:MAX_REASON]
            print(f"{why}: reporting it to the other processes", file=sys.stderr)
            deadline = time.monotonic() + REPORT_SECONDS
            with contextlib.suppress(JaxlmError):  # no other rank is present
                _meet(place.coordinator, place.rank, place.count, deadline, why)
        raise


def rendezvous(address: str, *, rank: int, count: int, seconds: float) -> None:
    """Return on every rank once all of them are present.

    Raises PeerLost on all present ranks at the timeout, or if the address cannot be bound;
    CommandError if ranks are equal, disagree about their number, or one was refused.
    """
    present, wrong = _meet(address, rank, count, time.monotonic() + seconds)
    if wrong:
        what = "the processes of this run contradict each other"
        same = "command, code and --num_processes, and its own --process_id"
        raise CommandError(what, where=address, why=wrong, fix=f"start each with the same {same}")
    if absent := sorted(set(range(count)) - set(present)):
        missing, others = (", ".join(map(str, ranks)) for ranks in (absent, present))
        what = f"rank {missing} did not join within {seconds:g} s"
        why = f"present: {others}; absent: {missing}"
        output = "the output of the absent ranks, and whether they reach this address"
        raise PeerLost(what, where=address, why=why, fix=f"look at {output}")


def _meet(address: str, rank: int, count: int, deadline: float, refused: str = "") -> Roll:
    """Return the ranks that are present, and what is wrong; `refused` is a failure of this rank."""
    if rank == 0:
        return _serve(address, count, deadline, refused)
    return _join(address, rank, count, deadline, refused)


def split(address: str) -> tuple[str, int]:
    """Return host and port. Raises CommandError if the text is not both."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        named = address if ":" not in address else host
        what, why = f"{address!r} is not an address", "an address is a host, a colon and a port"
        fix = "name the host of rank 0 and a port that is free there: HOST:PORT"
        if re.fullmatch(r"[\w.-]+|\[[\w.:]+\]", named):
            fix = f"--coordinator={named}:{default_port(named)}    # the same for every process"
        raise CommandError(what, where="--coordinator", why=why, fix=fix)
    return host.strip("[]"), int(port)


def _serve(address: str, count: int, deadline: float, refused: str = "") -> Roll:
    """Rank 0: collect the ranks and send them the result; an error at once and for a while."""
    callers: dict[int, socket.socket] = {}
    unanswered: list[socket.socket] = []
    wrong = f"rank 0 was refused: {refused}" if refused else ""

    def answer(present: list[int]) -> None:
        reply = json.dumps({"present": present, "wrong": wrong})
        for caller in unanswered:
            with contextlib.suppress(OSError):
                caller.sendall(f"{reply}\n".encode())
        unanswered.clear()

    with contextlib.ExitStack() as stack:
        with _listener(address, deadline) as listener:
            while len(callers) < count - 1 and time.monotonic() < deadline:
                listener.settimeout(max(deadline - time.monotonic(), 0.01))
                with contextlib.suppress(OSError):  # a timeout too
                    caller = stack.enter_context(listener.accept()[0])
                    caller.settimeout(SILENCE_SECONDS)
                    message = _receive_line(caller)
                    rank, their_count = message.get("rank"), message.get("count")
                    if not isinstance(rank, int) or not isinstance(their_count, int):
                        continue  # not a process of a run
                    error = ""
                    if their_count != count or not 0 < rank < count:
                        counts = f"one of {their_count}, rank 0 as one of {count}"
                        error = f"rank {rank} was started as {counts}"
                    elif rank in callers and not _is_disconnected(callers[rank]):
                        error = f"two processes have rank {rank}"
                    elif why := message.get("refused"):
                        error = f"rank {rank} was refused: {why}"
                    callers[rank] = caller
                    unanswered.append(caller)
                    if error and not wrong:
                        wrong, deadline = error, min(deadline, time.monotonic() + REPORT_SECONDS)
                    if wrong:
                        answer([0, *callers])
                    elif len(callers) == count - 1:
                        # A rank that died while it waited is absent, and may join again.
                        alive = [rank for rank in callers if not _is_disconnected(callers[rank])]
                        callers = {rank: callers[rank] for rank in alive}
        # The port is free for JAX before any rank learns that all are present.
        present = sorted([0, *callers])
        answer(present)
    return present, wrong


def _join(address: str, rank: int, count: int, deadline: float, refused: str = "") -> Roll:
    """Other ranks: send the rank, and return the result; retry until rank 0 listens."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            with socket.create_connection(split(address), timeout=left) as caller:
                message = {"rank": rank, "count": count, "refused": refused}
                caller.sendall(json.dumps(message).encode() + b"\n")
                caller.settimeout(left + SILENCE_SECONDS)  # rank 0 may have started later
                reply = _receive_line(caller)
            if {"present", "wrong"} <= reply.keys():
                if not reply["wrong"] and len(reply["present"]) == count:
                    _connect(address)
                return reply["present"], reply["wrong"]
        time.sleep(0.1)
    return [rank], ""


def _connect(address: str) -> None:
    """Return once JAX listens at the address: else its first attempt fails and waits a second."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(split(address), timeout=1).close()
            return
        time.sleep(0.05)


def _listener(address: str, deadline: float) -> socket.socket:
    """Listen at the address. A new name, such as a pod's, may not resolve for a while."""
    host, port = split(address)
    while True:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if isinstance(error, socket.gaierror) and time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            what = "the address of the coordinator cannot be used"
            why = f"{type(error).__name__}: {error.strerror}"
            launch = "start the processes with jaxlm launch: it finds a free port"
            raise PeerLost(
                what, where=address, why=why, fix=f"give --coordinator another port\n{launch}"
            ) from error


def _receive_line(caller: socket.socket) -> dict:
    """Return one line of JSON, empty if it is invalid. A list of ranks may be long."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES * 100:
        if not (part := caller.recv(MAX_LINE_BYTES)):
            return {}
        line += part
    with contextlib.suppress(ValueError):
        return value if isinstance(value := json.loads(line), dict) else {}
    return {}


def _is_disconnected(caller: socket.socket) -> bool:
    """Return whether the other end has closed; it sends nothing after its rank."""
    caller.setblocking(False)
    try:
        return caller.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        caller.settimeout(SILENCE_SECONDS)
