"""National identification numbers, in their written forms, verified by their check digits.

A bare run of digits is matched only with a strong check or after its name: one in eleven numbers of
nine digits passes the Dutch check. Checks: python-stdnum. The British number has none; its letters
are those of HMRC's manual, NIM39110.
"""

import functools
import importlib
import re
from collections.abc import Callable
from typing import NamedTuple

from jaxlm.core.errors import not_installed


class NationalNumber(NamedTuple):
    """The pattern of a state's number, a required context before it, and its check."""

    form: str
    module: str = ""  # of python-stdnum; empty if the pattern is the only check
    before: str = ""


NATIONALS = {
    "de_steuer_id": NationalNumber(r"[1-9]\d{10}|[1-9]\d \d{3} \d{3} \d{3}", "de.idnr"),
    "fr_nir": NationalNumber(r"[12] ?\d\d ?\d\d ?\d[\dAB] ?\d{3} ?\d{3} ?\d\d", "fr.nir"),
    "es_dni": NationalNumber(r"\d{8}[ -]?[A-HJ-NP-TV-Z]", "es.dni"),
    "es_nie": NationalNumber(r"[XYZ][ -]?\d{7}[ -]?[A-HJ-NP-TV-Z]", "es.nie"),
    "it_codice_fiscale": NationalNumber(
        r"[A-Z]{6}(?:[\dL-V]{2}[A-Z]){2}[\dL-V]{3}[A-Z]", "it.codicefiscale"
    ),
    "nl_bsn": NationalNumber(
        r"\d{9}|\d{4}[. ]\d\d[. ]\d{3}",
        "nl.bsn",
        r"(?:(?<=[Bb][Ss][Nn] )|(?<=[Bb][Ss][Nn]: )|(?<=nummer )|(?<=nummer: ))",
    ),
    "br_cpf": NationalNumber(r"\d{3}\.\d{3}\.\d{3}-\d\d", "br.cpf"),
    "in_aadhaar": NationalNumber(r"[2-9]\d{3}(?: \d{4} |-\d{4}-)\d{4}", "in_.aadhaar"),
    # Only the check of GB 11643: the table of counties in python-stdnum 2.2 lacks most that were
    # renamed or merged since people were born there.
    "cn_resident_id": NationalNumber(
        r"(?:1[1-5]|2[1-3]|3[1-7]|4[1-6]|5[0-4]|6[1-5]|71|8[1-3])\d{4}"
        r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dX]",
        "iso7064.mod_11_2",
    ),
    "gb_nino": NationalNumber(
        r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z](?: ?\d\d){3} ?[A-D]"
    ),
}
# Every number contains one of these; a pattern with a common beginning is fast to search.
SIGN = r"\d(?:\d{5}| \d\d|\.\d{3}|-\d{4}-|\d[A-Z])"
_FORMS = "|".join(f"{each.before}(?:{each.form})" for each in NATIONALS.values())
# Not in paths, longer numbers or hexadecimal tables, where a gigabyte of source code had most of
# its matches.
PATTERN = re.compile(
    rf"(?<![\w./-])(?<!\d )(?<![\dA-F]{{4}} )(?:{_FORMS})(?![\w-]|[ .]\d| [\dA-F]{{4}}\b)"
)


def is_national(text: str) -> bool:
    """Return whether a text of one of the forms has valid check digits, dates and places."""
    return any(form.fullmatch(text) and is_right(text) for form, is_right in checks())


@functools.cache
def checks() -> list[tuple[re.Pattern[str], Callable[[str], bool]]]:
    """Return each pattern with its check.

    Raises:
      InputMissing: python-stdnum is not installed.
    """
    patterns = []
    for each in NATIONALS.values():
        is_right: Callable[[str], bool] = bool
        if each.module:
            try:
                is_right = importlib.import_module(f"stdnum.{each.module}").is_valid
            except ImportError as error:
                what = "the kind national_id of pii"
                raise not_installed(what, "python-stdnum", "prepare", where="pii.kinds") from error
        patterns.append((re.compile(each.form), is_right))
    return patterns
