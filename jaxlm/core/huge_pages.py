"""Huge pages for the memory of a process on Linux."""

import contextlib
import os
import sys
from pathlib import Path

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def use() -> None:
    """Restart this process with huge pages, if Linux gives them to programs on request only.

    A pass over a model reads all of its weights. In pages of 2 MiB the processor looks up fewer
    addresses than in pages of 4 KiB. glibc requests them if GLIBC_TUNABLES has
    `glibc.malloc.hugetlb=1` (glibc 2.35 and up), which it reads only when a process starts. A
    process is not restarted if it has a value for that, 0 too, if it has a debugger, or if another
    program forked it: Python then started with other words than those of this command.
    """
    tunables, words = os.environ.get(VARIABLE, ""), sys.argv[1:]
    has_debugger = sys.gettrace() is not None or "pydevd" in sys.modules
    is_command = bool(sys.executable) and sys.orig_argv[len(sys.orig_argv) - len(words) :] == words
    if TUNABLE in tunables or has_debugger or not is_command:
        return
    with contextlib.suppress(OSError):  # not Linux, or no second process: pages of 4 KiB
        if "[madvise]" in MODE.read_text():
            setting = ":".join(filter(None, (tunables, f"{TUNABLE}=1")))
            os.execve(sys.executable, sys.orig_argv, os.environ | {VARIABLE: setting})
