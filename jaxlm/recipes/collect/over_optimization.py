"""Over-optimization of a judge: the truth of its best of n answers, as a table and a page."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxlm.evals.best_of_n import BestOfN, ScoredAnswer, best_of_n
from jaxlm.monitor import report
from jaxlm.monitor.charts import Chart, Series
from jaxlm.recipes.collect import judges
from jaxlm.recipes.collect.judges import TRUTH_FLAG, DrawnAnswer, Judge
from jaxlm.recipes.collect.prompts import CollectPrompt
from jaxlm.rl.rewards import check_scored

COLUMNS = ("n", "prompts", "judge's score", "truth", "best possible", "KL at most, nats")


def measure(
    truth: Judge,
    name: str,
    asked: Sequence[tuple[CollectPrompt, list[int]]],
    lines: Sequence[dict[str, Any]],
) -> list[BestOfN]:
    """Return the best of 1, 2, 4, ... answers, up to the most that a prompt has.

    Answers without a score of the judge are not chosen from.

    Args:
      truth: the judge of what is true.
      name: value of its flag.
      asked: the prompts.
      lines: lines of samples.jsonl.

    Raises DataError if too many answers have no true score.
    """
    by_id = {prompt.id: prompt for prompt, _ in asked}
    scored = [each for each in lines if each["score"] is not None]
    answers = [
        DrawnAnswer(by_id[x["id"]], x["text"], x["reason"], x["seed"], len(x["ids"]))
        for x in scored
    ]
    with truth:
        verdicts = truth.score(answers)
    check_scored(
        [
            (verdict.problem, answer.prompt.text)
            for verdict, answer in zip(verdicts, answers, strict=True)
            if verdict.score is None
        ],
        len(answers),
        judges.FAILURES,
        where=f"{TRUTH_FLAG}={name}",
        limit="a collection",
        fix="correct the prompts and the truth, then run the command again",
    )
    judged = zip(scored, verdicts, strict=True)
    groups = [
        [ScoredAnswer(line["score"], by.score) for line, by in group if by.score is not None]
        for _, group in itertools.groupby(judged, key=lambda each: each[0]["id"])
    ]
    most = max(map(len, groups), default=0)
    sizes = sorted({*itertools.takewhile(lambda n: n < most, (2**k for k in range(64))), most})
    return [best_of_n(groups, n) for n in sizes if n]


def rows(best: Sequence[BestOfN]) -> list[list[str]]:
    """Return the cells of COLUMNS."""
    return [
        [
            str(each.samples),
            str(each.prompts),
            *(f"{value:.4f}" for value in (each.score, each.truth, each.possible)),
            f"{each.kl_nats:.3f}",
        ]
        for each in best
    ]


def warning(best: Sequence[BestOfN]) -> str:
    """Return a sentence if choosing from more answers lowers the truth; empty if it does not."""
    if not best:
        return ""
    highest = max(best, key=lambda each: each.truth)
    if highest is best[-1]:
        return ""
    return (
        f"over-optimized: the truth is highest for n = {highest.samples}, {highest.truth:.4f}, and "
        f"{best[-1].truth:.4f} for n = {best[-1].samples}, whose score is higher"
    )


def page(best: Sequence[BestOfN], judge: str, truth: str) -> str:
    """Return the page: the judge's score and the truth over n."""

    def series(name: str, field: str, color: int) -> Series:
        points = [(each.samples, 0.0, 0.0, getattr(each, field)) for each in best]
        return Series(name, points, color, is_marked=True)

    charts = [
        Chart(f"Score by {judge}", "mean of the chosen answers", [series("chosen", "score", 0)]),
        Chart(
            f"Truth by {truth}",
            "mean",
            [series("chosen", "truth", 0), series("best possible", "possible", 1)],
        ),
    ]
    return report.filled(
        "best_of_n.html.jinja",
        title="Best of n",
        subtitle=f"{best[0].prompts if best else 0} prompts; {judge} chooses, {truth} is the truth",
        warning=warning(best),
        charts=report.drawn([each._replace(axis="n") for each in charts]),
        columns=COLUMNS,
        rows=rows(best),
    )
