"""What is exported: a run's model, its tensors by the names of transformers, and what it is rounded to."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from jaxlm.checkpoint.hub_tensors import Part, Theirs
from jaxlm.core import tree
from jaxlm.recipes.trained import Trained

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[Dtype, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run's model, opened, to be written."""

    opened: Trained
    family: Any  # of the model, with the rows of its embedding
    tensors: list[Theirs]
    dtype: np.dtype
    workdir: Path
    shard_bytes: int
    say: Callable[[str], None]

    @functools.cached_property
    def _leaves(self) -> dict[str, jax.Array]:
        return tree.leaves(self.opened.params)

    def array(self, theirs: Theirs) -> np.ndarray:
        """The numbers of a tensor as transformers has it, in the run's dtype."""

        def leaf(part: Part) -> np.ndarray:
            found = self._leaves[part.path]
            return np.asarray(found[part.lead] if part.lead else found)

        return theirs.joined(leaf)
