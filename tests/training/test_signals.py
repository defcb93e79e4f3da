import os
import random
import signal
import threading
import time
from collections import Counter

import pytest

from jaxlm.data import records
from jaxlm.data.records import ReadBudget
from jaxlm.training.signals import Interrupted, StopRequest


class Signs:
    """One of several ranks that share their signs."""

    def __init__(self, rank: int, count: int, shared: dict[str, str]):
        self.rank, self.count, self.shared = rank, count, shared

    def sign(self, name: str, text: str) -> bool:
        return self.shared.setdefault(name, text) is text


def stops(signals: dict[int, int], *, count: int, steps: int, seed: int) -> list[int]:
    """Steps after which synchronous ranks stop that receive signals at these steps."""
    shared: dict[str, str] = {}
    requests = [StopRequest(Signs(rank, count, shared)) for rank in range(count)]
    together = threading.Barrier(count)
    over = threading.Event()
    ended = [0] * count

    def listen(request: StopRequest, draw: random.Random) -> None:
        while not over.is_set():
            request.on_signs(dict(shared))
            time.sleep(draw.random() * 0.01)

    def work(rank: int, draw: random.Random) -> None:
        for step in range(1, steps + 1):
            requests[rank].enter()
            if signals.get(rank) == step:
                requests[rank].reason = "SIGTERM"
            time.sleep(draw.random() * 0.002)
            together.wait(20)  # the collective of the step needs all ranks
            ended[rank] = step
            if requests[rank].is_due:
                return

    listeners = [
        threading.Thread(target=listen, args=(request, random.Random(seed + 100 + rank)))
        for rank, request in enumerate(requests)
    ]
    workers = [
        threading.Thread(target=work, args=(rank, random.Random(seed + rank)))
        for rank in range(count)
    ]
    for thread in (*listeners, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    for thread in listeners:
        thread.join()
    return ended


@pytest.mark.parametrize("seed", range(12))
def test_a8_all_ranks_stop_after_the_same_step(seed):
    draw = random.Random(seed)
    count = draw.choice([2, 3, 5])
    signals = {draw.randrange(count): draw.randint(1, 20) for _ in range(draw.choice([1, 2]))}
    ended = stops(signals, count=count, steps=5000, seed=seed)
    assert len(set(ended)) == 1
    assert min(signals.values()) <= ended[0] < 5000


def test_a8_a_signal_in_the_last_steps_leaves_nobody_behind():
    for seed in range(5):
        assert stops({1: 6}, count=2, steps=7, seed=seed) == [7, 7]


def test_ranks_without_a_signal_run_to_the_end():
    assert stops({}, count=2, steps=50, seed=0) == [50, 50]


def test_one_process_stops_after_the_step_in_which_the_signal_comes():
    with StopRequest() as stop:
        stop.enter()
        assert not stop.is_due
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_due
        assert stop.reason == "SIGTERM"


def test_a9_the_second_signal_ends_while_the_main_thread_is_busy():
    ended = threading.Event()
    exits = []

    def exit_now(code, cause):
        exits.append((code, cause))
        ended.set()

    with StopRequest(exit_now=exit_now):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        assert not exits
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(2)
    assert exits == [(130, "SIGINT came twice")]


def test_handlers_are_as_before_afterwards():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = threading.active_count()
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before
    assert threading.active_count() == threads


def test_a_stop_while_a_file_is_read_is_no_damage_of_the_file(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')

    def stopped(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return time.sleep(5)

    monkeypatch.setattr(records, "_document", stopped)
    with StopRequest() as stop, pytest.raises(Interrupted), stop.waiting():
        list(records.read(file, file.name, "text", Counter(), ReadBudget(1, 1000)))
