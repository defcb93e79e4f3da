r"""Every schedule on the quickstart's text: bits per byte at equal tokens.

    python scripts/compare_schedules.py --workdir=runs/schedules
    python scripts/compare_schedules.py --workdir=runs/schedules --out=scripts/compared \
        --page=jaxlm/docs/optimizers.md

Each has its own learning rate. The first writes schedules.md, .json and .png to the folder. The
second trains nothing again and writes the table into the manual too. About 30 minutes on two idle
cores; if killed, the same command resumes. --only=cosine,wsd and --steps=100 make it shorter,
--config.a.b=V changes the model, the data or the optimizer.
"""

import sys
import typing

from compare_runs import Arm
from compare_study import Study, main
from compare_table import RATES, Measure

from jaxlm.core import config
from jaxlm.optim.schedule_config import Cosine, Schedule


def _arm(name: str, schedule: Schedule) -> Arm:
    """Set every setting: the config's own schedule differs from its arm's defaults."""
    settings = config.to_json(schedule)
    return Arm(name, {f"schedule.{field}": value for field, value in settings.items()})


ARMS = [
    *(_arm(arm.name, arm()) for arm in typing.get_args(Schedule)),
    _arm("cosine_restarts", Cosine(cycles=3)),
]
HOW = """\
Each schedule of `optim/schedule_config.py` has the settings that `schedule.name` gives it, floors
and warm-ups among them, and ends with the run; `cosine_restarts` is `cosine` in three cycles.
Only the peak of the learning rate is tuned, for each by itself: a schedule that stays at its peak
needs a lower one than one that soon leaves it, so that a common rate would choose the winner. It
is tried four times apart from the config's, until the best has a worse one on either side, then
twice and half the best, all with a seed that is not reported. `(edge)` is a best rate without a
worse neighbor, and "next rate" is the cost of the worse neighbor of the best. Then {seeds} other
seeds draw weights and the order of the data: the mean, and from the lowest to the highest. Places
are those that seeds leave open: a schedule is behind another if its best seed is worse than the
other's worst.

All take {steps} steps, {tokens:,} tokens. A schedule costs no time, so that equal tokens are
equal time."""
LIMITS = """\
- One small model, one text and one short run, which ends before much could be learnt by a small
  rate: a schedule that decays early, or to zero, gains less here than in a long run.
- Warm-ups, floors and the lengths of decays are not tuned: defaults suit some better than others.
- Advantages other than the last loss are not seen: `constant`, `inverse_sqrt` and `wsd` continue
  without a known end, and a run of `cosine` cannot be made longer.
- Rates are known to a factor of two, by one seed: differences below "next rate" are not resolved.
  Three seeds show a spread, and no probability."""


STUDY = Study(
    name="schedules",
    about=__doc__,
    arms=ARMS,
    steps=200,
    measures=(Measure("equal tokens", "equal_tokens", "bits_per_byte"),),
    columns=RATES,
    how=HOW,
    limits=LIMITS,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
