"""The loop of a process that takes steps on request, for bench_trl.py and trl_arms.py."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def serve(steps: Callable[[int], float], facts: Mapping[str, Any]) -> None:
    """Take one step, then the number of steps in each line of the input.

    Args:
      steps: a function that takes a number of steps and returns the last loss in nats.
      facts: fields that each answer has besides `loss_nats`, `seconds` of CPU time and `wall`
        seconds.
    """
    begun = time.perf_counter()
    loss = steps(1)
    print(json.dumps({"loss_nats": loss, "seconds": time.perf_counter() - begun}), flush=True)
    for line in sys.stdin:
        begun, wall = time.process_time(), time.perf_counter()
        loss = steps(json.loads(line)["steps"])
        taken = {"seconds": time.process_time() - begun, "wall": time.perf_counter() - wall}
        print(json.dumps({"loss_nats": loss} | taken | dict(facts)), flush=True)
