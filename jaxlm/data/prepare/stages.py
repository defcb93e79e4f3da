"""The stages that a recipe names, as functions."""

from collections.abc import Callable

from jaxlm.data.prepare.config import Recipe
from jaxlm.data.prepare.document import Stage
from jaxlm.data.prepare.filters.c4 import c4
from jaxlm.data.prepare.filters.decontaminate import decontaminate, evaluations
from jaxlm.data.prepare.filters.fineweb import fineweb
from jaxlm.data.prepare.filters.gopher import gopher
from jaxlm.data.prepare.filters.language import language
from jaxlm.data.prepare.filters.length import length
from jaxlm.data.prepare.filters.normalise import mojibake, normalise
from jaxlm.data.prepare.filters.pii import pii
from jaxlm.data.prepare.filters.repetition import repetition
from jaxlm.data.prepare.filters.source_code import code
from jaxlm.data.prepare.filters.urls import urls

# What a stage needs is read when it is made: lists, models, evaluation sets.
MAKERS: dict[str, Callable[[Recipe], Stage]] = {
    "mojibake": lambda recipe: mojibake(),
    "normalise": lambda recipe: normalise(),
    "length": lambda recipe: length(recipe.length),
    "urls": lambda recipe: urls(recipe.urls),
    "language": lambda recipe: language(recipe.language),
    "gopher": lambda recipe: gopher(recipe.gopher),
    "repetition": lambda recipe: repetition(recipe.repetition),
    "c4": lambda recipe: c4(recipe.c4),
    "fineweb": lambda recipe: fineweb(recipe.fineweb),
    "code": lambda recipe: code(recipe.code),
    "pii": lambda recipe: pii(recipe.pii),
    "decontaminate": lambda recipe: decontaminate(recipe.decontaminate, evaluations(recipe)),
}


def build(recipe: Recipe) -> list[tuple[str, Stage]]:
    """The name of each stage and what it does, in the recipe's order.

    Raises:
      InputMissing: where a stage needs a file or a package that is not there.
    """
    return [(name, MAKERS[name](recipe)) for name in recipe.stages]
