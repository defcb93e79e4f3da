"""A trainer of language models. `jaxlm.train(config, workdir=...)` trains from Python; `jaxlm train` is the same command."""

from typing import Any


def train(*arguments: Any, **options: Any) -> Any:
    """Train a model: see `jaxlm.recipes.train.api.train`, whose arguments these are.

    It is imported by the first call: `import jaxlm` alone imports neither JAX nor Orbax.
    """
    from jaxlm.recipes.train import api

    return api.train(*arguments, **options)
