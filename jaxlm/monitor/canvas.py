"""An empty picture, and its bytes."""

import io
from typing import Any


def new_figure() -> tuple[Any, Any]:
    """A figure and its axes."""
    # A figure of its own, without pyplot: no global state, and no window system is looked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    return figure, figure.add_subplot()


def to_png(figure: Any) -> bytes:
    """The figure as a PNG, the same bytes for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
