"""Which steps are kept."""

from collections.abc import Sequence

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.record import Record


def kept(records: Sequence[Record], config: CheckpointConfig, *, reach: int = 0) -> set[int]:
    """The steps to keep: the newest, the best, each of the permanent ladder, where the run began, and a way back.

    Step 0 is there where a run began with the weights of another, which nothing could make again.

    The way back is where a rewind goes when training has gone wrong for longer than one interval between saves: the newest
    healthy step, the newest healthy one at least `reach` steps before that, and the oldest one between them, which will be
    that far back when it is needed.
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
