"""What tells who or where a person is, and what opens their doors: found by form, and by check digits where there are some."""

import dataclasses
import functools
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters import national, presidio
from jaxlm.corpus.filters.config import Pii
from jaxlm.corpus.filters.found import Found, apart

PAGES = ("http://", "https://")


def pii(config: Pii) -> Stage:
    """Each find masked as <EMAIL> and the like, or its document removed.

    What stands beside a text, in its meta, is masked in either case. Addresses of pages there stay: they say where it is from.

    Raises:
      InputMissing: where the finder is presidio and not installed, or python-stdnum is not, for national_id.
    """
    if "national_id" in config.kinds:
        national.checks()
    finder: Callable[[str], list[Found]] = functools.partial(find, kinds=config.kinds)
    if config.finder == "presidio":
        other = presidio.finders(config.kinds, config.score)
        ours = tuple(kind for kind in config.kinds if kind not in presidio.NAMES)

        def finder(text: str) -> list[Found]:
            return apart([*other(text), *find(text, ours)], list(KINDS))

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        found = finder(document.text)
        if found and config.action == "remove":
            return Removed(found[0].kind, f"at character {found[0].start}, {len(found)} in all")

        def beside(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: beside(each) for key, each in value.items()}
            if isinstance(value, list):
                return [beside(each) for each in value]
            if not isinstance(value, str) or value.startswith(PAGES):
                return value
            return masked(value, finder(value), "masked beside a text", counts)

        return dataclasses.replace(
            document,
            text=masked(document.text, found, "masked", counts),
            meta=beside(document.meta),
        )

    return stage


def masked(text: str, found: list[Found], what: str, counts: Counter[str]) -> str:
    """A text with the kind of each find in its place, each counted as `what`."""
    pieces, end = [], 0
    for each in found:
        counts[f"pii: {each.kind} {what}"] += 1
        pieces += [text[end : each.start], f"<{each.kind.upper()}>"]
        end = each.end
    return "".join(pieces) + text[end:]


def find(text: str, kinds: tuple[str, ...]) -> list[Found]:
    """Everything of these kinds, in order, none over another: of two the longer, then the one that KINDS has first."""
    return apart((each for kind in kinds for each in _of_kind(text, kind)), list(KINDS))


def _of_kind(text: str, kind: str) -> Iterator[Found]:
    pieces, pattern, is_right = KINDS[kind]
    for begin, piece in pieces(text):
        for match in pattern.finditer(piece):
            if is_right(match):
                yield Found(begin + match.start(), begin + match.end(), kind)


def passes_luhn(digits: str) -> bool:
    """Whether the last digit is the check of the others: ISO/IEC 7812-1, annex B."""
    total = 0
    for place, letter in enumerate(reversed(digits)):
        value = int(letter) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def passes_mod97(code: str) -> bool:
    """Whether an IBAN, without spaces, is 1 modulo 97 as ISO 13616 has it: first four to the end, letters from A = 10."""
    return int("".join(str(int(letter, 36)) for letter in code[4:] + code[:4])) % 97 == 1


# Length of the whole IBAN by country: SWIFT's registry, of which these are the countries of SEPA and a few more.
IBAN_LENGTHS = {
    **dict.fromkeys(("NO",), 15),
    **dict.fromkeys(("BE",), 16),
    **dict.fromkeys(("DK", "FI", "NL"), 18),
    **dict.fromkeys(("SI",), 19),
    **dict.fromkeys(("AT", "EE", "LT", "LU"), 20),
    **dict.fromkeys(("CH", "HR", "LI", "LV"), 21),
    **dict.fromkeys(("BG", "DE", "GB", "IE"), 22),
    **dict.fromkeys(("AE", "IL"), 23),
    **dict.fromkeys(("CZ", "ES", "RO", "SE", "SK", "SA"), 24),
    **dict.fromkeys(("PT",), 25),
    **dict.fromkeys(("IS", "TR"), 26),
    **dict.fromkeys(("FR", "GR", "IT", "MC", "SM"), 27),
    **dict.fromkeys(("CY", "HU", "PL"), 28),
    **dict.fromkeys(("MT",), 31),
}
# Leading digits and lengths that the networks give out: Visa, Mastercard, American Express, Diners, Discover, JCB.
_CARD = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}"
)


def _is_card(match: re.Match[str]) -> bool:
    digits = re.sub(r"\D", "", match[0])
    return bool(_CARD.fullmatch(digits)) and passes_luhn(digits)


def _is_iban(match: re.Match[str]) -> bool:
    code = match[0].replace(" ", "")
    return len(code) == IBAN_LENGTHS.get(code[:2]) and passes_mod97(code)


# Top-level domains that no array has for an attribute: they end an address whatever follows.
USUAL_DOMAINS = frozenset(
    "com org net edu gov mil int info biz museum "
    "ar au be bg br ca ch cl cn co cz de dk ee es eu fi fr gr hk hr hu ie il ir jp kr lt lu lv mx my "
    "nl nz pe ph pl pt ro rs ru se sg si sk th tr tw ua uk us vn za".split()
)
# Attributes and methods of arrays that are no top-level domain: `q@k.transpose` is a product.
ATTRIBUTES = frozenset(
    "adjoint array astype bias bfloat clone coef conj conjugate contiguous copy cpu cuda detach diag "
    "dtype expand flat flatten float grad half imag inv inverse item kernel mH mT mean ndim numpy params "
    "permute ravel repeat reshape shape size squeeze std sum swapaxes toarray tocsr todense tolist "
    "transpose unsqueeze value values var view weight weights".split()
)
SERVICES = frozenset(("git", "hg", "svn"))  # accounts that everybody pushes to


def _is_email(match: re.Match[str]) -> bool:
    """Return whether it is an address of mail, and no product of arrays or place of a repository."""
    local, domain = match[0].rsplit("@", 1)
    last = domain.rpartition(".")[2]
    after = match.string[match.end() : match.end() + 1]
    if last in ATTRIBUTES or (local in SERVICES and after in (":", "/")):
        return False
    return last.lower() in USUAL_DOMAINS or _CALLED.match(match.string, match.end()) is None


_CALLED = re.compile(r"(?:\.\w+)*[(\[]")


# What stands before the number of a version or of a section. A node may be a machine: there only small numbers are versions.
_NUMBERED = re.compile(
    r"(?:(?:\b(?:version|ver|release|revision|rev|build|section|sect|sec|chapter|clause|paragraph|para"
    r"|appendix|annex|figure|fig|table|python|java|openssl|chrome|firefox)s?\b|\u00a7)[ .:=(\"']{0,3}"
    r"|(?:[<>=!~]=|\^|~>) ?|(?P<node>\bnode(?:\.?js)? ?))$",
    re.IGNORECASE,
)
_LARGEST_VERSION = 50  # of each part, behind "node"
# What IANA has given out of the addresses of version 6 (RFC 4291, section 2.4; RFC 6052, section 2.1).
_GIVEN_OUT = tuple(map(ipaddress.IPv6Network, ("2000::/3", "64:ff9b::/96")))


def _is_address(match: re.Match[str]) -> bool:
    """Return whether it is an address of the internet that could be somebody's.

    Private, local and documentation ranges are nobody's, nor is `abc::def`, which is in no range
    that was given out, or the number of a version or a section.
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
    # In North America neither the area nor the exchange begins with 0 or 1, and 555-01xx is for stories.
    area, exchange, line = digits[-10:-7], digits[-7:-4], digits[-4:]
    is_story = exchange == "555" and line.startswith("01")
    return area[0] > "1" and exchange[0] > "1" and not is_story


def _is_ssn(match: re.Match[str]) -> bool:
    """Number ranges that the United States' Social Security Administration never gave out are none."""
    area, group, serial = match[0].split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _is_national(match: re.Match[str]) -> bool:
    return national.is_national(match[0])


def _always(match: re.Match[str]) -> bool:
    return True


def _lines_with(sign: str) -> Callable[[str], Iterator[tuple[int, str]]]:
    """The lines in which a short pattern is found, and where they begin: most text is passed over at this price.

    The pattern holds no end of a line. It is found fast where all that it matches begins with one set of characters.
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


def _all_with(*signs: str) -> Callable[[str], Iterator[tuple[int, str]]]:
    """The text, if it holds one of the signs somewhere."""

    def pieces(text: str) -> Iterator[tuple[int, str]]:
        if any(sign in text for sign in signs):
            yield 0, text

    return pieces


class _Kind(NamedTuple):
    pieces: Callable[[str], Iterator[tuple[int, str]]]  # of a text, those that are looked at
    pattern: re.Pattern[str]
    is_right: Callable[[re.Match[str]], bool]


_KEYS = (
    r"-----BEGIN (?:[A-Z]{1,20} ){0,3}PRIVATE KEY-----[A-Za-z0-9+/=\s]{20,10000}-----END (?:[A-Z]{1,20} ){0,3}PRIVATE KEY-----",
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
    *(
        "PRIVATE KEY",
        "AKIA",
        "ASIA",
        "gho_",
        "ghp_",
        "ghs_",
        "ghu_",
        "ghr_",
        "github_pat_",
        "glpat-",
        "xox",
    ),
    *("AIza", "k_live_", "hf_", "eyJ"),
)
# In the order of their claim to a piece of text that several fit.
KINDS = {
    "key": _Kind(_all_with(*_KEY_SIGNS), re.compile("|".join(_KEYS)), _always),
    "email": _Kind(
        _lines_with("@"),
        # RFC 5322's dot-atom, as far as people use it.
        re.compile(
            r"(?<![\w.+%-])[A-Za-z0-9_%+-]{1,64}(?:\.[A-Za-z0-9_%+-]{1,64}){0,5}@(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,6}"
            r"[A-Za-z]{2,24}(?![\w@-])"
        ),
        _is_email,
    ),
    "iban": _Kind(
        _lines_with(r"[A-Z]{2}\d\d"),
        re.compile(
            r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"
        ),
        _is_iban,
    ),
    "card": _Kind(
        _lines_with(r"\d{4}"),
        re.compile(
            r"(?<![\w.-])(?:\d{4}[ -]?\d{4}[ -]?\d{4}[ -]?\d{1,7}|\d{4}[ -]?\d{6}[ -]?\d{4,5})(?![\w-]|\.\d)"
        ),
        _is_card,
    ),
    "us_ssn": _Kind(
        _lines_with(r"\d-\d"), re.compile(r"(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-]|\.\d)"), _is_ssn
    ),
    "national_id": _Kind(_lines_with(national.SIGN), national.PATTERN, _is_national),
    "ip": _Kind(
        _lines_with(r"[.:](?:(?<=\d\.)\d|(?<=[0-9A-Fa-f]:))"),
        re.compile(
            r"(?<![\w.:-])(?:\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)|(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}(?![:.]?\w))"
        ),
        _is_address,
    ),
    "phone": _Kind(
        _lines_with(r"\d\d[)]?[ .-]?[(]?\d"),
        re.compile(
            r"(?<![\w.+-])(?:\+\d{1,3}(?:[ .-]?(?:\(\d{1,4}\)|\d{1,4})){2,5}|(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4})"
            r"(?![\w-]|\.\d)"
        ),
        _is_phone,
    ),
}
