"""How fast this machine is, for limits of time that hold on a slower one."""

import time

SQUARED = 20_000_000  # numbers whose squares the machine that the limits were set on adds in 1 s


def slowness() -> float:
    """How many times longer a piece of Python takes here than where the limits were set, at least 1.

    It counts processor time, and takes the best of three measurements: other programs do not count.
    """
    taken = []
    for _ in range(3):
        begun = time.process_time()
        sum(number * number for number in range(SQUARED // 10))
        taken.append(time.process_time() - begun)
    return max(1.0, 10 * min(taken))
