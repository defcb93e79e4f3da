"""The ranks of a run meet before JAX starts.

JAX ends the process without an exception where a rank does not come in time. Here the wait is ours: who is missing is
said by name, on every rank that is there, and a rank that is refused before they meet says why to those who wait for it.
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
from jaxlm.parallel.cluster import port as free_port

MAX_LINE_BYTES = 1024  # bytes of what a rank says of itself
FAILURE_PREFIX = 200  # letters of why it cannot come
PATIENCE_SECONDS = 2.0  # with a caller that says nothing
REPORT_SECONDS = 10.0  # that a rank which cannot come waits for those it has to tell


@contextlib.contextmanager
def report_failure_to_peers(place: ProcessSpec) -> Iterator[None]:
    """For what may refuse a rank before it meets the others: they hear of it, and do not wait for the one that is gone."""
    try:
        yield
    except JaxlmError as error:
        if place.coordinator is not None and place.rank is not None and place.count is not None:
            why = f"{error.what}, {error.where}"[:FAILURE_PREFIX]
            print(f"{why}: telling the other processes", file=sys.stderr)
            deadline = time.monotonic() + REPORT_SECONDS
            with contextlib.suppress(JaxlmError):  # nobody is there to hear it
                if place.rank == 0:
                    _join(place.coordinator, place.count, deadline, why)
                else:
                    _serve(place.coordinator, place.rank, place.count, deadline, why)
        raise


def rendezvous(address: str, *, rank: int, count: int, seconds: float) -> None:
    """Returns on every rank once all of them are there.

    Raises:
      PeerLost: where one has not come in time, on all that have; or where the address cannot be bound.
      CommandError: where two give the same rank, they disagree about how many they are, or one was refused.
    """
    deadline = time.monotonic() + seconds
    if rank == 0:
        present, wrong = _join(address, count, deadline)
    else:
        present, wrong = _serve(address, rank, count, deadline)
    if wrong:
        raise CommandError(
            "the processes of this run do not fit together",
            where=address,
            why=wrong,
            fix="start each with the same command, code and --num_processes, and its own --process_id",
        )
    absent = sorted(set(range(count)) - set(present))
    if absent:
        raise PeerLost(
            f"rank {_format_ranks(absent)} did not come within {seconds:g} s",
            where=address,
            why=f"present: {_format_ranks(present)}; absent: {_format_ranks(absent)}",
            fix="look at what the absent ranks said, and whether they reach this address",
        )


def split(address: str) -> tuple[str, int]:
    """Host and port. Raises CommandError where the text is not both."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        named = address if ":" not in address else host
        raise CommandError(
            f"{address!r} is no address",
            where="--coordinator",
            why="it needs a host, a colon and a port",
            fix=f"--coordinator={named}:{free_port(named)}    # the same for every process"
            if re.fullmatch(r"[\w.-]+|\[[\w.:]+\]", named)
            else "name the host of rank 0 and a port that is free there: HOST:PORT",
        )
    return host.strip("[]"), int(port)


def _join(address: str, count: int, deadline: float, refused: str = "") -> tuple[list[int], str]:
    """Rank 0: hears who is there, and tells it to all once they are; at once that something is wrong, its own refusal too.

    Whoever comes later is told for some seconds more.
    """
    callers: dict[int, socket.socket] = {}
    untold: list[socket.socket] = []
    wrong = f"rank 0 was refused: {refused}" if refused else ""

    def tell(present: list[int]) -> None:
        for caller in untold:
            with contextlib.suppress(OSError):
                _send(caller, {"present": present, "wrong": wrong})
        untold.clear()

    with contextlib.ExitStack() as stack:
        with _listener(address, deadline) as listener:
            while len(callers) < count - 1 and time.monotonic() < deadline:
                listener.settimeout(max(deadline - time.monotonic(), 0.01))
                with contextlib.suppress(OSError):  # a timeout too
                    caller = stack.enter_context(listener.accept()[0])
                    caller.settimeout(PATIENCE_SECONDS)
                    name = _receive_line(caller)
                    rank = name.get("rank")
                    if not isinstance(rank, int) or not isinstance(name.get("count"), int):
                        continue  # a stranger
                    found = ""
                    if name["count"] != count or not 0 < rank < count:
                        found = f"rank {rank} was started as one of {name['count']}, rank 0 as one of {count}"
                    elif rank in callers and not _is_disconnected(callers[rank]):
                        found = f"two processes say that they are rank {rank}"
                    elif why := name.get("refused"):
                        found = f"rank {rank} was refused: {why}"
                    callers[rank] = caller
                    untold.append(caller)
                    if found and not wrong:
                        wrong, deadline = found, min(deadline, time.monotonic() + REPORT_SECONDS)
                    if wrong:
                        tell([0, *callers])
                    elif len(callers) == count - 1:
                        # One that died while it waited is not there, and may come again.
                        callers = {
                            rank: c for rank, c in callers.items() if not _is_disconnected(c)
                        }
        # The port is free for JAX before anybody hears that all are there.
        present = sorted([0, *callers])
        tell(present)
    return present, wrong


def _serve(
    address: str, rank: int, count: int, deadline: float, refused: str = ""
) -> tuple[list[int], str]:
    """Another rank: gives its name, and hears who else is there. Comes again where rank 0 has not begun yet."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            with socket.create_connection(split(address), timeout=left) as caller:
                _send(caller, {"rank": rank, "count": count, "refused": refused})
                caller.settimeout(left + PATIENCE_SECONDS)  # rank 0 may have begun to wait later
                heard = _receive_line(caller)
            if {"present", "wrong"} <= heard.keys():
                if not heard["wrong"] and len(heard["present"]) == count:
                    _connect(address)
                return heard["present"], heard["wrong"]
        time.sleep(0.1)
    return [rank], ""


def _connect(address: str) -> None:
    """Returns once JAX listens where rank 0 did, so that JAX's first attempt is not refused and put off for a second."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(split(address), timeout=1).close()
            return
        time.sleep(0.05)


def _listener(address: str, deadline: float) -> socket.socket:
    """Listens there. A name may be so new that it is known only in a while, as a pod's is."""
    host, port = split(address)
    while True:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if isinstance(error, socket.gaierror) and time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            raise PeerLost(
                "the address of the coordinator cannot be used",
                where=address,
                why=f"{type(error).__name__}: {error.strerror}",
                fix="give --coordinator another port\nstart the processes with jaxlm launch: it finds a free port",
            ) from error


def _send(caller: socket.socket, value: dict) -> None:
    caller.sendall(json.dumps(value).encode() + b"\n")


def _receive_line(caller: socket.socket) -> dict:
    """One line of JSON; nothing where it is none. A list of ranks may be long, what a rank says of itself may not."""
    heard = b""
    while not heard.endswith(b"\n") and len(heard) < MAX_LINE_BYTES * 100:
        part = caller.recv(MAX_LINE_BYTES)
        if not part:
            return {}
        heard += part
    with contextlib.suppress(ValueError):
        value = json.loads(heard)
        return value if isinstance(value, dict) else {}
    return {}


def _is_disconnected(caller: socket.socket) -> bool:
    """Whether the other end has closed; it says nothing after its name."""
    caller.setblocking(False)
    try:
        return caller.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        caller.settimeout(PATIENCE_SECONDS)


def _format_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
