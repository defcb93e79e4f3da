"""A pass that does not end fails /health, then ends the process."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from jaxlm.core.errors import Stalled
from jaxlm.serve import watchdog
from jaxlm.serve.bridge import Bridge


class Engine:
    """An engine with one request, whose ticks take as long as `open` is clear."""

    is_idle = False

    def __init__(self):
        self.open = threading.Event()
        self.ticks = 0

    def tick(self):
        self.ticks += 1
        self.open.wait(10)
        time.sleep(0.001)

    def wake(self):
        pass

    def end_all(self, reason):
        pass


@pytest.fixture
def bridge():
    loop = asyncio.new_event_loop()
    built = Bridge(loop)
    built.engine = Engine()
    thread = threading.Thread(target=built.run)
    thread.start()
    yield built
    built.engine.open.set()
    built.stop()
    thread.join()
    loop.close()


def test_v27_a_pass_that_does_not_end_is_not_ready_before_the_process_ends(bridge):
    errors, states, ended = [], [], threading.Event()

    def on_stall(error):
        states.append(bridge.is_stuck)
        errors.append(error)
        ended.set()

    with watchdog.watch(bridge, 1.0, Path("runs/a"), on_stall):
        while not bridge.is_stuck:
            time.sleep(0.01)
        assert not errors
        assert not bridge.is_ready
        assert ended.wait(20)
    assert isinstance(errors[0], Stalled)
    assert "a pass of the model has not ended" in str(errors[0])
    assert errors[0].fix == "jaxlm serve --workdir=runs/a"
    assert states == [True]


def test_passes_that_end_are_never_stuck(bridge):
    errors = []
    bridge.engine.open.set()
    with watchdog.watch(bridge, 0.2, Path("runs/a"), errors.append):
        time.sleep(0.5)
        assert bridge.is_ready
    assert bridge.engine.ticks > 1
    assert errors == []


def test_v27_the_exit_code_is_that_of_a_stall(monkeypatch, capfd):
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    watchdog.end_process(Stalled("a pass", where="here", why="it waits", fix="start it again"))
    assert codes == [76]
    assert "a pass" in capfd.readouterr().err
