"""A trainer of language models: `jaxlm.train(config, workdir=...)` is what notebooks call; `recipes.training` says what it takes."""

from types import ModuleType
from typing import Any

from jaxlm import train


class _Train(ModuleType):
    """The room of that name, which can be called as well: whoever imports it would hide a function of its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """`recipes.training.train`, imported when it is called: it needs what a look at the package does not."""
        from jaxlm.recipes import training

        return training.train(*arguments, **options)


train.__class__ = _Train
