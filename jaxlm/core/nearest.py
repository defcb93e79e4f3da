"""Nearest known words, other notations of a value, and nearest divisors of a number."""

import math
import re
from collections.abc import Iterable, Iterator

MAX_TRIED = 100_000
# Names of a value in other frameworks.
_OTHER_NAMES = {
    "float32": "fp32 f32 single",
    "float16": "fp16 f16 half",
    "bfloat16": "bf16",
    "gelu_tanh": "gelu_new gelu_pytorch_tanh",
    "silu": "swish",
    "relu_squared": "relu2 squared_relu",
    "causal": "clm",
    "masked": "mlm",
    "wsd": "warmup_stable_decay",
    "true": "yes on",
    "false": "no off",
}
SYNONYMS = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
_SCALES = {"k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_SCALES |= {"K": 10**3, "b": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SCALED = re.compile(r"([+-]?)(\d+)(?:\.(\d+))?\s*([kKMBbGT]|[KMGT]i)")
_SPAN_UNITS = {"steps?": "", "sec(?:ond)?s?": "s", "min(?:ute)?s?": "m", "h(?:ou)?rs?": "h"}
_SPAN_UNITS |= {"tok(?:en)?s?": "tok"}


def distance(a: str, b: str) -> int:
    """Return the edits from `a` to `b` (Damerau 1964, restricted: no substring is edited twice)."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def nearest_word(word: str, words: Iterable[str]) -> str | None:
    """Return the known word that `word` misspells, or None.

    At most a third of the letters may differ. Numbers must be equal: `a10` is not `a100`, `float8`
    is not `float16`. Return None if words with different numbers are equally near.
    """
    known = [each for each in words if has_same_numbers(word, each)]
    edits = {each: distance(_folded(word), _folded(each)) for each in known}
    best = min(edits, key=lambda each: edits[each], default=None)
    if best is None or edits[best] > _max_edits(word):
        return None
    as_near = {tuple(_numbers(each)) for each in known if edits[each] == edits[best]}
    return best if len(as_near) == 1 else None


def notations(text: str, unit: str = "") -> Iterator[str]:
    """Yield other spellings of the same value: `2k` is `2000`, `fp16` is `float16`, `10%` is `0.1`.

    `unit` is that of the setting. A letter after a number scales plain counts only: `10M` of
    seconds or of GiB could mean another unit.
    """
    bare = text.strip().strip("'\"").strip()
    lower = bare.lower()
    yield bare
    if not bare[:1].isdigit():  # letters after a number are units: 1.5M is not 1.5m
        yield lower
        yield lower.replace("-", "_")
    if lower in SYNONYMS:
        yield SYNONYMS[lower]
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", bare):
        yield bare.replace(",", "")
    if percent := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", bare):
        yield f"{percent[1]}%"
        yield repr(float(f"{percent[1]}e-2"))
    if (scaled := _SCALED.fullmatch(bare)) and unit not in ("seconds", "GiB", "bytes"):
        sign, whole, part, letter = scaled.groups()
        digits = int(whole + (part or "")) * _SCALES[letter]
        size = 10 ** len(part or "")
        yield f"{sign}{digits // size if digits % size == 0 else digits / size}"
    for names, short in _SPAN_UNITS.items():
        if span := re.fullmatch(rf"([\d.e+]+)\s*{names}", lower):
            yield span[1] + short


def has_same_numbers(word: str, known: str) -> bool:
    """Return True if a word has the numbers of a known word, or none.

    Up to two letters next to a number belong to it: `a100` and `h100`, `7b` and `8b` are names.
    """
    return _numbers(word) in ([], _numbers(known))


def _numbers(word: str) -> list[str]:
    numbers = re.findall(r"[a-z]*\d+[a-z]*", word.lower())
    digits = [re.sub(r"[a-z]+", "", each) for each in numbers]
    pairs = zip(numbers, digits, strict=True)
    return [word if len(word) - len(bare) < 3 else bare for word, bare in pairs]


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")


def _max_edits(word: str) -> int:
    """Return the edits that a misspelling of a word may have: 0 for a word of two letters."""
    letters = len(word.strip("-"))
    return 0 if letters < 3 else max(1, letters // 3)


def divisors(number: int) -> list[int]:
    """Return the ascending divisors; above MAX_TRIED squared those up to it, and cofactors."""
    tried = range(1, min(math.isqrt(number), MAX_TRIED) + 1)
    small = [size for size in tried if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def nearest_divisors(number: int, target: int) -> list[int]:
    """Return the divisors of a number, nearest to `target` first, the larger of two as near."""
    return sorted(divisors(number), key=lambda size: (abs(size - target), -size))


def adjacent_divisors(number: int, target: int) -> list[int]:
    """Return the divisors around `target`, the nearer first; one if it divides or exceeds all."""
    every = divisors(number)
    below = [size for size in every if size <= target][-1:]
    above = [size for size in every if size >= target][:1]
    return sorted({*below, *above}, key=lambda size: abs(size - target))
