"""Several ranks in one process: `Peers` over a dictionary as the coordination service."""

import threading
from collections.abc import Callable
from typing import Any

from jaxlm.parallel.peers import Peers


class Service:
    """The part of the coordination service's client that values are exchanged by."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, min(milliseconds / 1000, 30))
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for each in [each for each in self.values if each == key or each.startswith(key)]:
                del self.values[each]


class Rank(Peers):
    """One of the ranks that share a service."""

    def __init__(self, rank: int, count: int, service: Service):
        super().__init__(rank, count)
        self._service = service

    @property
    def _client(self) -> Any:
        return self._service


def together(count: int, act: Callable[[Peers], Any]) -> tuple[list[Any], Service]:
    """Results of `count` ranks, and the service that they shared."""
    service, answers = Service(), [None] * count

    def run(rank: int) -> None:
        answers[rank] = act(Rank(rank, count, service))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers, service
