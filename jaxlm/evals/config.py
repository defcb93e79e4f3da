"""Settings of evaluation."""

import dataclasses
from typing import Literal

from jaxlm.core.config import Span, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Interval and size of the evaluations during training."""

    every: Span = setting(Span.parse("10%"), "interval between evaluations")
    batch: int | Literal["auto"] = setting(
        "auto",
        "batch size of an evaluation; auto is train.batch, in train.microbatches parts",
        unit="rows",
        low=1,
    )
    follow: str = setting(
        "auto",
        "validation set whose loss ranks checkpoints and counts for train.patience; "
        "auto is the first",
    )
    batches: int | Literal["auto", "all"] = setting(
        "auto",
        "batches of each validation set during training, drawn by a fixed shuffle; auto keeps "
        "evaluations to 3% of the work of the run, with 8 batches or more; after a time as "
        "interval, and of drawn samples, auto is all; the last evaluation uses all",
        low=1,
    )
    tasks: tuple[str, ...] = setting((), "task files that are scored during training")
    tasks_every: Span = setting(Span.parse("25%"), "interval between scores of tasks")
    tasks_limit: int | Literal["auto", "all"] = setting(
        "auto",
        "items of each task, drawn by a fixed hash of their ids; auto keeps all passes to 5% of "
        "the work of the run, with 100 items or more; after a time as interval, auto is all",
        unit="items",
        low=1,
    )
    tasks_shots: int = setting(0, "examples before each item of a task", low=0)
    tasks_form: Literal["cloze", "letters"] = setting(
        "cloze", "choices of tasks as text, or as letters after a list"
    )
    tasks_chat: bool = setting(
        False, "make each prompt of a task a user's turn by the chat template of the run"
    )
