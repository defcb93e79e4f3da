"""Records to train on, from scored samples: all of them, the best ones, or pairs.

Example:
  >>> lines = [
  ...     {"id": "a", "prompt": "1+1=", "text": text, "score": score, "reason": "eos_token"}
  ...     for text, score in (("2", 1.0), ("3", 0.0), ("3", 0.0))
  ... ]
  >>> select(lines, "best", "best", Counter())
  [{'prompt': '1+1=', 'completion': '2', 'score': 1.0, 'id': 'a'}]
  >>> [(each["chosen"], each["rejected"]) for each in select(lines, "pairs", "all", Counter())]
  [('2', '3')]
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]

NO_SCORE = "without a scored answer that ended"
EQUAL_SCORES = "with equal scores"
NO_REVISION = "without a revision that ended"
SAME = "that the revision repeats"


def select(
    lines: Sequence[Line], keep: str, pairs: str, left_out: Counter[str]
) -> list[dict[str, Any]]:
    """Return the records that are kept.

    The best answer is one that ended by itself, and the first of equal scores. A chosen answer has
    ended too; a rejected one may have been cut. Equal texts of a prompt are one answer.

    Args:
      lines: lines of samples.jsonl.
      keep: `all`, `best` or `pairs`.
      pairs: `best`: the best and the worst answer; or `all` pairs of different scores.
      left_out: counts of prompts that are left out, by reason.
    """
    if keep == "all":
        return [dict(each) for each in lines]
    records: list[dict[str, Any]] = []
    for _, group in itertools.groupby(lines, key=lambda each: each["id"]):
        answers = [each for each in group if each["score"] is not None]
        ended = [each for each in answers if each["reason"] != "length" and each["text"]]
        if not ended:
            left_out[NO_SCORE] += 1
            continue
        if keep == "best":
            records.append(_completion(max(ended, key=lambda each: each["score"])))
            continue
        matches = list(_pairs(ended, answers))
        left_out[EQUAL_SCORES] += not matches
        records += matches if pairs == "all" else matches[:1]
    return records


def select_revisions(
    lines: Sequence[Line], keep: str, left_out: Counter[str]
) -> list[dict[str, Any]]:
    """Return the records that are kept of drafts, each followed by its revision.

    `best` is the revision, `pairs` the revision, chosen, and its draft, rejected. A kept revision
    has ended by itself and differs from the draft.

    Args:
      lines: lines of samples.jsonl.
      keep: `all`, `best` or `pairs`.
      left_out: counts of drafts that are left out, by reason.
    """
    if keep == "all":
        return [dict(each) for each in lines]
    records = []
    for draft, revision in zip(lines[::2], lines[1::2], strict=True):
        if revision["problem"] or revision["reason"] == "length":
            left_out[NO_REVISION] += 1
        elif revision["text"].strip() == draft["text"].strip():
            left_out[SAME] += 1
        else:
            answers = {"completion": _turns(revision)}
            if keep == "pairs":
                answers = {"chosen": _turns(revision), "rejected": _turns(draft)}
            records.append({"prompt": draft["prompt"], **answers, "id": draft["id"]})
    return records


def _pairs(ended: Sequence[Line], answers: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """Yield pairs of different scores, that of the largest difference first."""
    chosen = {each["text"]: each for each in reversed(ended)}
    rejected = {each["text"]: each for each in reversed(answers) if each["text"]}
    both = [
        (one, other)
        for one in reversed(chosen.values())
        for other in reversed(rejected.values())
        if one["score"] > other["score"] and one["text"] != other["text"]
    ]
    for one, other in sorted(both, key=lambda pair: pair[1]["score"] - pair[0]["score"]):
        yield {
            "prompt": one["prompt"],
            "chosen": _turns(one),
            "rejected": _turns(other),
            "chosen_score": one["score"],
            "rejected_score": other["score"],
            "id": one["id"],
        }


def _completion(line: Line) -> dict[str, Any]:
    return {
        "prompt": line["prompt"],
        "completion": _turns(line),
        "score": line["score"],
        "id": line["id"],
    }


def _turns(line: Line) -> str | list[dict[str, str]]:
    """Return an answer in the form of its prompt: a text, or messages."""
    if isinstance(line["prompt"], str):
        return line["text"]
    return [{"role": "assistant", "content": line["text"]}]
