"""A language-model trainer in JAX. `jaxlm.train(config, workdir=...)` equals `jaxlm train`."""

from typing import Any


def train(*arguments: Any, **options: Any) -> Any:
    """Train a model with the arguments of `jaxlm.recipes.train.api.train`.

    The first call imports it: `import jaxlm` alone does not import JAX or Orbax.
    """
    from jaxlm.recipes.train import api

    return api.train(*arguments, **options)
