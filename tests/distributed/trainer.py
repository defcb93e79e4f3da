"""`jaxlm` with a log of the rows of each batch of training, and of the restored state.

TRAINER_LOG=FILE python -m tests.distributed.trainer train --config=... --workdir=...
"""

import hashlib
import json
import os
import sys

import numpy as np

from jaxlm.cli.main import main
from jaxlm.core import tree
from jaxlm.data.loader import Loader
from jaxlm.monitor import plots
from jaxlm.parallel import host
from jaxlm.recipes.train import checkpointing

batches, restore = Loader.batches, checkpointing.restored_state


def recorded(self, start, *, batch, rows, **rest):
    with open(os.environ["TRAINER_LOG"], "a") as log:
        for step, read in enumerate(batches(self, start, batch=batch, rows=rows, **rest), start):
            parts = [part for part in read if part is not None]
            local = rows[batch.phase(step).rows]
            cuts = len(read.tokens) // (local.stop - local.start)
            digests = [
                hashlib.sha256(b"".join(np.asarray(part[row]).tobytes() for part in parts))
                for row in range(len(read.tokens))
            ]
            line = {
                "step": step,
                "first": local.start * cuts,
                "rows": [digest.hexdigest() for digest in digests],
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            yield read


def digested(*words):
    """The restored state; digests of its leaves, fetched whole, are written next to the log."""
    restored = restore(*words)
    leaves = {
        path: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in tree.leaves(host.fetch(restored)).items()
    }
    with open(os.environ["TRAINER_LOG"].replace(".jsonl", ".state"), "w") as file:
        json.dump(leaves, file)
    return restored


if __name__ == "__main__":
    if os.environ.get("TRAINER_LOG"):
        Loader.batches = recorded
        checkpointing.restored_state = digested
    plots.draw = lambda path: None  # seconds of every run, and tested elsewhere
    sys.exit(main(sys.argv[1:]))
