"""jaxlm's side of scripts/bench_torch.py: the compiled step of `jaxlm train`.

Its guard and metrics are included.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_sizes import Size, batch, run_of

from jaxlm.data.batch import Tokens
from jaxlm.monitor import host_machine, profiling
from jaxlm.monitor.config import ProfileConfig
from jaxlm.monitor.profiling import Trace
from jaxlm.parallel import hlo, host
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.train.programs import without_data


class Arm:
    """A model in training, on rows that lie on the device."""

    def __init__(
        self,
        size: Size,
        precision: str,
        overrides: Sequence[tuple[str, str]],
        *,
        is_chat: bool = False,
    ):
        setup.start()
        run = run_of(size, precision, overrides)
        self._grid = meshes.build(run.mesh)
        engine = without_data(run, self._grid, size.vocab)
        ids, targets = batch(size)
        weights = np.ones(ids.shape, np.float32)
        if is_chat:
            weights[:, : size.length // 2] = 0.0
        fields: Any = {
            "tokens": ids,
            "targets": targets,
            "weights": weights,
            "segments": np.ones(ids.shape, np.int32),
            "positions": np.broadcast_to(np.arange(size.length, dtype=np.int32), ids.shape),
        }
        with jax.set_mesh(self._grid):
            if engine.model.base:
                engine.base = jax.jit(engine.model.plain.init)(jax.random.key(0))
            self._state = engine.init_state()
            self._batch = host.put(self._grid, Tokens(**fields))
            self._extra = engine.extra_inputs
            self._step = engine.step.lower(self._state, self._batch, **self._extra).compile()

    def steps(self, count: int) -> float:
        """Take `count` steps; return the loss of the last, before its update."""
        with jax.set_mesh(self._grid):
            for _ in range(count):
                self._state, metrics = self._step(self._state, self._batch, **self._extra)
            return float(jax.block_until_ready((self._state, metrics))[1]["loss_nats"])

    def facts(self) -> dict[str, Any]:
        """The device, and the peak memory of its allocator; None for a CPU, which has no count."""
        peak = host_machine.peak_memory(jax.local_devices())
        return {
            "device": jax.devices()[0].device_kind,
            "library": f"jax {jax.__version__}",
            "peak_bytes": peak.bytes if peak.of == "device" else None,
        }

    def trace(self, folder: Path, count: int) -> dict[str, Any]:
        """Profile of `count` steps, as by `profiling.summary`.

        The trace itself is left in `folder`.
        """
        window = Trace(ProfileConfig(steps=f"0:{count}"), folder)
        with jax.set_mesh(self._grid):
            for number in range(count):
                window.before(number)
                window.enter("step")
                self._state, _ = self._step(self._state, self._batch, **self._extra)
            window.before(count)
        classify = hlo.classifier(self._step.as_text() or "")
        return profiling.summary(profiling.newest_trace(folder), classify)
