"""The stages that a recipe names, as functions."""

from collections.abc import Callable

from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import Stage
from jaxlm.corpus.filters.blocklists import decontaminate, evaluations, urls
from jaxlm.corpus.filters.heuristics import c4, code, fineweb, gopher, length, repetition
from jaxlm.corpus.filters.licence import licence
from jaxlm.corpus.filters.models import MakeScorer, harmful, language, perplexity, quality
from jaxlm.corpus.filters.normalize import mojibake, normalize
from jaxlm.corpus.filters.pii import pii

# A stage loads its lists, models and evaluation sets when it is made.
MAKERS: dict[str, Callable[[Recipe, MakeScorer | None], Stage]] = {
    "mojibake": lambda recipe, _: mojibake(),
    "normalize": lambda recipe, _: normalize(),
    "length": lambda recipe, _: length(recipe.length),
    "urls": lambda recipe, _: urls(recipe.urls),
    "language": lambda recipe, _: language(recipe.language),
    "gopher": lambda recipe, _: gopher(recipe.gopher),
    "repetition": lambda recipe, _: repetition(recipe.repetition),
    "c4": lambda recipe, _: c4(recipe.c4),
    "fineweb": lambda recipe, _: fineweb(recipe.fineweb),
    "code": lambda recipe, _: code(recipe.code),
    "pii": lambda recipe, _: pii(recipe.pii),
    "decontaminate": lambda recipe, _: decontaminate(recipe.decontaminate, evaluations(recipe)),
    "quality": lambda recipe, _: quality(recipe.quality),
    "perplexity": lambda recipe, make: perplexity(recipe.perplexity, make),
    "harmful": lambda recipe, _: harmful(recipe.harmful),
    "licence": lambda recipe, _: licence(recipe.licence),
}


def build(recipe: Recipe, scorer: MakeScorer | None = None) -> list[tuple[str, Stage]]:
    """Return the name and function of each stage, in the recipe's order.

    `scorer` opens the model of the stage perplexity. Raises InputMissing if a file or package that
    a stage needs is missing.
    """
    return [(name, MAKERS[name](recipe, scorer)) for name in recipe.stages]
