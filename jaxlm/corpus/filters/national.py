"""Numbers that states give to persons, in the forms that people write, with what their check digits say.

A bare run of digits is looked at only where its check is strong or its name stands before it: one in eleven numbers of nine
digits is right as a Dutch one. Checks: python-stdnum. The British one has none; its letters are those of HMRC's manual, NIM39110.
"""

import functools
import importlib
import re
from collections.abc import Callable
from typing import NamedTuple

from jaxlm.core.errors import not_installed


class National(NamedTuple):
    """What one state's number looks like, what stands before it, and the module that checks it."""

    form: str
    module: str = ""  # of python-stdnum; nothing where the form says all
    before: str = ""


NATIONALS = {
    "de_steuer_id": National(r"[1-9]\d{10}|[1-9]\d \d{3} \d{3} \d{3}", "de.idnr"),
    "fr_nir": National(r"[12] ?\d\d ?\d\d ?\d[\dAB] ?\d{3} ?\d{3} ?\d\d", "fr.nir"),
    "es_dni": National(r"\d{8}[ -]?[A-HJ-NP-TV-Z]", "es.dni"),
    "es_nie": National(r"[XYZ][ -]?\d{7}[ -]?[A-HJ-NP-TV-Z]", "es.nie"),
    "it_codice_fiscale": National(
        r"[A-Z]{6}(?:[\dL-V]{2}[A-Z]){2}[\dL-V]{3}[A-Z]", "it.codicefiscale"
    ),
    "nl_bsn": National(
        r"\d{9}|\d{4}[. ]\d\d[. ]\d{3}",
        "nl.bsn",
        r"(?:(?<=[Bb][Ss][Nn] )|(?<=[Bb][Ss][Nn]: )|(?<=nummer )|(?<=nummer: ))",
    ),
    "br_cpf": National(r"\d{3}\.\d{3}\.\d{3}-\d\d", "br.cpf"),
    "in_aadhaar": National(r"[2-9]\d{3}(?: \d{4} |-\d{4}-)\d{4}", "in_.aadhaar"),
    # The check of GB 11643 by itself: the table of counties in python-stdnum 2.2 lacks most of those that were renamed or
    # joined since people were born there.
    "cn_resident_id": National(
        r"(?:1[1-5]|2[1-3]|3[1-7]|4[1-6]|5[0-4]|6[1-5]|71|8[1-3])\d{4}"
        r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dX]",
        "iso7064.mod_11_2",
    ),
    "gb_nino": National(
        r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z](?: ?\d\d){3} ?[A-D]"
    ),
}
SIGN = r"\d(?:\d{5}| \d\d|\.\d{3}|-\d{4}-|\d[A-Z])"  # each holds one of these; a common begin is found fast
_FORMS = "|".join(f"{each.before}(?:{each.form})" for each in NATIONALS.values())
# Not in a path or a longer number, nor in a table of numbers in hexadecimal, as most finds in a gigabyte of source code were.
PATTERN = re.compile(
    rf"(?<![\w./-])(?<!\d )(?<![\dA-F]{{4}} )(?:{_FORMS})(?![\w-]|[ .]\d| [\dA-F]{{4}}\b)"
)


def is_national(text: str) -> bool:
    """Whether a text of one of the forms has the check digits, dates and places that it must have."""
    return any(form.fullmatch(text) and is_right(text) for form, is_right in checks())


@functools.cache
def checks() -> list[tuple[re.Pattern[str], Callable[[str], bool]]]:
    """Each form, and what says whether a text of that form is right.

    Raises:
      InputMissing: where python-stdnum is not installed.
    """
    found = []
    for each in NATIONALS.values():
        is_right: Callable[[str], bool] = bool
        if each.module:
            try:
                is_right = importlib.import_module(f"stdnum.{each.module}").is_valid
            except ImportError as error:
                what = "the kind national_id of pii"
                raise not_installed(what, "python-stdnum", "prepare", where="pii.kinds") from error
        found.append((re.compile(each.form), is_right))
    return found
