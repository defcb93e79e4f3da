"""The processes of a run: how they start, wait for each other, compare what they were given, and tell bad news.

The only file that touches JAX's coordination service, whose client has no public name yet.
"""

import ipaddress
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import distributed

from jaxlm.core import faults
from jaxlm.core.errors import ConfigError, PeerLost
from jaxlm.parallel import rendezvous

AGAIN = "run the same command again: it goes on from the last committed step"
ROOT = "jaxlm"
SIGNS = f"{ROOT}/signs/"
SHARED_KEPT = 8
_GONE = re.compile(r"(Gloo|NCCL|coordination).*(connect|reset|closed|timed out|abort)", re.I | re.S)


class Peers:
    """The ranks of a run, this process being one of them. Rank 0 of 1 is a run of one process, which waits for nobody.

    A sign is a short text under a name that every rank can read at any time.
    """

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count
        self._numbers = itertools.count()
        self._shared: Counter[str] = Counter()

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run writes once."""
        return self.rank == 0

    def barrier(self, name: str, seconds: float) -> None:
        """Returns once every rank has called it as many times. Raises PeerLost where one has not come in time."""
        if self.count == 1:
            return
        try:
            self._client.wait_at_barrier(
                f"{ROOT}/{name}/{next(self._numbers)}", int(seconds * 1000)
            )
        except jax.errors.JaxRuntimeError as error:
            raise _lost(f"not every rank came to {name!r} within {seconds:g} s", error) from error

    def agree(self, name: str, facts: dict[str, Any], seconds: float) -> None:
        """Compares what the ranks know, before anything is computed with it.

        Raises:
          ConfigError: on every rank, where they differ; shows the differences.
          PeerLost: where one has not said it in time.
        """
        if self.count == 1:
            return
        place = f"{ROOT}/facts/{name}"
        self._client.key_value_set(f"{place}/{self.rank}", json.dumps(facts, sort_keys=True))
        told = []
        for rank in range(self.count):
            try:
                text = self._client.blocking_key_value_get(f"{place}/{rank}", int(seconds * 1000))
            except jax.errors.JaxRuntimeError as error:
                raise _lost(
                    f"rank {rank} did not tell its {name} within {seconds:g} s", error
                ) from error
            told.append(json.loads(text))
        differences = [
            line for rank, other in enumerate(told) for line in _diff(rank, told[0], other)
        ]
        if differences:
            count = len(differences)
            more = [f"and {count - 6} more"] if count > 6 else []
            raise ConfigError(
                f"the ranks of this run do not have the same {name}",
                where=f"{count} difference{'s' if count > 1 else ''} from rank 0",
                why="\n".join([*differences[:6], *more]),
                fix="start every rank with the same command, code and files",
            )

    def share(self, name: str, value: Any, seconds: float) -> Any:
        """The first rank's value, as JSON keeps it; every rank must call it as many times with each name.

        Raises:
          PeerLost: where the value has not come in time.
        """
        if self.count == 1:
            return value
        number = self._shared[name]
        self._shared[name] += 1
        place = f"{ROOT}/shared/{name}"
        if self.is_first:
            self._client.key_value_set(f"{place}/{number}", json.dumps(value))
            # Ranks are a step apart at most, so nobody reads the old ones any more.
            if number >= SHARED_KEPT:
                self._client.key_value_delete(f"{place}/{number - SHARED_KEPT}")
        try:
            text = self._client.blocking_key_value_get(f"{place}/{number}", int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise _lost(
                f"the first rank did not tell its {name} within {seconds:g} s", error
            ) from error
        return json.loads(text)

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Return every rank's value, as JSON keeps it, in the order of the ranks, on the first rank.

        The others return an empty list at once. Every rank must call it as many times with each name; any thread may.

        Raises:
          PeerLost: if a value has not come in time.
        """
        if self.count == 1:
            return [value]
        number = self._shared[name]
        self._shared[name] += 1
        place = f"{ROOT}/gathered/{name}/{number}"
        self._client.key_value_set(f"{place}/{self.rank}", json.dumps(value))
        if not self.is_first:
            return []
        values = []
        for rank in range(self.count):
            try:
                text = self._client.blocking_key_value_get(f"{place}/{rank}", int(seconds * 1000))
            except jax.errors.JaxRuntimeError as error:
                raise _lost(f"rank {rank} did not send its {name} in time", error) from error
            values.append(json.loads(text))
        self._client.key_value_delete(f"{place}/")
        return values

    def sign(self, name: str, text: str, *, again: bool = False) -> bool:
        """Sets a sign, once, or again and again; whether it is set now and was not before."""
        if self.count == 1:
            return True
        try:
            self._client.key_value_set(SIGNS + name, text, allow_overwrite=again)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def signs(self) -> dict[str, str]:
        """The signs so far. Raises PeerLost where the process that keeps them does not answer."""
        if self.count == 1:
            return {}
        try:
            found = self._client.key_value_dir_get(SIGNS)
        except jax.errors.JaxRuntimeError as error:
            raise _lost("the coordinator of the run does not answer", error) from error
        return {key.removeprefix(SIGNS): text for key, text in found}

    def close(self) -> None:
        """Leaves; every rank must be about to. Without it, JAX waits for the others when the interpreter ends."""
        if self.count > 1:
            jax.distributed.shutdown()
            self.count = 1

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
    say: Callable[[str], None] = print,
) -> Peers:
    """Meets the other ranks at an address of rank 0, which listens there and nowhere else.

    `devices` are the GPUs of this host that are this process's; None is all of them.

    Raises:
      PeerLost: where one has not come in time; names those who have, and those who have not.
      CommandError: where they do not fit together.
    """
    faults.rank = rank
    if rank == 0 and not _is_loopback(rendezvous.split(address)[0]):
        say(
            f"warning: the coordinator listens on {address} without encryption or a password; whoever reaches it can "
            "stop this run or change what its processes tell each other"
        )
    rendezvous.rendezvous(address, rank=rank, count=count, seconds=join_seconds)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler would take the place of the one that saves.
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
    """Return whether an exception of a computation says that another process is gone.

    They have no type of their own: a step that is not dispatched in the background raises some of
    them as ValueError.
    """
    raised = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    return raised and bool(_GONE.search(str(error)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _diff(rank: int, first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {first.get(name, 'nothing')!s:.80} on rank 0, {other.get(name, 'nothing')!s:.80} on rank {rank}"
        for name in sorted(first | other)
        if first.get(name) != other.get(name)
    ]


def _lost(what: str, error: Exception) -> PeerLost:
    return PeerLost(
        what,
        where="the coordination service",
        why=str(error).partition("\n")[0],
        fix=AGAIN,
    )
