"""A rank with little but the process group of training, and the faults of the trainer.

A step is a sum over all devices.

python -m tests.distributed.worker --workdir=DIR [--steps=N] ... --coordinator=HOST:PORT
--num_processes=N --process_id=I

Without the last three, they come from the environment of a cluster.
"""

import argparse
import ctypes
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core import faults
from jaxlm.core.errors import JaxlmError, Preempted
from jaxlm.core.span import Span
from jaxlm.monitor.config import WatchConfig
from jaxlm.parallel import cluster
from jaxlm.training.processes import ProcessGroup
from jaxlm.training.rundir import RunDir

parser = argparse.ArgumentParser()
parser.add_argument("--workdir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--pace", type=float, default=0.01)
parser.add_argument("--fact", default="the same")
parser.add_argument("--late", default="")  # RANK:SECONDS at the end
parser.add_argument("--callback_hang", default="")  # RANK:STEP
parser.add_argument("--gil_hang", default="")  # RANK:STEP
parser.add_argument("--save", action="store_true")  # the total, at a requested stop
parser.add_argument("--watch", default="")  # NAME=TEXT,...
parser.add_argument("--coordinator")
parser.add_argument("--num_processes", type=int)
parser.add_argument("--process_id", type=int)


def at(text: str, rank: int) -> int | None:
    """The number in RANK:NUMBER, on that rank."""
    who, _, number = text.partition(":")
    return int(number) if text and int(who) == rank else None


def hang():
    time.sleep(3600)
    return np.float32(0)


def save(workdir: Path, group: ProcessGroup, step: int, total: jax.Array) -> None:
    """Commits the total, as all ranks together do."""
    from jaxlm.checkpoint.config import CheckpointConfig
    from jaxlm.checkpoint.store import Store, StoreWriter

    store = Store(
        workdir / "checkpoints", CheckpointConfig(), writer=StoreWriter(peers=group.peers)
    )
    group.barrier("store")
    store.save(step, {"total": total}, {"step": step})
    store.close()


def work(args: argparse.Namespace, group: ProcessGroup) -> int:
    rank = group.peers.rank
    group.agree("facts", {"fact": args.fact.replace("RANK", str(rank)), "steps": args.steps})
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    rows = jax.make_array_from_process_local_data(
        split, np.ones(jax.local_device_count(), np.float32)
    )
    hangs = at(args.callback_hang, rank)
    add = jax.jit(lambda total, rows: total + rows.sum())
    stuck = jax.jit(lambda: jax.pure_callback(hang, jax.ShapeDtypeStruct((), jnp.float32)))
    waiting = None
    total = jax.device_put(np.float32(0), NamedSharding(mesh, PartitionSpec()))
    for step in range(1, args.steps + 1):
        group.stop.enter()
        print(f"step {step}", flush=True)
        group.watch.enter("data")
        faults.point("data.next", step)
        group.watch.enter("step")
        faults.point("step.before", step)
        if step == hangs:
            float(stuck())
        if step == at(args.gil_hang, rank):
            lock = ctypes.PyDLL(None).pthread_mutex_lock  # such a call keeps the interpreter
            mutex = ctypes.create_string_buffer(64)
            lock(mutex)
            lock(mutex)  # waits for ever, without a processor
        time.sleep(args.pace)
        total = add(total, rows)
        if waiting is not None:
            float(waiting)
        waiting = total
        faults.point("step.after", step)
        if step % 4 == 0:
            with group.watch.phase("eval"):
                faults.point("eval", step)
            with group.watch.phase("save"):
                faults.point("save.begin", step)
        if group.stop.is_due and step < args.steps:
            print(f"stopped after {step}, total {float(total)}", flush=True)
            if args.save:
                save(args.workdir, group, step, total)
            group.finish()
            raise Preempted(
                f"stopped by {group.stop.reason} after step {step}",
                where="",
                why="by request",
                fix="again",
            )
    late = at(args.late, rank)
    time.sleep(late or 0)
    print(f"total {float(total)}", flush=True)
    group.finish()
    return 0


def main() -> int:
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_compilation_cache", False)
    watch = WatchConfig(
        **{
            name: float(text) if name == "factor" else Span.parse(text)
            for name, text in (part.split("=") for part in args.watch.split(",") if part)
        }
    )
    place = cluster.process_spec(
        os.environ, coordinator=args.coordinator, count=args.num_processes, rank=args.process_id
    )
    args.workdir.mkdir(parents=True, exist_ok=True)
    try:
        print(f"process {place.rank}, {place.source}", flush=True)
        with ProcessGroup(watch, place, workdir=args.workdir) as group, group.stop:
            directory = RunDir(args.workdir)
            if group.peers.is_first:
                group.shutdown.write_exit = directory.write_exit
            return work(args, group)
    except JaxlmError as error:
        print(error, file=sys.stderr, flush=True)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
