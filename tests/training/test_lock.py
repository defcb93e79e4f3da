"""Lines B9 and B10: one owner at a time, where the filesystem has locks and where it has none."""

import errno
import os
import subprocess
import sys
import time

import pytest

from jaxlm.core.errors import InUse
from jaxlm.training.lock import Lock
from tests import machine


def has_no_flock(*_):
    raise OSError(errno.ENOTSUP, "no locks here")


def test_the_second_is_refused_with_the_name_of_the_first(tmp_path):
    first = Lock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(InUse, match="another process") as caught:
        Lock(tmp_path / "lock").acquire()
    assert f"pid {os.getpid()}" in caught.value.why
    assert first.is_owner()
    first.release()
    second = Lock(tmp_path / "lock")
    second.acquire()
    assert second.is_owner()
    assert not first.is_owner(), "it reads the other's fencing id"
    second.release()


def test_b10_a_lock_of_a_killed_process_is_free_at_once(tmp_path):
    code = (
        "from jaxlm.training.lock import *; "
        f"Lock(Path({str(tmp_path / 'lock')!r})).acquire(); print(1, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        with pytest.raises(InUse):
            Lock(tmp_path / "lock").acquire()
    finally:
        process.kill()
        process.communicate()
    begun = time.monotonic()
    lock = Lock(tmp_path / "lock")
    lock.acquire()
    machine.require_clock(time.monotonic() - begun, 1)
    lock.release()


def lease(path, period=0.1):
    return Lock(path, period_seconds=period, flock=has_no_flock)


def test_b10_a_lease_is_taken_over_only_three_heartbeats_after_the_last(tmp_path):
    held = lease(tmp_path / "lock")
    held.acquire()
    time.sleep(0.5)
    with pytest.raises(InUse) as caught:
        lease(tmp_path / "lock").acquire()
    assert "heartbeat" in caught.value.why
    # Its process dies: the file stays, and no process renews the lease.
    held._closing.set()
    held._heart.join()
    os.utime(tmp_path / "lock")
    with pytest.raises(InUse):
        lease(tmp_path / "lock").acquire()
    time.sleep(0.35)
    heir = lease(tmp_path / "lock")
    heir.acquire()
    assert heir.is_owner()
    assert not held.is_owner(), "what it would commit is refused"
    heir.release()


@pytest.mark.parametrize("hours", [-1, 1])
def test_d10_a_clock_that_is_set_takes_no_lease_from_its_owner_and_keeps_none_for_the_dead(
    tmp_path, monkeypatch, hours
):
    """The clock of the filesystem is set by an hour after the last heartbeat."""
    filesystem_now = Lock._filesystem_now
    monkeypatch.setattr(Lock, "_filesystem_now", lambda self: filesystem_now(self) + hours * 3600)
    held = lease(tmp_path / "lock")
    held.acquire()
    time.sleep(0.2)
    with pytest.raises(InUse):
        lease(tmp_path / "lock").acquire()
    assert held.is_owner()
    held._closing.set()
    held._heart.join()
    begun = time.monotonic()
    heir = lease(tmp_path / "lock")
    heir.acquire()
    waited = time.monotonic() - begun
    assert waited >= 0.3
    machine.require_clock(waited, 5)
    assert heir.is_owner()
    heir.release()


def test_a_lease_that_was_given_back_is_free_at_once(tmp_path):
    first = lease(tmp_path / "lock", period=60)
    first.acquire()
    first.release()
    second = lease(tmp_path / "lock", period=60)
    second.acquire()
    second.release()


def test_any_other_error_of_flock_is_no_lease(tmp_path):
    def broken(*_):
        raise OSError(errno.EIO, "disk error")

    with pytest.raises(OSError, match="disk error"):
        Lock(tmp_path / "lock", flock=broken).acquire()
