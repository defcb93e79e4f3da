"""A language-model trainer in JAX.

`jaxlm.train(config, workdir=...)` equals `jaxlm train`. `jaxlm.load(run)` opens the model of a run,
of a folder of transformers, of a .gguf file or of the Hugging Face Hub.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlm.core.callbacks import Callback
    from jaxlm.recipes.config import Run as Config
    from jaxlm.recipes.language_model import LanguageModel, load
    from jaxlm.recipes.train.api import ResumeOptions, train

__all__ = ["Callback", "Config", "LanguageModel", "ResumeOptions", "__version__", "load", "train"]
_PLACES = {  # imported when they are first used: `import jaxlm` alone imports no JAX
    "Callback": ("jaxlm.core.callbacks", "Callback"),
    "Config": ("jaxlm.recipes.config", "Run"),
    "LanguageModel": ("jaxlm.recipes.language_model", "LanguageModel"),
    "ResumeOptions": ("jaxlm.recipes.train.api", "ResumeOptions"),
    "load": ("jaxlm.recipes.language_model", "load"),
    "train": ("jaxlm.recipes.train.api", "train"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        metadata = importlib.import_module("importlib.metadata")
        return metadata.version("jaxlm")
    if name not in _PLACES:
        raise AttributeError(f"module 'jaxlm' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
