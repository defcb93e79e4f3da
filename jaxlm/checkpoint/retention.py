"""Which steps are kept."""

from collections.abc import Sequence

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.record import Record


def kept(records: Sequence[Record], config: CheckpointConfig, *, reach: int = 0) -> set[int]:
    """The steps to keep: the newest, the best, each of the permanent ladder, where the run began, and a way back.

    Step 0 is there where a run began with the weights of another, which nothing could make again.

    The way back is the newest healthy step, and the newest healthy one that is at least `reach` steps older than the
    newest: a rewind goes there when training has gone wrong for longer than one interval between saves.
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
    for far_enough in (healthy, [step for step in healthy if step <= steps[-1] - reach]):
        keep |= set(far_enough[-1:])
    return keep
