"""Steps that were not applied: their printed line, and their record with the documents."""

from typing import Any

import numpy as np

from jaxlm.data import loader
from jaxlm.recipes.train.programs import Skips, TrainPrograms
from jaxlm.training import guard

PREVIEW_TOKENS = 24  # of a document in a record of spikes.jsonl
MAX_DOCUMENTS = 256  # in such a record
NO_DIFFERENCE = "the rewards of the samples of each prompt are equal, or left out"
PRINTED_SKIPS = 10  # first steps that were not applied and are printed; then each tenth is


def skip_notice(step: int, kind: str, values: dict[str, float]) -> str:
    """Return the line of a step that was not applied; an empty one if it is not printed.

    Args:
      step: number of the step.
      kind: reason that it was not applied.
      values: metrics of the step.
    """
    skipped = int(values["skipped_total"])
    if skipped > PRINTED_SKIPS and skipped % PRINTED_SKIPS:
        return ""
    rest = f"; of later ones each {PRINTED_SKIPS}th is printed" if skipped == PRINTED_SKIPS else ""
    return (
        f"step {step} was not applied: {kind} (loss {values['loss_nats']:.4g},"
        f" gradient {values['grad_norm']:.4g}); {skipped} skipped so far, see spikes.jsonl{rest}"
    )


def spike_evidence(
    programs: TrainPrograms,
    step: int,
    values: dict[str, float],
    layers: dict[str, Any],
    skips: Skips,
) -> dict[str, Any]:
    """Return a record of spikes.jsonl for a step that was not applied.

    Args:
      programs: the programs of the run.
      step: number of the step.
      values: metrics of the step.
      layers: gradient norms by parameter and layer.
      skips: ranges of batches that the run leaves out.
    """
    number = loader.batch_number(step - 1, skips)
    documents, left_out = _documents(programs, number)
    return {
        "step": step,
        "kind": _kind(programs, int(values["verdict"])),
        "in_a_row": int(values["skipped_in_a_row"]),
        **{name: values[name] for name in ("loss_nats", "grad_norm", "learning_rate")},
        "batch": number,
        "layers": {path: _finite(norm) for path, norm in layers.items()},
        "layers_not_finite": [path for path, norm in layers.items() if not np.isfinite(norm).all()],
        "documents": documents,
        "documents_left_out": left_out,
    }


def _kind(programs: TrainPrograms, verdict: int) -> str:
    """Return why a step was not applied."""
    kind = guard.describe_verdict(verdict)
    if verdict == guard.NO_WEIGHT and programs.run.objective.samples_answers:
        kind += f": {NO_DIFFERENCE}"
    return kind


def _finite(norm: Any) -> Any:
    """Return a norm, or the norms of layers, as JSON: null for numbers that are not finite."""
    if np.ndim(norm):
        return [_finite(value) for value in norm]
    return float(norm) if np.isfinite(norm) else None


def _documents(programs: TrainPrograms, number: int) -> tuple[list[dict[str, Any]], int]:
    """Return the documents of a batch with their first tokens, and the number beyond the limit."""
    if programs.run.objective.samples_answers:
        return [], 0  # rollouts.jsonl has the samples
    train, decode, pace = programs.data.train, programs.data.tokenizer.decode, programs.pace
    rows = train.at(number, batch=pace, rows=slice(0, pace.phase(number).rows))
    documents = []
    for row, origins in enumerate(train.origins(number, batch=pace)):
        for segment, (file, record) in enumerate(origins, 1):
            ids = rows.tokens[row][rows.segments[row] == segment][:PREVIEW_TOKENS]
            preview = decode([int(i) for i in ids])
            documents.append({"row": row, "file": file, "record": record, "preview": preview})
    return documents[:MAX_DOCUMENTS], max(len(documents) - MAX_DOCUMENTS, 0)
