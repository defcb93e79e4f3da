"""The processes of a run: start, barriers, comparison of facts, and messages between ranks."""

import ipaddress
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import distributed  # here alone; the client of the service has no public name yet

from jaxlm.core import faults
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, PeerLost
from jaxlm.parallel import rendezvous

RERUN_FIX = "run the same command again: it resumes from the last committed step"
ROOT = "jaxlm"
SIGNS = f"{ROOT}/signs/"
MAX_SHARED = 8  # values of a name that stay stored
_LOSS = re.compile(r"(Gloo|NCCL|coordination).*(connect|reset|closed|timed out|abort)", re.I | re.S)


class Peers:
    """The ranks of a run, one of them this process; rank 0 of 1 is a run of one process."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count
        self._barriers = itertools.count()
        self._calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    @property
    def is_first(self) -> bool:
        """True on the rank that writes the files of the run."""
        return self.rank == 0

    def barrier(self, name: str, seconds: float) -> None:
        """Wait until every rank has called this as often. Raises PeerLost at the timeout."""
        if self.count == 1:
            return
        key = f"{ROOT}/{name}/{next(self._barriers)}"
        try:
            self._client.wait_at_barrier(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise _lost(f"not every rank reached {name!r} within {seconds:g} s", error) from error

    def agree(self, name: str, facts: dict[str, Any], seconds: float) -> None:
        """Raise ConfigError on every rank if facts differ between ranks; PeerLost at a timeout."""
        if self.count == 1:
            return
        key = f"{ROOT}/facts/{name}"
        self._client.key_value_set(f"{key}/{self.rank}", json.dumps(facts, sort_keys=True))
        first, *others = self._get_all(key, name, seconds)
        differences = [d for rank, other in enumerate(others, 1) for d in _diff(rank, first, other)]
        if count := len(differences):
            more = [f"and {count - 6} more"] if count > 6 else []
            what = f"the ranks of this run differ in their {name}"
            where = f"{count} difference{'s' if count > 1 else ''} from rank 0"
            why, same = "\n".join([*differences[:6], *more]), "the same command, code and files"
            raise ConfigError(what, where=where, why=why, fix=f"start every rank with {same}")

    def share(self, name: str, value: Any, seconds: float) -> Any:
        """Return the first rank's value, via JSON. Ranks must call this equally often by name."""
        if self.count == 1:
            return value
        key, number = f"{ROOT}/shared/{name}", next(self._calls[name])
        if self.is_first:
            self._client.key_value_set(f"{key}/{number}", json.dumps(value))
            # Ranks are at most a step apart, so no rank still reads the old values.
            if number >= MAX_SHARED:
                self._client.key_value_delete(f"{key}/{number - MAX_SHARED}")
        return self._get(f"{key}/{number}", seconds, f"the first rank did not send its {name}")

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Return every rank's value after a round trip through JSON, on the first rank.

        The others return an empty list at once. Every rank must call this as often with each name,
        from any thread. Raises PeerLost at the timeout.
        """
        if self.count == 1:
            return [value]
        key = f"{ROOT}/gathered/{name}/{next(self._calls[name])}"
        self._client.key_value_set(f"{key}/{self.rank}", json.dumps(value))
        if not self.is_first:
            return []
        values = self._get_all(key, name, seconds)
        self._client.key_value_delete(f"{key}/")
        return values

    def sign(self, name: str, text: str, *, overwrite: bool = False) -> bool:
        """Set a sign, a short text that every rank can read; return False without `overwrite`."""
        if self.count == 1:
            return True
        try:
            self._client.key_value_set(SIGNS + name, text, allow_overwrite=overwrite)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def signs(self) -> dict[str, str]:
        """Return the signs so far. Raises PeerLost if the coordinator does not answer."""
        if self.count == 1:
            return {}
        try:
            signs = self._client.key_value_dir_get(SIGNS)
        except jax.errors.JaxRuntimeError as error:
            raise _lost("the coordinator of the run does not answer", error) from error
        return {key.removeprefix(SIGNS): text for key, text in signs}

    def close(self) -> None:
        """Leave, as every rank must; otherwise JAX waits for the others when the process ends."""
        if self.count > 1:
            jax.distributed.shutdown()
            self.count = 1

    def _get_all(self, key: str, name: str, seconds: float) -> list[Any]:
        """Return the value of every rank under a key."""
        missing = f"did not send its {name}"
        ranks = range(self.count)
        return [self._get(f"{key}/{rank}", seconds, f"rank {rank} {missing}") for rank in ranks]

    def _get(self, key: str, seconds: float, failure: str) -> Any:
        """Return a value from the store, or raise PeerLost with a text of the failure."""
        try:
            return json.loads(self._client.blocking_key_value_get(key, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise _lost(f"{failure} within {seconds:g} s", error) from error

    @property
    def _client(self) -> Any:
        return distributed.global_state.client


def start(
    address: str,
    *,
    rank: int,
    count: int,
    devices: Sequence[int] | None = None,
    join_seconds: float = 300,
    heartbeat_seconds: float = 100,
    say: Log = print,
) -> Peers:
    """Join the other ranks at an address of rank 0, which listens only there.

    Raises PeerLost at the timeout, with the ranks that are present and absent; CommandError if the
    ranks contradict each other.

    Args:
      address: host and port of the coordinator.
      rank, count: number of this process, and of all.
      devices: local GPUs of this process; all by default.
      join_seconds, heartbeat_seconds: timeout of the rendezvous; after this silence a rank is lost.
      `say`: prints a warning.
    """
    faults.rank = rank
    if rank == 0 and not _is_loopback(rendezvous.split(address)[0]):
        risk = "any host that reaches it can stop this run or change its messages"
        unsafe = "without encryption or a password"
        say(f"warning: the coordinator listens on {address} {unsafe}; {risk}")
    rendezvous.rendezvous(address, rank=rank, count=count, seconds=join_seconds)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's handler would replace the signal handler that saves a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        count,
        rank,
        local_device_ids=devices,
        coordinator_bind_address=address,
        initialization_timeout=max(int(join_seconds), 60),
        heartbeat_timeout_seconds=max(int(heartbeat_seconds), 1),
        cluster_detection_method="deactivate",
    )
    return Peers(rank, count)


def is_loss(error: BaseException) -> bool:
    """Return True if an exception of a computation means that another process is lost."""
    # JAX has no type for them: a step that is not dispatched in the background raises ValueError.
    raised = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    return raised and bool(_LOSS.search(str(error)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _diff(rank: int, first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {first.get(name, 'nothing')!s:.80} on rank 0, "
        f"{other.get(name, 'nothing')!s:.80} on rank {rank}"
        for name in sorted(first | other)
        if first.get(name) != other.get(name)
    ]


def _lost(what: str, error: Exception) -> PeerLost:
    why = str(error).partition("\n")[0]
    return PeerLost(what, where="the coordination service", why=why, fix=RERUN_FIX)
