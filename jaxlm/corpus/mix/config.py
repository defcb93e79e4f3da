"""Settings of token shards: of a mix of cleaned corpora, and of a recipe that goes on to them."""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jaxlm.core.config import setting
from jaxlm.data.config import TOKENIZER_FILES, TOKENIZERS, near_tokenizer

_NAME = re.compile(r"[A-Za-z]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """In which shares cleaned documents become token shards, with which tokenizer."""

    weights: tuple[str, ...] = setting(
        (),
        "NAME=WEIGHT for each source: documents are left out until the sources stand in these shares of characters; "
        "none takes all documents",
    )
    licences: tuple[str, ...] = setting((), "NAME=LICENCE, for the data card")
    tokenizer: str = setting("", f"{TOKENIZERS}; nothing writes no shards")
    held_out: float = setting(
        0.0, "share of the documents that goes to the validation sets", low=0.0, below=1.0
    )
    unit_bytes: int = setting(
        2**28,
        "files of one source are worked on together until they hold this much",
        unit="bytes",
        low=1,
    )

    def problems_with(
        self, sources: Sequence[str], path: str = ""
    ) -> Iterator[tuple[str, str, str]]:
        """What does not go with these sources; `path` leads to this section, `shards.` in a recipe."""
        for name in ("weights", "licences"):
            yield from entry_problems(name, getattr(self, name), known=sources, path=path)
        for name, text in named(self.weights).items():
            if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or not float(text):
                fix = ",".join(
                    f"{n}={1 if n == name else w}" for n, w in named(self.weights).items()
                )
                yield (
                    "weights",
                    f"the weight {text!r} of {name!r} is no number above 0",
                    f"--config.{path}weights={fix}",
                )
        if self.weights and (without := set(sources) - named(self.weights).keys()):
            missing = sorted(without)[0]
            fix = f"--config.{path}weights={','.join((*self.weights, f'{missing}=1'))}"
            yield "weights", f"{missing!r} has none", fix
        kind, _, size = self.tokenizer.partition(":")
        is_trained = kind == "sentencepiece" and size.isdigit() and int(size) >= 512
        if not (
            is_trained or self.tokenizer in ("bytes", "characters")
        ) and not self.tokenizer.endswith(TOKENIZER_FILES):
            yield (
                "tokenizer",
                f"{self.tokenizer!r} is none of: {TOKENIZERS}",
                near_tokenizer(f"{path}tokenizer", self.tokenizer),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix(Shards):
    """Which cleaned corpora become token shards, and how."""

    ROOT: ClassVar[str] = "mix"  # what `jaxlm config explain` calls all of it

    sources: tuple[str, ...] = setting(
        (),
        "NAME=FOLDER, each a folder that jaxlm data run wrote, or NAME=FOLDER!PART for one of its parts",
    )
    tokenizer: str = setting("sentencepiece:4096", TOKENIZERS)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Each source has one name, each weight and licence a source, and the tokenizer is one of those there are."""
        if not self.sources:
            yield "sources", "nothing to read", "jaxlm config explain sources"
        yield from entry_problems("sources", self.sources, "")
        yield from self.problems_with(tuple(named(self.sources)))


def named(entries: tuple[str, ...]) -> dict[str, str]:
    """What a setting of entries NAME=VALUE says, by name."""
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def entry_problems(
    field: str,
    entries: tuple[str, ...],
    nothing: str = "()",
    known: Sequence[str] | None = None,
    path: str = "",
) -> Iterator[tuple[str, str, str]]:
    """Entries that are not NAME=VALUE, whose name is there twice, or is none of the known; `nothing` is set if none is right,
    or what the setting takes is explained.
    """
    right: list[str] = []
    wrong: list[str] = []
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not (_NAME.fullmatch(name) and equals and value):
            wrong.append(f"{entry!r} is not NAME=VALUE")
        elif known is not None and name not in known:
            wrong.append(f"{name!r} is no source; there are {', '.join(known)}")
        elif name in named(tuple(right)):
            wrong.append(f"{name!r} stands there twice")
        else:
            right.append(entry)
    for what in wrong:
        said = ",".join(right) or nothing
        setting = f"{path}{field}"
        yield (
            field,
            what,
            shlex.quote(f"--config.{setting}={said}")
            if said
            else f"jaxlm config explain {setting}",
        )
