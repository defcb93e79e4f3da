"""Language identification."""

from collections import Counter

from jaxlm.core.errors import ConfigError, not_installed
from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import Language


def language(config: Language) -> Stage:
    """Keep documents in one of the languages; code and probability become metadata.

    Raises:
      InputMissing: py3langid is not installed.
      ConfigError: py3langid does not support a language.

    Source: Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool", with
    byte n-grams; the model is in the wheel.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise not_installed("the stage language", "py3langid", "prepare", where="stages") from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    known = set(identifier.labels)
    if unknown := [code for code in config.keep if code not in known]:
        raise ConfigError(
            f"py3langid does not support the language {unknown[0]!r}",
            where="language.keep",
            why=f"it supports {', '.join(sorted(known))}",
            fix="--config.language.keep=en",
        )

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        code, probability = identifier.classify(document.text[: config.read])
        probability = round(float(probability), 3)
        if code not in config.keep:
            return Removed("other", f"{code}, {probability}")
        if probability < config.probability:
            return Removed("unsure", f"{code}, {probability}")
        counts[f"language: {code}"] += 1
        return document.with_text(document.text, language=code, language_probability=probability)

    return stage
