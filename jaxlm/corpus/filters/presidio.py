"""Personal data as found by Microsoft's Presidio: its recognizers of patterns and check digits.

Those of names and places need a language model and are not used. Nothing is downloaded: the list of
public suffixes is the one in the package.
"""

from collections.abc import Callable
from typing import Any

from jaxlm.core.errors import not_installed
from jaxlm.corpus.filters.found import PiiMatch

# Recognizer of each kind. Keys have none in Presidio.
NAMES = {
    "email": "EmailRecognizer",
    "phone": "PhoneRecognizer",
    "ip": "IpRecognizer",
    "card": "CreditCardRecognizer",
    "iban": "IbanRecognizer",
    "us_ssn": "UsSsnRecognizer",
}


def finders(kinds: tuple[str, ...], score: float) -> Callable[[str], list[PiiMatch]]:
    """Return a function that finds these kinds with at least this score; matches may overlap.

    Raises:
      InputMissing: presidio-analyzer is not installed.
    """
    try:
        import tldextract
        from presidio_analyzer import predefined_recognizers
    except ImportError as error:
        raise not_installed(
            "pii.finder=presidio", "presidio-analyzer", "presidio", where="pii.finder"
        ) from error
    offline = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    class Email(predefined_recognizers.EmailRecognizer):  # type: ignore[misc]
        """Presidio's recognizer, which by itself would download the suffixes."""

        def validate_result(self, pattern_text: str) -> bool:
            return bool(offline(pattern_text).fqdn)

    made: dict[str, Any] = {
        kind: Email() if kind == "email" else getattr(predefined_recognizers, name)()
        for kind, name in NAMES.items()
        if kind in kinds
    }

    def find(text: str) -> list[PiiMatch]:
        return [
            PiiMatch(each.start, each.end, kind)
            for kind, recogniser in made.items()
            for each in recogniser.analyze(text, recogniser.supported_entities, None)
            if each.score >= score
        ]

    return find
