"""Exclusive lock of a run directory."""

import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from jaxlm.core.errors import ANOTHER, InUse

NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)  # a filesystem without flock
PERIODS = 3  # of its heartbeat, after which a lease is stale


class Lock:
    """An exclusive lock on a directory: `flock`, or on filesystems without it a renewed lease.

    The kernel releases a `flock` when its process ends. A lease can outlive its owner. Another
    process takes it over if its heartbeat, the modification time of the lock file, is older than
    three periods and does not change for three more periods of a monotonic clock; the clock that
    dates files may have been set. In both cases the file contains the owner's name and fencing id,
    and `is_owner` reads them: a process that lost its lease while it was suspended must not commit.
    """

    def __init__(
        self,
        path: Path,
        *,
        period_seconds: float = 10.0,
        flock: Callable[[int, int], None] = fcntl.flock,
    ):
        self.path = path
        self.fence = uuid.uuid4().hex
        self._period, self._flock = period_seconds, flock
        self._file: int | None = None
        self._closing = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
          InUse: if another process holds it; names its host and start.
          OSError: if the file cannot be created.
        """
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused("") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self._take_lease()
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        owner = f"pid {os.getpid()} on {socket.gethostname()} since {since}\n{self.fence}\n"
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, owner.encode(), 0)

    def is_owner(self) -> bool:
        """True while the lock file contains this process's fencing id."""
        try:
            return self.fence in self.path.read_text().splitlines()
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock; a second call has no effect."""
        if self._file is None:
            return
        self._closing.set()
        if self._heart:
            self._heart.join()
            if self.is_owner():
                with contextlib.suppress(OSError):
                    os.truncate(self.path, 0)
        os.close(self._file)
        self._file = None

    def _take_lease(self) -> None:
        """Take over a lease that no process renews, and renew it from now on."""
        assert self._file is not None
        if os.fstat(self._file).st_size:
            age = self._filesystem_now() - os.fstat(self._file).st_mtime
            if 0 <= age < PERIODS * self._period or self._is_renewed():
                raise self._refused(f"\nits last heartbeat is {max(age, 0):.0f} s old")
        self._heart = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._heart.start()

    def _is_renewed(self) -> bool:
        """Return whether the lease is renewed within three periods."""
        assert self._file is not None
        before, start = os.fstat(self._file).st_mtime_ns, time.monotonic()
        while time.monotonic() - start < PERIODS * self._period:
            time.sleep(self._period / 4)
            if os.fstat(self._file).st_mtime_ns != before:
                return True
        return False

    def _beat(self) -> None:
        while not self._closing.wait(self._period):
            if self.is_owner():
                os.utime(self.path)

    def _filesystem_now(self) -> float:
        """Return the time of the clock that dates files, which may be another machine's."""
        probe = self.path.with_name(f".{self.path.name}.{self.fence}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now

    def _refused(self, more: str) -> InUse:
        assert self._file is not None
        error = _in_use(self.path, self._file, more)
        os.close(self._file)
        self._file = None
        return error


def check_free(path: Path) -> None:
    """Raise InUse if another process holds the `flock` on this lock file.

    The lock is not acquired. This refuses a process before it imports JAX if a run uses the
    directory; `Lock.acquire` checks a lease.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, file) from None
    except OSError:
        return  # a filesystem without flock
    finally:
        os.close(file)


def _in_use(path: Path, file: int, more: str = "") -> InUse:
    owner = os.pread(file, 4096, 0).decode(errors="replace").partition("\n")[0]
    return InUse(
        "another process is using this run directory",
        where=str(path.parent),
        why=(owner or "its owner has not written its name yet") + more,
        fix=ANOTHER,
    )
