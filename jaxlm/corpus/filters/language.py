"""Which languages are kept."""

from collections import Counter

from jaxlm.core.errors import ConfigError, not_installed
from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import Language


def language(config: Language) -> Stage:
    """Documents that a model of byte n-grams takes for one of the languages; code and belief go to the meta.

    Raises:
      InputMissing: where py3langid is not installed.
      ConfigError: where it knows one of the languages not.

    Source: Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool"; the model is in the wheel.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise not_installed("the stage language", "py3langid", "prepare", where="stages") from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    known = set(identifier.labels)
    if unknown := [code for code in config.keep if code not in known]:
        raise ConfigError(
            f"py3langid knows no language {unknown[0]!r}",
            where="language.keep",
            why=f"it knows {', '.join(sorted(known))}",
            fix="--config.language.keep=en",
        )

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        code, belief = identifier.classify(document.text[: config.read])
        belief = round(float(belief), 3)
        if code not in config.keep:
            return Removed("other", f"{code}, {belief}")
        if belief < config.probability:
            return Removed("unsure", f"{code}, {belief}")
        counts[f"language: {code}"] += 1
        return document.with_text(document.text, language=code, language_probability=belief)

    return stage
