import socket
import threading
import time

import pytest

from jaxlm.core.errors import CommandError, ConfigError, JaxlmError, PeerLost
from jaxlm.parallel import rendezvous
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.training.launch import free_port
from tests import machine

REFUSED = ConfigError("no setting optim.lrr", where="--config.optim.lrr=1", why="", fix="")


def meet(*ranks, count, seconds=1.0, counts=None, refused=()):
    """Return the error of each rank, or None. Some are refused before the rendezvous."""
    address = f"127.0.0.1:{free_port()}"
    errors = {}

    def go(number, rank):
        try:
            claimed = (counts or {}).get(rank, count)
            with rendezvous.report_failure_to_peers(
                ProcessSpec(coordinator=address, count=claimed, rank=rank)
            ):
                if rank in refused:
                    raise REFUSED
            rendezvous.rendezvous(address, rank=rank, count=claimed, seconds=seconds)
            errors[number] = None
        except JaxlmError as error:
            errors[number] = error

    threads = [threading.Thread(target=go, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[number] for number in range(len(ranks))]


@pytest.fixture(autouse=True)
def _no_service(monkeypatch):
    """No JAX comes to listen after these meetings."""
    monkeypatch.setattr(rendezvous, "_connect", lambda _: None)


def test_ranks_that_are_all_there_go_on():
    assert meet(0, 1, 2, count=3) == [None, None, None]


def test_a_rank_alone_needs_nobody():
    assert meet(0, count=1) == [None]


def test_d6_everybody_who_came_hears_who_did_not():
    errors = meet(0, 2, count=4)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.why == "present: 0, 2; absent: 1, 3"


def test_d6_without_the_first_rank_the_others_end_in_time():
    begun = time.monotonic()
    (error,) = meet(1, count=2, seconds=0.5)
    assert isinstance(error, PeerLost)
    assert error.why == "present: 1; absent: 0"
    machine.require_clock(time.monotonic() - begun, 3)


@pytest.mark.parametrize("refused", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_those_who_wait_hear_at_once_that_a_rank_was_refused(refused):
    begun = time.monotonic()
    errors = meet(0, 1, 2, count=3, seconds=60, refused=refused)
    machine.require_clock(time.monotonic() - begun, 8)
    for rank, error in enumerate(errors):
        if rank in refused:
            assert error is REFUSED
        else:
            assert isinstance(error, CommandError)
            assert "was refused: no setting optim.lrr, --config.optim.lrr=1" in error.why


def test_a_rank_that_is_refused_alone_waits_for_nobody_for_long(monkeypatch):
    monkeypatch.setattr(rendezvous, "REPORT_SECONDS", 0.3)
    assert meet(0, count=2, refused=(0,)) == meet(1, count=2, refused=(1,)) == [REFUSED]


def test_two_processes_of_one_rank_are_refused():
    errors = meet(0, 1, 1, count=3)
    assert all(isinstance(error, CommandError) for error in errors), (
        "each got an error, none waited to the end"
    )
    assert "two processes have rank 1" in errors[0].why


def test_ranks_that_disagree_about_their_number_are_refused():
    errors = meet(0, 1, count=3, counts={1: 2})
    assert all(isinstance(error, CommandError) for error in errors)
    assert "rank 1 was started as one of 2" in errors[0].why


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1}\n', b'{"rank": "1", "count": 2}\n', b"\xff\n"],
)
def test_a_stranger_at_the_door_is_no_rank(sent):
    address = f"127.0.0.1:{free_port()}"
    errors = []

    def go():
        try:
            rendezvous.rendezvous(address, rank=0, count=2, seconds=0.8)
        except PeerLost as error:
            errors.append(error.why)

    thread = threading.Thread(target=go)
    thread.start()
    time.sleep(0.2)
    with socket.create_connection(rendezvous.split(address)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(10) == b"", "it got no answer"
    thread.join()
    assert errors == ["present: 0; absent: 1"]


def test_a_rank_that_died_while_it_waited_may_come_again():
    address = f"127.0.0.1:{free_port()}"
    errors = []

    def go(rank):
        rendezvous.rendezvous(address, rank=rank, count=3, seconds=30)
        errors.append(rank)

    first = threading.Thread(target=go, args=(0,))
    first.start()
    time.sleep(0.2)
    with socket.create_connection(rendezvous.split(address)) as dead:
        dead.sendall(b'{"rank": 1, "count": 3}\n')
        time.sleep(0.2)
    threads = [first, *(threading.Thread(target=go, args=(rank,)) for rank in (2, 1))]
    for thread in threads[1:]:
        thread.start()
        time.sleep(0.2)  # the other one completes the number while the dead one is still counted
    for thread in threads:
        thread.join()
    assert sorted(errors) == [0, 1, 2]


def test_an_address_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerLost) as caught:
            rendezvous.rendezvous(address, rank=0, count=2, seconds=1)
    assert "in use" in caught.value.why


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:0", "host:70000"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(CommandError):
        rendezvous.split(text)
