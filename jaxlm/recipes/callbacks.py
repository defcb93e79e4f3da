"""Functions of the caller that are told what a run writes down, and may end it."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxlm.monitor.sinks import Record

Callback = Callable[[int, dict[str, Any]], Any]


class Callbacks:
    """A sink that hands each record on: the completed steps, and the record as a line of metrics.jsonl has it.

    One that answers with something true asks for the end of the run. What one raises is kept for the end: no other is called
    from there on.
    """

    def __init__(self, functions: Sequence[Callback] = ()):
        self.functions = tuple(functions)
        self.is_over = False
        self.error: Exception | None = None

    def write(self, record: Record) -> None:
        """Tells all of them."""
        if self.error is not None:
            return
        try:
            for function in self.functions:
                if function(record["step"], dict(record)):
                    self.is_over = True
        except Exception as error:  # the caller's own, and raised again once the state is saved
            self.error, self.is_over = error, True

    def fail(self) -> None:
        """Raises what one of them has raised, if any."""
        if self.error is not None:
            raise self.error

    def flush(self) -> None:
        """There is nothing to flush."""

    def close(self) -> None:
        """There is nothing to close."""
