"""Process group of a run: peers, watchdog, graceful stop and immediate shutdown."""

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
from jaxlm.training.launch import LAUNCH_FOLDER
from jaxlm.training.shutdown import Shutdown
from jaxlm.training.signals import StopRequest


class ProcessGroup:
    """The processes of a run, and watchdog, stop request and shutdown of this one.

    Entering completes the rendezvous. An exception in the body ends all processes, unless `finish`
    was called before.
    """

    def __init__(self, config: WatchConfig, spec: ProcessSpec, *, workdir: Path):
        self._config, self.spec, self._workdir = config, spec, workdir
        self._open = contextlib.ExitStack()
        self._published = ""  # the long phase that this rank has published
        self._busy: dict[str, tuple[str, float]] = {}  # each peer's long phase, and its time

    def __enter__(self) -> Self:
        config, spec = self._config, self.spec
        limits = config.limits()
        folder = os.environ.get(LAUNCH_FOLDER)
        if spec.coordinator is None or spec.rank is None or spec.count is None:
            self.peers = Peers()
        else:
            self.peers = peers.start(
                spec.coordinator,
                rank=spec.rank,
                count=spec.count,
                devices=spec.devices,
                join_seconds=limits["join"],
                heartbeat_seconds=limits["heartbeat"],
                say=lambda text: print(text, file=sys.stderr, flush=True),
            )
        rank = self.peers.rank

        def report(name: str) -> Path | None:
            return Path(folder) / f"{rank}.{name}" if folder else None

        self.shutdown = Shutdown(
            self.peers, stacks=self._workdir / f"stacks.{rank}.txt", report=report("end")
        )
        with self._open:
            if stacks := report("stacks"):
                # The handler writes stacks even while Python is stuck; the launcher signals it.
                file = self._open.enter_context(open(stacks, "w"))
                faulthandler.register(signal.SIGUSR1, file=file)
                self._open.callback(faulthandler.unregister, signal.SIGUSR1)
            self._open.enter_context(self.shutdown)
            self.watch = Watchdog(
                config,
                on_overdue=self.shutdown.exit_stalled,
                is_peer_busy=self._is_peer_busy,
                heartbeat=report("beat"),
            )
            self._open.enter_context(self.watch)
            self.stop = StopRequest(self.peers, self.shutdown.exit)
            self.shutdown.on_signs = self._on_signs
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def agree(self, name: str, facts: dict[str, Any]) -> None:
        """Raise ConfigError on every rank if the facts of the ranks differ."""
        self.peers.agree(name, facts, self._config.limits()["start"])

    def barrier(self, name: str, phase: str = "start") -> None:
        """Wait until every rank is here, at most for the limit of the phase."""
        self.peers.barrier(name, self._config.limits()[phase])

    def share(self, name: str, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        return self.peers.share(name, value, self._config.limits()["start"])

    def gather(self, name: str, value: Any, phase: str) -> list[Any]:
        """Return the values of all ranks on the first one, within the limit of the phase."""
        return self.peers.gather(name, value, self._config.limits()[phase])

    def verifier(self, log: Log) -> Verifier:
        """Return the verifier of checkpoints, on all processes together, in its own phase."""
        return Verifier(
            self.peers,
            phase=functools.partial(self.watch.phase, VERIFY),
            moved=self.watch.bytes_read,
            say=log,
        )

    def sharer(self, name: str) -> Callable[[Any], Any] | None:
        """Return `share` under a name; None with one process."""
        return functools.partial(self.share, name) if self.peers.count > 1 else None

    @contextlib.contextmanager
    def in_turn(self, phase: str) -> Iterator[None]:
        """Run a phase on the first rank, then on the others."""
        with self.watch.phase(phase):
            if not self.peers.is_first:
                self.barrier(phase, phase)
            yield
            if self.peers.is_first:
                self.barrier(phase, phase)

    def exit_if_failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Exit all ranks at once after an exception, if there are several; for an ExitStack."""
        if error is not None and self.peers.count > 1:
            self.shutdown.exit_failed(error)

    def finish(self) -> None:
        """Finish in order; a later exception affects only this process."""
        faults.point("exit")
        self.watch.enter("finish")
        if self.peers.count > 1:
            self.shutdown.finish(self._config.limits()["finish"])

    def _on_signs(self, signs: dict[str, str]) -> None:
        """Process the signs of the peers, and publish the long phase of this rank."""
        self.stop.on_signs(signs)
        slow = self.watch.long_phase()
        text = json.dumps(slow) if slow and slow[0] != "step" else ""
        if text != self._published:
            self.peers.sign(f"busy/{self.peers.rank}", text, overwrite=True)
            self._published = text
        for name, phase in signs.items():
            if name.startswith("busy/") and self._busy.get(name, ("",))[0] != phase:
                self._busy[name] = (phase, time.monotonic())

    def _is_peer_busy(self) -> bool:
        """Return whether a peer is in a long phase whose limit is not over.

        The limit of a verification starts again whenever the peer publishes further bytes read.
        """
        now = time.monotonic()
        return any(
            phase and now - since <= json.loads(phase)[1]
            for name, (phase, since) in list(self._busy.items())
            if name != f"busy/{self.peers.rank}"
        )
