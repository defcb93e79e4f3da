"""A short run by the product's assembly and engine, on any mesh; and deviations of two runs."""

import dataclasses
import itertools
import math
import random
from typing import Any

import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.data import dataset
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import Data
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mixtral
from jaxlm.optim.config import AdamW
from jaxlm.optim.schedule_config import Constant
from jaxlm.parallel import host, mesh
from jaxlm.parallel.config import AXES, MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.training.config import TrainConfig
from jaxlm.training.state import TrainState

VOCAB = 64
SIZES: dict[str, Any] = dict(vocab=VOCAB, width=16, depth=8, heads=8, kv_heads=8, head_dim=4)
FAMILIES = {
    "dense": Llama(**SIZES, hidden=32),
    "experts": Mixtral(**SIZES, hidden=16, experts=8, top_k=2, shared=16),
    # A row is the group in which an expert's places are counted, on every mesh.
    "capacity": Mixtral(**SIZES, hidden=16, experts=8, top_k=2, shared=16, capacity=1.0),
}


def corpus(folder: Any) -> DataConfig:
    """Short documents, packed two or three to a row with some padding at its end."""
    draw = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    for number in range(400):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(1, 3)))
        (folder / f"{number:03d}.txt").write_text(text)
    return DataConfig(
        train=(f"{folder}/*.txt",),
        validation=(),
        tokenizer="characters",
        sequence=16,
        packing="first_fit",
    )


def run_on(
    data: DataConfig,
    sizes: dict[str, Any],
    *,
    rows: int,
    microbatches: int,
    family: str = "experts",
    **train: Any,
) -> Run:
    """A run on a mesh with settings of it and of `train`; in a ring if its rows are split.

    Args:
      data: the config of the data.
      sizes: axis sizes of the mesh.
      rows: rows of a batch.
      microbatches: micro-batches per step.
      family: the model family.
    """
    settings: dict[str, Any] = {"data": 1, "context_keys": "ring"} | sizes
    return Run(
        model=FAMILIES[family],
        data=data,
        optim=AdamW(lr=3e-3),
        schedule=Constant(),
        train=TrainConfig(steps=20, batch=rows, microbatches=microbatches, **train),
        mesh=MeshConfig(**settings),
    )


@dataclasses.dataclass(frozen=True)
class Course:
    """Records of a run: figures of each step, first gradients, last parameters, first state."""

    losses: np.ndarray
    norms: np.ndarray
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    start: dict[str, np.ndarray]

    def deviation(self, other: "Course") -> dict[str, float]:
        """Largest differences, relative to each figure and to the largest element of each array."""
        return {
            "loss": float(np.abs(self.losses / other.losses - 1).max()),
            "first grad_norm": float(abs(self.norms[0] / other.norms[0] - 1)),
            "grad_norm": float(np.abs(self.norms / other.norms - 1).max()),
            "gradients": _apart(self.gradients, other.gradients),
            "parameters": _apart(self.params, other.params),
        }


def _apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(
        float(np.abs(one[path] - other[path]).max() / max(np.abs(other[path]).max(), 1e-30))
        for path in one
    )


def engine_of(run: Run, data: Data) -> TrainPrograms:
    """The engine of a run on the first devices that it needs; to be used under its mesh."""
    count = math.prod(getattr(run.mesh, axis) for axis in AXES)
    grid = mesh.build(run.mesh, jax.devices()[:count])
    host.check_rows(grid, run.train.batch, run.train.microbatches)
    setup.check_fit(run, grid)
    return TrainPrograms(run, data, setup.build_sharded_model(run, VOCAB, grid))


def follow(run: Run, steps: int, *, begun: dict[str, np.ndarray] | None = None) -> Course:
    """Run some steps from the beginning, or from the state of another run in `arrays`.

    Compiled for speed of compilation: LLVM's optimization passes change no collective.
    """
    engine = engine_of(run, dataset.open_data(run.data, seed=run.seed))
    losses, norms = [], []
    gradients: dict[str, np.ndarray] = {}
    with jax.set_mesh(engine.model.mesh):
        state: TrainState = engine.init_state() if begun is None else placed(engine, begun)
        start = arrays(state)
        batches = list(itertools.islice(engine.batches(0), steps))
        lowered = engine.step.lower(state, batches[0])
        step = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss_nats"]))
            norms.append(float(metrics["grad_norm"]))
            if (
                not gradients
            ):  # AdamW's first mean after one step is a tenth of the clipped gradient
                moments = arrays(state.opt_state)
                gradients = {path: x for path, x in moments.items() if "/mu/" in path}
    assert gradients
    return Course(np.array(losses), np.array(norms), gradients, arrays(state.params), start)


def placed(engine: TrainPrograms, values: dict[str, np.ndarray]) -> TrainState:
    """The state of an engine's run with these values."""
    abstract = engine.abstract()
    leaves, structure = jax.tree.flatten(abstract)
    paths = list(tree.leaves(abstract))
    assert paths == list(values)
    return jax.tree.unflatten(
        structure,
        [
            jax.device_put(values[path], leaf.sharding)
            for path, leaf in zip(paths, leaves, strict=True)
        ],
    )


def arrays(value: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree, whole, as NumPy arrays."""
    return {path: np.asarray(leaf) for path, leaf in tree.leaves(value).items()}
