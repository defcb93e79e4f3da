"""Settings of token shards: those of a mix of cleaned corpora, and those of a recipe."""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jaxlm.core.config import setting
from jaxlm.core.nearest import nearest_word
from jaxlm.data.config import (
    TOKENIZER_FILES,
    TOKENIZERS,
    file_of_tokenizer,
    near_tokenizer,
    unknown_tokenizer,
)

_NAME = re.compile(r"[A-Za-z]\w*")
Problems = Iterator[tuple[str, str, str]]  # setting, what is wrong, and a fix


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Shares and tokenizer with which cleaned documents become token shards."""

    weights: tuple[str, ...] = setting(
        (),
        "NAME=WEIGHT of each source: documents are dropped until characters are in these"
        " proportions; () keeps all",
    )
    licences: tuple[str, ...] = setting((), "NAME=LICENCE of each source, for the data card")
    tokenizer: str = setting("", f"{TOKENIZERS}; an empty name writes no shards")
    held_out: float = setting(0.0, "share of documents for the validation sets", low=0.0, below=1.0)
    unit_bytes: int = setting(
        2**28,
        "size of a unit of work: files of one source are grouped up to it",
        unit="bytes",
        low=1,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", file_of_tokenizer(self.tokenizer))

    def problems_with(self, sources: Sequence[str], path: str = "") -> Problems:
        """Yield the settings that do not fit these sources; `path` is the prefix of the section."""
        for name in ("weights", "licences"):
            yield from entry_problems(name, getattr(self, name), sources, path)
        for name, text in named(self.weights).items():
            if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or not float(text):
                mended = {**named(self.weights), name: "1"}
                fix = ",".join(f"{source}={weight}" for source, weight in mended.items())
                why = f"the weight {text!r} of {name!r} is not a number above 0"
                yield "weights", why, f"--config.{path}weights={fix}"
        are_known = named(self.weights).keys() <= set(sources)
        if self.weights and are_known and (left := set(sources) - named(self.weights).keys()):
            missing = sorted(left)[0]
            fix = f"--config.{path}weights={','.join((*self.weights, f'{missing}=1'))}"
            yield "weights", f"{missing!r} has no weight", fix
        kind, _, size = self.tokenizer.partition(":")
        is_trained = kind == "sentencepiece" and size.isdigit() and int(size) >= 512
        is_known = self.tokenizer in ("bytes", "characters") or is_trained
        if not (is_known or self.tokenizer.endswith(TOKENIZER_FILES)):
            why = unknown_tokenizer(self.tokenizer)
            yield "tokenizer", why, near_tokenizer(f"{path}tokenizer", self.tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix(ShardSettings):
    """Cleaned corpora that become token shards, with their shares and tokenizer."""

    ROOT: ClassVar[str] = "mix"  # the name of the whole in `jaxlm config explain`
    VERB: ClassVar[str] = "data mix --out=out"  # the verb that reads it

    sources: tuple[str, ...] = setting(
        (), "NAME=FOLDER of each output folder of jaxlm data run; NAME=FOLDER!PART for one part"
    )
    tokenizer: str = setting("sentencepiece:4096", TOKENIZERS)

    def problems(self) -> Problems:
        """Check that names are unique, weights and licences have a source, the tokenizer exists."""
        if not self.sources:
            yield "sources", "no sources", "jaxlm config explain sources"
        yield from entry_problems("sources", self.sources)
        yield from self.problems_with(tuple(named(self.sources)))


def named(entries: tuple[str, ...]) -> dict[str, str]:
    """Parse the entries NAME=VALUE of a setting.

    Example:
      >>> named(("web=0.7", "code=0.3"))
      {'web': '0.7', 'code': '0.3'}
    """
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def entry_problems(
    field: str, entries: tuple[str, ...], known: Sequence[str] | None = None, path: str = ""
) -> Problems:
    """Yield a problem for each entry that is no NAME=VALUE, is repeated or has an unknown name.

    The fix keeps the value of an unknown name for the source that was probably meant. `path` is
    the prefix of the section in flags.
    """
    right: list[str] = []
    wrong: list[str] = []
    left = [name for name in known or () if name not in named(entries)]
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not (_NAME.fullmatch(name) and equals and value):
            wrong.append(f"{entry!r} is not NAME=VALUE")
        elif known is not None and name not in known:
            wrong.append(f"{name!r} is not a source; the sources are {', '.join(known)}")
            is_last = field == "weights" and len(left) == 1  # each source has one
            if meant := left[0] if is_last else nearest_word(name, left):
                left.remove(meant)
                right.append(f"{meant}={value}")
        elif name in named(tuple(right)):
            wrong.append(f"{name!r} is listed twice")
        else:
            right.append(entry)
    fix = shlex.quote(f"--config.{path}{field}={','.join(right) or '()'}")
    if field == "sources" and not right:  # they cannot be empty
        fix = f"jaxlm config explain {path}{field}"
    yield from ((field, what, fix) for what in wrong)
