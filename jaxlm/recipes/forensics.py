"""What a step that was not applied had read."""

from typing import Any

import numpy as np

from jaxlm.data import loader
from jaxlm.recipes.engine import Engine, Skips
from jaxlm.train import guard

PREVIEW_TOKENS = 24
MOST_DOCUMENTS = 256  # in one record


def evidence(
    engine: Engine, step: int, values: dict[str, float], layers: dict[str, Any], skips: Skips
) -> dict[str, Any]:
    """One line of spikes.jsonl: the verdict, the numbers, the gradient's norm by layer, and the documents of the batch."""
    number = loader.number(step - 1, skips)
    documents, left_out = _documents(engine, number)
    return {
        "step": step,
        "kind": guard.words(int(values["verdict"])),
        "in_a_row": int(values["skipped_in_a_row"]),
        **{name: values[name] for name in ("loss_nats", "grad_norm", "learning_rate")},
        "batch": number,
        "layers": {path: _plain(norm) for path, norm in layers.items()},
        "layers_not_finite": [path for path, norm in layers.items() if not np.isfinite(norm).all()],
        "documents": documents,
        "documents_left_out": left_out,
    }


def _plain(norm: Any) -> Any:
    """A norm, or one for each layer, as JSON: null where it is not finite."""
    if np.ndim(norm):
        return [_plain(value) for value in norm]
    return float(norm) if np.isfinite(norm) else None


def _documents(engine: Engine, number: int) -> tuple[list[dict[str, Any]], int]:
    """The documents that a batch is made of, each with how it begins in that row; and how many more there are."""
    train, decode = engine.data.train, engine.data.tokenizer.decode
    pace = engine.pace
    rows = train.at(number, batch=pace, rows=slice(0, pace.stage(number).rows))
    found = []
    for row, origins in enumerate(train.origins(number, batch=pace)):
        for segment, (file, record) in enumerate(origins, 1):
            ids = rows.tokens[row][rows.segments[row] == segment][:PREVIEW_TOKENS]
            preview = decode([int(i) for i in ids])
            found.append({"row": row, "file": file, "record": record, "preview": preview})
    return found[:MOST_DOCUMENTS], max(len(found) - MOST_DOCUMENTS, 0)
