r"""Every objective on the quickstart's text: bits per byte at equal tokens and equal time.

    python scripts/compare_objectives.py --workdir=runs/objectives
    python scripts/compare_objectives.py --workdir=runs/objectives --out=scripts/compared \
        --page=jaxlm/docs/objectives.md

Bits are those from left to right. The first writes objectives.md, .json and .png to the folder. The
second trains nothing again and writes the table into the manual too. About 45 minutes on two idle
cores; if killed, the same command resumes. --only=causal,mtp and --steps=100 make it shorter,
--config.a.b=V changes the model or the data.
"""

import dataclasses
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_runs import Arm, Ended, finite, write
from compare_study import Study, main
from compare_table import COLUMNS, Column, Measure

from jaxlm.monitor import sinks
from jaxlm.objectives.config import Causal, TokenObjective, Weights
from jaxlm.recipes import setup
from jaxlm.recipes.use import evaluate, load

# A mixture is made of these; distillation needs a teacher, and preferences need pairs.
SINGLE = list(typing.get_args(TokenObjective))
WEIGHTS = [field.name for field in dataclasses.fields(Weights)]


def _mixed(name: str) -> dict[str, str]:
    shares = {each: "0.5" if each in ("causal", name) else "0" for each in WEIGHTS}
    weights = {f"objective.weights.{each}": share for each, share in shares.items()}
    return {"objective.name": "mixture"} | weights


ARMS = [
    *(Arm(arm.name, {"objective.name": arm.name}) for arm in SINGLE),
    *(Arm(f"causal+{name}", _mixed(name)) for name in WEIGHTS if name != "causal"),
]
# How a model that learnt one alone can be read: those evaluated as causal need no second reading.
PROMPTS = {arm.name: arm.prompts for arm in SINGLE}
HOW = """\
Each objective alone has the settings that `objective.name` gives it, and each other one is also
mixed half and half with causal. All models are the same decoder and read {steps} steps of
{tokens:,} slots in all. "Left to right" is the validation set as `causal` reads it, every token
predicted from those before it. `causal`, `fim`, `mtp` and all mixtures with causal train on this
loss. Of `prefix`, `span`, `blank` and `ul2` alone the last weights are read so too, although they
have seldom or never trained on it. "Own" is the loss of an objective over the bytes that it
predicts: it ranks nothing, as each predicts other bytes and sees other things. "Predicted" is the
share of slots that the loss counts.

The learning rate is tuned for each by its own loss: four times apart from the config's, until the
best has a worse one on either side, then twice and half the best, all with a seed that is not
reported. `(edge)` is a best rate without a worse neighbor, and "next rate" is the cost of the
worse neighbor of the best, of its own loss. Then {seeds} other seeds draw weights, the order of
the data and the hidden tokens: the mean, and from the lowest to the highest. Places are those
that seeds leave open: an objective is behind another if its best seed is worse than the other's
worst.

Equal time is the time in which the fastest takes as many steps as all take at equal tokens; the
others take as many as that time allows, with a schedule that ends with them. Seconds of a step
are the least of seven windows of 20 steps, which all take in turns in one process; reading of
batches and compilation are left out."""
LIMITS = """\
- `masked` gives no probability of a text from left to right: it cannot be compared by this, and
  has no place.
- Left to right is causal's own field. The purposes of the others are not measured here: filling
  in, reading both ways, fine-tuning as an encoder, several tokens drafted at once.
- Equal tokens are equal slots. An objective that adds sentinels reads less text in them, one that
  predicts a part of them learns from fewer: that is its price, and in the figures.
- One small model, one text of one kind, one short run: `mtp` and `ul2` were published for models
  a thousand times as large.
- Rates are known to a factor of two, by one seed; no other setting is tuned. Three seeds show a
  spread, and no probability."""


def figures(run: Ended) -> dict[str, float | None]:
    """Bits per byte of the run's own objective and from left to right, and the predicted share."""
    bits = finite(run.bits)
    values = {"own": bits, "predicted": run.predicted}
    ways = PROMPTS.get(run.place.parent.name, "left to right")
    if ways == "none":
        return values
    is_read = ways == "left to right" or bits is None
    return values | {"left_to_right": bits if is_read else from_left_to_right(run.place)}


def from_left_to_right(place: Path) -> float:
    """Bits per byte of a run's validation set under `causal`, by its last weights; cached."""
    file = place / "left_to_right.json"
    if not file.is_file():
        opened = load.load_run(place)
        data = setup.open_data(dataclasses.replace(opened.run, objective=Causal()))
        sets = evaluate.measure(opened, data.validation, opened.run.train.batch)
        followed = setup.ranking_set(opened.run, sets)
        assert followed is not None, place
        write(file, sets[followed]["bits_per_byte"])
    return sinks.read_json(file)


def _predicted(row: Mapping[str, Any]) -> str:
    shares = row["equal_tokens"]["predicted"]
    return f"{sum(shares) / len(shares):.0%}"


STUDY = Study(
    name="objectives",
    about=__doc__,
    arms=ARMS,
    steps=200,
    figures=figures,
    measures=(
        Measure("left to right, equal tokens", "equal_tokens", "left_to_right"),
        Measure("left to right, equal time", "equal_time", "left_to_right"),
        Measure("own, equal tokens", "equal_tokens", "own", is_ranked=False),
    ),
    columns=(Column("predicted", _predicted), *COLUMNS),
    how=HOW,
    limits=LIMITS,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
