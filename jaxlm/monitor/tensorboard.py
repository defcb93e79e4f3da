"""TensorBoard files of a run: figures in groups, samples as text, and the chosen settings.

    tensorboard --logdir=RUN/events

The figures have the groups loss, bits_per_byte, perplexity, accuracy, optimizer, speed and memory;
a validation set is the last part of a tag, so that a chart has all sets. Bookkeeping, such as the
elapsed time, is in metrics.jsonl alone.
"""

import importlib.util
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.monitor.sinks import AnyPath, Record, plain

TAGS = {  # field: tag
    "loss_nats": "loss/{split}",
    "bits_per_byte": "bits_per_byte/{split}",
    "perplexity": "perplexity/{split}",
    "token_accuracy": "accuracy/{split}",
    "calibration_error": "calibration_error/{split}",
    "learning_rate": "optimizer/learning_rate",
    "grad_norm": "optimizer/grad_norm",
    "param_norm": "optimizer/param_norm",
    "update_ratio": "optimizer/update_ratio",
    "skipped_total": "optimizer/skipped_steps",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "data_wait_seconds": "speed/data_wait_seconds",
    "mfu": "speed/mfu",
    "goodput": "speed/goodput",
    "peak_bytes": "memory/peak_GiB",
}
OMITTED = (
    *("step", "time_unix", "tokens", "bytes", "share", "loss_stderr", "bits_per_byte_text"),
    *("elapsed_seconds", "left_seconds", "pause_seconds", "flops_per_second", "mfu_full_attention"),
)


class TensorBoard:
    """Writes TensorBoard files; events after `keep_through` are purged."""

    def __init__(self, folder: AnyPath, *, keep_through: int | None = None):
        from tensorboardX import SummaryWriter  # takes a second to import

        purge = None if keep_through is None else keep_through + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, record: Record) -> None:
        """Write the figures of a record that are finite; a curve has a gap at the others."""
        for tag, value in scalars(record).items():
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, record["step"], walltime=record["time_unix"])

    def describe(self, settings: Mapping[str, Any], sets: Sequence[str]) -> None:
        """Write the settings as hyperparameters, to compare runs by their losses on `sets`."""
        from tensorboardX.summary import hparams

        values = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
        }
        for summary in hparams(values, {f"loss/{name}": 0.0 for name in sets}):
            self._writer.file_writer.add_summary(summary)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Write a continuation of a prompt."""
        tag = f"samples/{' '.join(prompt.split())[:40] or 'no prompt'}"
        lines = (prompt + text).replace("\n", "\n    ")
        self._writer.add_text(tag, f"    {lines}", step)  # indented: it is no Markdown

    def flush(self) -> None:
        """Flush the files."""
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


def scalars(record: Record) -> dict[str, float]:
    """Return the figures of a record by tag."""
    result, split = {}, record["split"]
    for name, entry in record.items():
        value = plain(entry)
        if name.partition("/")[0] in OMITTED or not isinstance(value, int | float):
            continue
        if name in TAGS:
            tag = TAGS[name].format(split=split)
        else:
            tag = name if split == "train" and "/" in name else f"{name}/{split}"
        result[tag] = value / 2**30 if name == "peak_bytes" else value
    return result


def command(run: Path) -> str:
    """Return the command that shows the files of a run."""
    words = shlex.join(["tensorboard", f"--logdir={run / 'events'}"])
    is_installed = importlib.util.find_spec("tensorboard") is not None
    return words if is_installed else f"{words}    # pip install tensorboard"
