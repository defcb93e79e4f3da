"""Retention policy of checkpoints."""

from collections.abc import Sequence

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.record import Record


def kept(records: Sequence[Record], config: CheckpointConfig, *, reach: int = 0) -> set[int]:
    """Return the steps to keep.

    These are the newest steps, the best, multiples of `keep_every`, step 0 (it exists if a run
    began with the weights of another, which cannot be recreated), and the targets of a rewind.

    A rewind needs a step from before training went wrong, maybe for longer than one interval
    between saves. Kept for it are the newest healthy step, the newest healthy step at least `reach`
    steps before that, and the oldest between them, which will be that old when it is needed.
    """
    steps = sorted(record.step for record in records)
    keep = set(steps[-config.keep_last :]) | ({0} & set(steps))
    ranked = sorted(
        (record.loss_nats, record.step) for record in records if record.loss_nats is not None
    )
    keep |= {step for _, step in ranked[: config.keep_best]}
    if config.keep_every is not None:
        keep |= {step for step in steps if step % config.keep_every == 0}
    healthy = sorted(record.step for record in records if record.healthy)
    far = [step for step in healthy if step <= healthy[-1] - reach]
    return keep | set(healthy[-1:]) | set(far[-1:]) | set(healthy[len(far) :][:1])
