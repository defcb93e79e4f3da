"""What keeps a run from hanging: its peers, a watch, the way to stop and the way to end."""

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import faults
from jaxlm.core.callbacks import Log
from jaxlm.monitor.config import WatchConfig
from jaxlm.monitor.watchdog import VERIFY, Watchdog
from jaxlm.parallel import peers
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.parallel.peers import Peers
from jaxlm.training.launch import FOLDER
from jaxlm.training.shutdown import Shutdown
from jaxlm.training.signals import StopRequest


class ProcessGroup:
    """The processes of a run and what watches over this one.

    Entered, it has met the others. Left by an exception, it ends all of them, unless `depart` came before.
    """

    def __init__(self, config: WatchConfig, place: ProcessSpec, *, workdir: Path):
        self._config, self.place, self._workdir = config, place, workdir
        self._open = contextlib.ExitStack()
        self._told = ""  # what this rank has said to be busy with
        self._busy: dict[str, tuple[str, float]] = {}  # what each peer has, and since when we know

    def __enter__(self) -> Self:
        config, place = self._config, self.place
        limits = config.limits()
        folder = os.environ.get(FOLDER)
        if place.coordinator is None or place.rank is None or place.count is None:
            self.peers = Peers()
        else:
            self.peers = peers.start(
                place.coordinator,
                rank=place.rank,
                count=place.count,
                devices=place.devices,
                join_seconds=limits["join"],
                heartbeat_seconds=limits["heartbeat"],
                say=lambda text: print(text, file=sys.stderr, flush=True),
            )
        rank = self.peers.rank

        def report(name: str) -> Path | None:
            return Path(folder) / f"{rank}.{name}" if folder else None

        self.ending = Shutdown(
            self.peers, stacks=self._workdir / f"stacks.{rank}.txt", report=report("end")
        )
        with self._open:
            if stacks := report("stacks"):
                # Written even where Python does not run; the launcher asks for it.
                file = self._open.enter_context(open(stacks, "w"))
                faulthandler.register(signal.SIGUSR1, file=file)
                self._open.callback(faulthandler.unregister, signal.SIGUSR1)
            self._open.enter_context(self.ending)
            self.watch = Watchdog(
                config,
                on_overdue=self.ending.overdue,
                is_peer_busy=self._is_peer_busy,
                heartbeat=report("beat"),
            )
            self._open.enter_context(self.watch)
            self.stop = StopRequest(self.peers, self.ending.now)
            self.ending.hear = self._hear
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def agree(self, name: str, facts: dict[str, Any]) -> None:
        """Raises ConfigError on every rank where they differ."""
        self.peers.agree(name, facts, self._config.limits()["start"])

    def barrier(self, name: str, phase: str = "start") -> None:
        """Returns once every rank is here; waits as long as the phase may take."""
        self.peers.barrier(name, self._config.limits()[phase])

    def share(self, name: str, value: Any) -> Any:
        """The first rank's value, on every rank."""
        return self.peers.share(name, value, self._config.limits()["start"])

    def verifier(self, say: Log) -> Verifier:
        """Return what compares checkpoints with their records, all processes together, in a phase of its own."""
        return Verifier(
            self.peers,
            phase=functools.partial(self.watch.phase, VERIFY),
            moved=self.watch.bytes_read,
            say=say,
        )

    def sharer(self, name: str) -> Callable[[Any], Any] | None:
        """`share` under a name; None where there is nobody to share with."""
        return functools.partial(self.share, name) if self.peers.count > 1 else None

    @contextlib.contextmanager
    def in_turn(self, phase: str) -> Iterator[None]:
        """A phase that the first rank goes through before the others do."""
        with self.watch.phase(phase):
            if not self.peers.is_first:
                self.barrier(phase, phase)
            yield
            if self.peers.is_first:
                self.barrier(phase, phase)

    def end_if_failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        """For an ExitStack: an exception ends all ranks here and now, where there are several."""
        if error is not None and self.peers.count > 1:
            self.ending.failed(error)

    def depart(self) -> None:
        """The orderly end; afterwards an exception is this process's own."""
        faults.point("exit")
        self.watch.enter("finish")
        if self.peers.count > 1:
            self.ending.depart(self._config.limits()["finish"])

    def _hear(self, signs: dict[str, str]) -> None:
        """Takes in what the others say, and says what this rank is busy with."""
        self.stop.hear(signs)
        slow = self.watch.long_phase()
        text = json.dumps(slow) if slow and slow[0] != "step" else ""
        if text != self._told:
            self.peers.sign(f"busy/{self.peers.rank}", text, overwrite=True)
            self._told = text
        for name, said in signs.items():
            if name.startswith("busy/") and self._busy.get(name, ("",))[0] != said:
                self._busy[name] = (said, time.monotonic())

    def _is_peer_busy(self) -> bool:
        """Whether a rank is in a phase of its own that may take longer than a step, and has not been for too long.

        The time of a verification counts anew whenever the rank says that it has read on.
        """
        now = time.monotonic()
        return any(
            said and now - since <= json.loads(said)[1]
            for name, (said, since) in list(self._busy.items())
            if name != f"busy/{self.peers.rank}"
        )
