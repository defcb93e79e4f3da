"""Personal data and credentials, found by their form and, if they have one, a check digit."""

import bisect
import dataclasses
import functools
import importlib
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxlm.core.errors import not_installed
from jaxlm.corpus.config import Pii
from jaxlm.corpus.document import CorpusDocument, Removed, Stage


class PiiMatch(NamedTuple):
    """The range of a match in a text, and its kind."""

    start: int
    end: int
    kind: str


def apart(every: Iterable[PiiMatch], order: Sequence[str]) -> list[PiiMatch]:
    """Select matches without overlap, in order: the longer of two, then by the order of kinds."""
    ranked = sorted(
        every, key=lambda each: (each.start - each.end, order.index(each.kind), each.start)
    )
    selected: list[PiiMatch] = []  # sorted, so only the two adjacent ones can overlap the next
    for each in ranked:
        place = bisect.bisect(selected, each)
        if (not place or selected[place - 1].end <= each.start) and (
            place == len(selected) or each.end <= selected[place].start
        ):
            selected.insert(place, each)
    return selected


class NationalNumber(NamedTuple):
    """The pattern of a state's number, a required context before it, and its check."""

    form: str
    module: str = ""  # of python-stdnum; empty if the pattern is the only check
    before: str = ""


# A bare run of digits is matched only with a strong check or after its name: one in eleven numbers
# of nine digits passes the Dutch check. Checks: python-stdnum. The British number has none; its
# letters are those of HMRC's manual, NIM39110.
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
NATIONAL_SIGN = r"\d(?:\d{5}| \d\d|\.\d{3}|-\d{4}-|\d[A-Z])"
_FORMS = "|".join(f"{each.before}(?:{each.form})" for each in NATIONALS.values())
# Not in paths, longer numbers or hexadecimal tables, where a gigabyte of source code had most of
# its matches.
NATIONAL_PATTERN = (
    rf"(?<![\w./-])(?<!\d )(?<![\dA-F]{{4}} )(?:{_FORMS})(?![\w-]|[ .]\d| [\dA-F]{{4}}\b)"
)


def is_national(text: str) -> bool:
    """Return whether a text of one of the forms has valid check digits, dates and places."""
    return any(form.fullmatch(text) and is_right(text) for form, is_right in national_checks())


@functools.cache
def national_checks() -> list[tuple[re.Pattern[str], Callable[[str], bool]]]:
    """Return each pattern with its check. Raises InputMissing if python-stdnum is not installed."""
    modules = {each.module for each in NATIONALS.values() if each.module}
    try:
        checks = {each: importlib.import_module(f"stdnum.{each}").is_valid for each in modules}
    except ImportError as error:
        what = "the kind national_id of pii"
        raise not_installed(what, "python-stdnum", "prepare", where="pii.kinds") from error
    return [(re.compile(each.form), checks.get(each.module, bool)) for each in NATIONALS.values()]


# Recognizer of each kind. Keys have none in Presidio.
PRESIDIO_NAMES = {
    **{"email": "EmailRecognizer", "phone": "PhoneRecognizer", "ip": "IpRecognizer"},
    **{"card": "CreditCardRecognizer", "iban": "IbanRecognizer", "us_ssn": "UsSsnRecognizer"},
}


def presidio_finder(kinds: tuple[str, ...], score: float) -> Callable[[str], list[PiiMatch]]:
    """Return a function that finds these kinds with at least this score; matches may overlap.

    It uses Presidio's recognizers of patterns and check digits; those of names and places need a
    language model. Nothing is downloaded: the public suffixes are those in the package.

    Raises InputMissing if presidio-analyzer is not installed.
    """
    try:
        import tldextract
        from presidio_analyzer import predefined_recognizers
    except ImportError as error:
        what, package = "pii.finder=presidio", "presidio-analyzer"
        raise not_installed(what, package, "presidio", where="pii.finder") from error
    offline = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    class Email(predefined_recognizers.EmailRecognizer):  # type: ignore[misc]
        """Presidio's recognizer, which by itself would download the suffixes."""

        def validate_result(self, pattern_text: str) -> bool:
            return bool(offline(pattern_text).fqdn)

    made: dict[str, Any] = {
        kind: Email() if kind == "email" else getattr(predefined_recognizers, name)()
        for kind, name in PRESIDIO_NAMES.items()
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


def pii(config: Pii) -> Stage:
    """Mask each match as <EMAIL> and the like, or remove its document.

    Metadata is masked in both cases, except URLs, which give its origin. Raises InputMissing if
    presidio is the finder and not installed, or python-stdnum for national_id.
    """
    if "national_id" in config.kinds:
        national_checks()
    finder: Callable[[str], list[PiiMatch]] = functools.partial(find, kinds=config.kinds)
    if config.finder == "presidio":
        other = presidio_finder(config.kinds, config.score)
        own_kinds = tuple(kind for kind in config.kinds if kind not in PRESIDIO_NAMES)

        def finder(text: str) -> list[PiiMatch]:
            return apart([*other(text), *find(text, own_kinds)], list(KINDS))

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        matches = finder(document.text)
        if matches and config.action == "remove":
            detail = f"at character {matches[0].start}, {len(matches)} in all"
            return Removed(matches[0].kind, detail)

        def masked_meta(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: masked_meta(each) for key, each in value.items()}
            if isinstance(value, list):
                return [masked_meta(each) for each in value]
            if not isinstance(value, str) or value.startswith(("http://", "https://")):
                return value
            return masked(value, finder(value), "masked in metadata", counts)

        text = masked(document.text, matches, "masked", counts)
        return dataclasses.replace(document, text=text, meta=masked_meta(document.meta))

    return stage


def masked(text: str, matches: list[PiiMatch], what: str, counts: Counter[str]) -> str:
    """Replace each match by its kind, and count it as `what`."""
    pieces, end = [], 0
    for each in matches:
        counts[f"pii: {each.kind} {what}"] += 1
        pieces += [text[end : each.start], f"<{each.kind.upper()}>"]
        end = each.end
    return "".join(pieces) + text[end:]


def find(text: str, kinds: tuple[str, ...]) -> list[PiiMatch]:
    """Return matches of these kinds, in order, without overlap: the longer, then by KINDS.

    Example:
      >>> find("Mail to ada@example.org", ("email",))
      [PiiMatch(start=8, end=23, kind='email')]
    """
    matches = [
        PiiMatch(begin + match.start(), begin + match.end(), kind)
        for kind in kinds
        for begin, piece in KINDS[kind].pieces(text)
        for match in KINDS[kind].pattern.finditer(piece)
        if KINDS[kind].is_right(match)
    ]
    return apart(matches, list(KINDS))


def passes_luhn(digits: str) -> bool:
    """Check the last digit by Luhn's algorithm: ISO/IEC 7812-1, annex B."""
    total = 0
    for place, letter in enumerate(reversed(digits)):
        value = int(letter) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def passes_mod97(code: str) -> bool:
    """Check an IBAN without spaces: 1 modulo 97 (ISO 13616), first four last, A = 10."""
    return int("".join(str(int(letter, 36)) for letter in code[4:] + code[:4])) % 97 == 1


# Country and length of an IBAN, from SWIFT's registry: the countries of SEPA and a few more.
IBAN_LENGTHS = {
    each[:2]: int(each[2:])
    for each in (
        "NO15 BE16 DK18 FI18 NL18 SI19 AT20 EE20 LT20 LU20 CH21 HR21 LI21 LV21 BG22 DE22 GB22"
        " IE22 AE23 IL23 CZ24 ES24 RO24 SA24 SE24 SK24 PT25 IS26 TR26 FR27 GR27 IT27 MC27 SM27"
        " CY28 HU28 PL28 MT31"
    ).split()
}
# Prefixes and lengths of Visa, Mastercard, American Express, Diners, Discover, JCB.
_CARD = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"
    r"|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}"
)


def _is_card(match: re.Match[str]) -> bool:
    digits = re.sub(r"\D", "", match[0])
    return bool(_CARD.fullmatch(digits)) and passes_luhn(digits)


def _is_iban(match: re.Match[str]) -> bool:
    code = match[0].replace(" ", "")
    return len(code) == IBAN_LENGTHS.get(code[:2]) and passes_mod97(code)


# Top-level domains that are no attribute of an array: an address with one needs no further check.
USUAL_DOMAINS = frozenset(
    "com org net edu gov mil int info biz museum "
    "ar au be bg br ca ch cl cn co cz de dk ee es eu fi fr gr hk hr hu ie il ir jp kr lt lu lv mx"
    " my nl nz pe ph pl pt ro rs ru se sg si sk th tr tw ua uk us vn za".split()
)
# Attributes and methods of arrays, which are no top-level domains: `q@k.transpose` is a product.
ATTRIBUTES = frozenset(
    "adjoint array astype bias bfloat clone coef conj conjugate contiguous copy cpu cuda detach"
    " diag dtype expand flat flatten float grad half imag inv inverse item kernel mH mT mean ndim"
    " numpy params permute ravel repeat reshape shape size squeeze std sum swapaxes toarray tocsr"
    " todense tolist transpose unsqueeze value values var view weight weights".split()
)
SERVICES = frozenset(("git", "hg", "svn"))  # accounts of repositories, not of persons


def _is_email(match: re.Match[str]) -> bool:
    """Return whether a match is an email address, not a product of arrays or a repository URL."""
    local, domain = match[0].rsplit("@", 1)
    last = domain.rpartition(".")[2]
    after = match.string[match.end() : match.end() + 1]
    if last in ATTRIBUTES or (local in SERVICES and after in (":", "/")):
        return False
    return last.lower() in USUAL_DOMAINS or _CALLED.match(match.string, match.end()) is None


_CALLED = re.compile(r"(?:\.\w+)*[(\[]")


# Words before the number of a version or section. `node` may be a machine: after it only small
# numbers are versions.
_NUMBERED = re.compile(
    r"(?:(?:\b(?:version|ver|release|revision|rev|build|section|sect|sec|chapter|clause|paragraph"
    r"|para|appendix|annex|figure|fig|table|python|java|openssl|chrome|firefox)s?\b|\u00a7)"
    r"[ .:=(\"']{0,3}"
    r"|(?:[<>=!~]=|\^|~>) ?|(?P<node>\bnode(?:\.?js)? ?))$",
    re.IGNORECASE,
)
_LARGEST_VERSION = 50  # of each part, after "node"
# Allocated IPv6 ranges (RFC 4291, section 2.4; RFC 6052, section 2.1).
_GIVEN_OUT = tuple(map(ipaddress.IPv6Network, ("2000::/3", "64:ff9b::/96")))


def _is_address(match: re.Match[str]) -> bool:
    """Return whether a match is a public address that can belong to a person.

    Private, local, documentation and unallocated ranges, as in `abc::def`, cannot. Numbers of
    versions and sections are no addresses.
    """
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return False
    if not address.is_global:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped is not None or any(address in net for net in _GIVEN_OUT)
    before = _NUMBERED.search(match.string, max(0, match.start() - 20), match.start())
    if before is None:
        return True
    return bool(before["node"]) and max(address.packed) > _LARGEST_VERSION


def _is_phone(match: re.Match[str]) -> bool:
    text = match[0]
    digits = re.sub(r"\D", "", text)
    if text.startswith("+"):
        return 8 <= len(digits) <= 15  # ITU-T E.164
    # In North America area and exchange do not begin with 0 or 1, and 555-01xx is for fiction.
    area, exchange, line = digits[-10:-7], digits[-7:-4], digits[-4:]
    is_story = exchange == "555" and line.startswith("01")
    return area[0] > "1" and exchange[0] > "1" and not is_story


def _is_ssn(match: re.Match[str]) -> bool:
    """Return whether the ranges are ones the US Social Security Administration issued."""
    area, group, serial = match[0].split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _lines_with(sign: str) -> Callable[[str], Iterator[tuple[int, str]]]:
    """Return a function that yields the lines with a short pattern, and their offsets.

    It skips most text at this price. The pattern must not match a line end, and is searched fast
    if its matches begin with one set of characters.
    """
    search = re.compile(sign).search

    def pieces(text: str) -> Iterator[tuple[int, str]]:
        end = -1
        while match := search(text, end + 1):
            begin = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.end())
            end = len(text) if end < 0 else end
            yield begin, text[begin:end]

    return pieces


def _texts_with_keys(text: str) -> Iterator[tuple[int, str]]:
    """Yield the whole text if it contains a sign of a key."""
    if any(sign in text for sign in _KEY_SIGNS):
        yield 0, text


class _Kind(NamedTuple):
    pieces: Callable[[str], Iterator[tuple[int, str]]]  # the parts of a text to search
    pattern: re.Pattern[str]
    is_right: Callable[[re.Match[str]], bool]


def _kind(sign: str, pattern: str, is_right: Callable[[re.Match[str]], bool]) -> _Kind:
    """Return a kind whose matches are in a line that has a match of the short pattern `sign`."""
    return _Kind(_lines_with(sign), re.compile(pattern), is_right)


_KEYS = (
    r"-----BEGIN (?:[A-Z]{1,20} ){0,3}PRIVATE KEY-----[A-Za-z0-9+/=\s]{20,10000}"
    r"-----END (?:[A-Z]{1,20} ){0,3}PRIVATE KEY-----",
    r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b",  # Amazon
    r"\bgh[opsur]_[A-Za-z0-9]{36,255}\b|\bgithub_pat_\w{60,255}\b",
    r"\bglpat-[\w-]{20,64}",  # GitLab
    r"\bxox[abprs]-[A-Za-z0-9-]{10,250}",  # Slack
    r"\bAIza[\w-]{35}(?![\w-])",  # Google
    r"\b[sr]k_live_[A-Za-z0-9]{16,250}\b",  # Stripe
    r"\bhf_[A-Za-z0-9]{30,64}\b",  # Hugging Face
    r"\beyJ[\w-]{10,2000}\.eyJ[\w-]{10,4000}\.[\w-]{10,2000}",  # RFC 7519
)
_KEY_SIGNS = (
    "PRIVATE KEY",
    *"AKIA ASIA gho_ ghp_ ghs_ ghu_ ghr_ github_pat_ glpat- xox AIza k_live_ hf_ eyJ".split(),
)
# In order of precedence for overlapping matches of equal length.
KINDS = {
    "key": _Kind(_texts_with_keys, re.compile("|".join(_KEYS)), bool),
    "email": _kind(
        "@",
        # RFC 5322's dot-atom, in its common forms.
        r"(?<![\w.+%-])[A-Za-z0-9_%+-]{1,64}(?:\.[A-Za-z0-9_%+-]{1,64}){0,5}"
        r"@(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,6}"
        r"[A-Za-z]{2,24}(?![\w@-])",
        _is_email,
    ),
    "iban": _kind(
        r"[A-Z]{2}\d\d",
        r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?"
        r"(?![A-Za-z0-9])",
        _is_iban,
    ),
    "card": _kind(
        r"\d{4}",
        r"(?<![\w.-])(?:\d{4}[ -]?\d{4}[ -]?\d{4}[ -]?\d{1,7}|\d{4}[ -]?\d{6}[ -]?\d{4,5})"
        r"(?![\w-]|\.\d)",
        _is_card,
    ),
    "us_ssn": _kind(r"\d-\d", r"(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-]|\.\d)", _is_ssn),
    "national_id": _kind(NATIONAL_SIGN, NATIONAL_PATTERN, lambda match: is_national(match[0])),
    "ip": _kind(
        r"[.:](?:(?<=\d\.)\d|(?<=[0-9A-Fa-f]:))",
        r"(?<![\w.:-])(?:\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)"
        r"|(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}(?![:.]?\w))",
        _is_address,
    ),
    "phone": _kind(
        r"\d\d[)]?[ .-]?[(]?\d",
        r"(?<![\w.+-])(?:\+\d{1,3}(?:[ .-]?(?:\(\d{1,4}\)|\d{1,4})){2,5}"
        r"|(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4})"
        r"(?![\w-]|\.\d)",
        _is_phone,
    ),
}
