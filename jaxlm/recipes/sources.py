"""What a run has read of each source of its mixture, counted on the host: exact, and saved with each checkpoint."""

from typing import Any

from jaxlm.data import loader
from jaxlm.data.mixture import Mixture
from jaxlm.recipes.engine import Engine, Skips


def count(engine: Engine, number: int, read: dict[str, list[int]]) -> list[str]:
    """Adds what the batch of a number read, the whole of it on every host, to rows and tokens by source.

    The names are of the sources that have come to their most epochs with it.
    """
    train, pace = engine.data.train, engine.pace
    if not isinstance(train, Mixture):
        return []
    start, stop = pace.rows(number), pace.rows(number + 1)
    for name, (rows, tokens) in train.read(start, stop).items():
        before = read.get(name, [0, 0])
        read[name] = [before[0] + rows, before[1] + tokens]
    return list(train.ended(start, stop))


def record(engine: Engine, step: int, read: dict[str, list[int]], skips: Skips) -> dict[str, Any]:
    """The metrics of sources after so many steps: `sources/NAME/rows`, `tokens`, `epochs` and, of the row to come, `weight`.

    Tokens are those of text, whatever of them an objective predicts. Batches that a rewind left out are not counted.
    """
    train = engine.data.train
    if not isinstance(train, Mixture):
        return {}
    weights = train.shares.at(engine.pace.rows(loader.number(step, skips))).tolist()
    found: dict[str, Any] = {}
    for name, source, weight in zip(train.names, train.sources, weights, strict=True):
        rows, tokens = read[name]
        epochs = rows / source.plan.rows
        values = {"rows": rows, "tokens": tokens, "epochs": epochs, "weight": weight}
        found |= {f"sources/{name}/{what}": value for what, value in values.items()}
    return found
