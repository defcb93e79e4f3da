"""Types of the callbacks that report on long work."""

from collections.abc import Callable

Log = Callable[[str], None]  # a line for the user
OnText = Callable[[int, str, bool], None]  # row, new text, and True at the end of the row
OnProgress = Callable[[str, int, int], None]  # label, bytes done, total bytes
