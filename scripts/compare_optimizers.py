r"""Every optimizer on the quickstart's text: bits per byte at equal tokens and equal time.

    python scripts/compare_optimizers.py --workdir=runs/optimizers
    python scripts/compare_optimizers.py --workdir=runs/optimizers --out=scripts/compared \
        --page=jaxlm/docs/optimizers.md

Each has its own learning rate. The first writes optimizers.md, .json and .png to the folder. The
second trains nothing again and writes the table into the manual too. About 80 minutes on two idle
cores; if killed, the same command resumes. --only=adamw,muon and --steps=100 make it shorter,
--config.a.b=V changes the model or the data.
"""

import sys
import typing
from typing import Any

from compare_runs import Arm
from compare_study import Study, main
from compare_table import Measure

from jaxlm.optim.config import Optimizer

# Settings that an optimizer cannot do without, except the learning rate.
OWN: dict[str, dict[str, Any]] = {
    "adafactor": {"optim.factor_from": 16},  # nothing in a model 64 wide reaches its own 128
    "muon": {"optim.newton_schulz_dtype": "float32"},  # not every CPU multiplies bfloat16
    "schedule_free": {"schedule.name": "constant", "schedule.warmup": "5%"},
}
ARMS = [
    Arm(arm.name, {"optim.name": arm.name, **OWN.get(arm.name, {})})
    for arm in typing.get_args(Optimizer)
]
HOW = """\
Each optimizer of `optim/config.py` has the settings that `optim.name` gives it; only its learning
rate is tuned (with muon's, that of embeddings, norms and biases moves along): four times apart
from its default, until the best has a worse one on either side, then twice and half the best, all
with a seed that is not reported. `(edge)` is a best rate without a worse neighbor, and "next
rate" is the cost of the worse neighbor of the best. Then {seeds} other seeds draw weights and the
order of the data: the mean, and from the lowest to the highest. Places are those that seeds leave
open: an optimizer is behind another if its best seed is worse than the other's worst.

Equal tokens are {steps} steps, {tokens:,} tokens. Equal time is the time in which the fastest
optimizer takes that many steps; the others take as many as that time allows, with a schedule that
ends with them and the rate that was tuned at equal tokens. Seconds of a step are the least of
seven windows of 20 steps, which all take in turns in one process; reading of batches and
compilation are left out."""
LIMITS = """\
- One small model, one text, one short run and one batch size. Second-order methods gain with the
  batch, and savings of memory are not seen at all; the best here need not be the best at a
  hundred times the size.
- Weight decay, momentum, warm-up, clipping and the schedule are not tuned: defaults suit some
  better than others. All are clipped at a norm of 1; all but `schedule_free`, which has a
  constant rate, follow the config's schedule.
- One rate serves all of a model, with `muon` two. `adafactor` alone takes it relative to the size
  of what it changes, so that embeddings, norms and matrices learn at rates of their own: the
  effect of `optim.lr_scale` or muP on the others is not tried.
- Rates are known to a factor of two, by one seed: differences below "next rate" are not resolved.
- Three seeds show a spread, and no probability.
- Time is that of this machine's CPU and of these programs. On an accelerator the step of a larger
  model hides most of the cost of an optimizer, and eight-bit states save memory's time, not a
  small CPU's."""


STUDY = Study(
    name="optimizers",
    about=__doc__,
    arms=ARMS,
    steps=300,
    measures=(
        Measure("equal tokens", "equal_tokens", "bits_per_byte"),
        Measure("equal time", "equal_time", "bits_per_byte"),
    ),
    how=HOW,
    limits=LIMITS,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
