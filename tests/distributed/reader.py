"""`jaxlm` with a log of the checkpoint files that this process hashes, and the watch phase.

READER_LOG=FILE python -m tests.distributed.reader train --config=... --workdir=...
"""

import contextlib
import json
import os
import sys
from pathlib import Path

from jaxlm.checkpoint import record
from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from jaxlm.monitor import plots
from jaxlm.monitor.watchdog import Watchdog

digest, phase, make = record._digest, Watchdog.phase, Store.__init__
phases = [""]


def note(event, **values):
    line = json.dumps({"event": event, "phase": phases[-1]} | values) + "\n"
    with open(os.environ["READER_LOG"], "a") as log:  # one write: threads share the file
        log.write(line)


def noted_digest(path, *rest):
    _, _, below = str(path).rpartition("/checkpoints/")
    step, _, name = below.partition("/")
    note("read", step=step, path=name, bytes=Path(path).stat().st_size)
    return digest(path, *rest)


@contextlib.contextmanager
def noted_phase(self, name):
    phases.append(name)
    note("phase")
    with phase(self, name):
        yield
    phases.pop()


def noted_store(self, *args, **kwargs):
    make(self, *args, **kwargs)
    note("store", seconds=self._orbax._async_manager._timeout_secs)


if __name__ == "__main__":
    record._digest, Watchdog.phase, Store.__init__ = noted_digest, noted_phase, noted_store
    record.CHUNK_BYTES = 4096  # the state is small
    plots.draw = lambda path: None
    sys.exit(main(sys.argv[1:]))
