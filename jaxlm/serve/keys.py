"""Keys of clients: a file of sha256 digests that its owner alone can read.

Each line is `DIGEST NAME`. The keys themselves are stored nowhere. A server reads the file again if
it changes.
"""

import hashlib
import hmac
import os
import secrets
import shlex
import stat
from pathlib import Path

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, DataError, InputMissing, JaxlmError, cannot_write

DIGEST_LETTERS = 64


def digest_of(key: str) -> str:
    """Return the digest that the file has of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def add_key(path: Path, name: str = "") -> str:
    """Return a new key, whose digest is added to the file."""
    key = f"jaxlm-{secrets.token_urlsafe(32)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{digest_of(key)} {name or secrets.token_hex(4)}\n")
    except OSError as error:
        raise cannot_write("the file of keys", path, error, fix="--keys=keys.txt") from error
    return key


def read_keys(path: Path) -> dict[str, str]:
    """Return the name of each digest of a file.

    Raises InputMissing if there is no file, CommandError if others can read it, DataError if a line
    has no digest.
    """
    names: dict[str, str] = {}
    add = _add_command(path)
    try:
        mode = path.stat().st_mode
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        what, why = "there is no file of keys", f"{type(error).__name__}: {error.strerror}"
        raise InputMissing(what, where=f"--keys={path}", why=why, fix=add) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        what, why = "others can read the file of keys", f"its mode is {stat.S_IMODE(mode):04o}"
        fix = f"chmod 600 {shlex.quote(str(path))}"
        raise CommandError(what, where=f"--keys={path}", why=why, fix=fix)
    for number, line in enumerate(lines, 1):
        digest, _, name = line.strip().partition(" ")
        if not digest or digest.startswith("#"):
            continue
        if len(digest) != DIGEST_LETTERS or not set(digest) <= set("0123456789abcdef"):
            what, why = "a line of the file of keys has no digest", "it begins with no sha256"
            raise DataError(what, where=f"{path}:{number}", why=why, fix=add)
        names[digest] = name or f"key {number}"
    return names


def _add_command(path: Path) -> str:
    return f"jaxlm serve {shlex.quote(f'--keys={path}')} --add_key"


class ApiKeys:
    """The keys that are accepted. An empty set, without a file, accepts every request.

    The file is read again when it has changed. One that cannot be read, or that others can read,
    leaves the keys as they are; one without keys accepts none.

    Args:
      path: the file; None without keys.
      log: receives a line when the file has changed.

    Raises the errors of `read_keys`, and DataError if the file has no key at the start.
    """

    def __init__(self, path: Path | None, log: Log = lambda _: None):
        self._path, self._log = path, log
        self._stamp = _stamp(path)
        self._names = {} if path is None else read_keys(path)
        if path is not None and not self._names:
            what, why = "the file of keys is empty", "no client could be answered"
            raise DataError(what, where=str(path), why=why, fix=_add_command(path))

    def __bool__(self) -> bool:
        return self._path is not None

    def _refresh(self) -> None:
        if self._path is None or (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._names = read_keys(self._path)
        except JaxlmError as error:
            self._log(f"the keys are those of before: {error.what} ({error.why})")
        else:
            self._log(f"the file of keys has changed: {len(self._names)} keys")

    def name_of(self, authorization: str) -> str | None:
        """Return the name of the key of a header `Bearer KEY`, None if it is not accepted.

        Each digest is compared in constant time, and all are compared.
        """
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        digest = digest_of(key.strip())
        accepted = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest) and scheme.lower() == "bearer":
                accepted = name
        return accepted


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return what changes with the content or the mode of a file; None without one."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return status and (status.st_ino, status.st_ctime_ns, status.st_size)
