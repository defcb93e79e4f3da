"""Training and validation parts of a data config: files, checked, and their side of a split."""

import dataclasses
import glob
import hashlib
import itertools
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from jaxlm.core import disk
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import from_python, manifest, preferred, prompts, remote
from jaxlm.data.config import DataConfig
from jaxlm.data.conversations import ONE_A_LINE, UNTRAINED
from jaxlm.data.documents import PROBED_BYTES, PROBED_RECORDS, Corpus
from jaxlm.data.records import Document, LeftOut, ReadBudget
from jaxlm.data.remote import Downloads


@dataclasses.dataclass(frozen=True)
class SplitSide:
    """All of a corpus, or one side of a split.

    The split `documents` chooses the side of a document by sha256 of its text: it never moves, and
    copies stay together. The split `tail` holds out the last share of each document's characters,
    for corpora of one long text.
    """

    split: Literal["none", "documents", "tail"] = "none"
    share: float = 0.0
    held_out: bool = False

    def take(self, text: str) -> str:
        """Return the part of a document on this side, possibly empty."""
        if self.split == "none":
            return text
        if self.split == "tail":
            cut = int(len(text) * (1.0 - self.share))
            return text[cut:] if self.held_out else text[:cut]
        return text if (_position(text) < self.share) == self.held_out else ""


def _position(text: str) -> float:
    """Return a number from 0 to 1 by the sha256 of a text."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


_SHARE = re.compile(r"(tail:)?([0-9.]+)%")


def held_out(entry: str) -> tuple[SplitSide, SplitSide] | None:
    """Return the (train, validation) sides of "5%" or "tail:10%"; None for a glob."""
    match = _SHARE.fullmatch(entry)
    if match is None:
        return None
    split: Literal["documents", "tail"] = "tail" if match[1] else "documents"
    share = float(match[2]) / 100
    return SplitSide(split, share, False), SplitSide(split, share, True)


# Reasons in `left_out` that are no loss: the document is in the other part.
ELSEWHERE = ("held out", "for training")
TRAIN = "train"
BEGINNING_BYTES = 2**16  # prefix that distinguishes most files of one size


@dataclasses.dataclass(frozen=True)
class Part:
    """One side of a corpus, to be tokenized; or folders of token shards.

    `name` is `train` for all training data, `train/NAME` for one source, or the name of a
    validation set.
    """

    name: str
    corpus: Corpus | None
    selection: SplitSide
    folders: tuple[Path, ...] = ()

    @property
    def setting(self) -> str:
        """Name of the setting, for errors."""
        if self.name == TRAIN:
            return "data.train"
        section, slash, source = self.name.partition("/")
        return f"data.{section} ({source})" if slash else f"data.validation ({self.name})"

    @property
    def source(self) -> str:
        """Name of the training source."""
        return self.name.rpartition("/")[2]

    def documents(self, counts: LeftOut) -> Iterator[Document]:
        """Yield the documents of this side; count those of the other."""
        assert self.corpus is not None
        for document in self.corpus.documents(counts):
            if text := self.selection.take(_key(document)):
                is_text = document.conversation is None
                yield document._replace(text=text if is_text else document.text)
            else:
                counts[ELSEWHERE[self.selection.held_out]] += 1


# Version of `_key` for conversations; cached tokens of a split by another version are made again.
SPLIT_OF_CONVERSATIONS = 2
LEAST_UNEVEN = 20  # documents; of fewer ones, shares differ by chance


def _key(document: Document) -> str:
    """Return what a document is split by: conversations with one prompt stay together and whole."""
    chat = document.conversation
    return document.text if chat is None else chat.prompt


def uneven_note(part: Part, held: int, train: int) -> str | None:
    """Return a line if equal prompts or texts make the share of a part another one than was set.

    Args:
      part: documents that are held out.
      held: number of documents on its side, also of those that are left out.
      train: number of documents on the other side.
    """
    share, total = part.selection.share, held + train
    sides = (held, share * total), (train, (1.0 - share) * total)
    is_near = all(expected / 2 <= count <= 2 * expected for count, expected in sides)
    chance = 3.0 * math.sqrt(total * share * (1.0 - share))  # three standard errors
    if total < LEAST_UNEVEN or is_near or abs(held - share * total) <= chance:
        return None
    equal = "text" if part.corpus is None or part.corpus.chat is None else "prompt"
    return (
        f"{part.setting} has {held:,} of {total:,} documents, {held / total:.1%} and not "
        f"{100.0 * share:.3g}%: documents with the same {equal} stay on one side"
    )


def find_parts(
    config: DataConfig, downloads: Downloads = remote.SILENT
) -> tuple[list[Part], list[Part]]:
    """Return the training sources and validation sets, checked.

    Files must exist, their first records must have text, and no file may be in two parts. Remote
    files are copied by `downloads`, and functions that the entries name are called. A share of
    documents that would hold out none of the first ones holds out one of them.

    Raise InputMissing, DataError, ConfigError if a check fails.
    """
    config = from_python.resolved(config)
    train = [
        _part(
            TRAIN if name == TRAIN else f"{TRAIN}/{name}", patterns, config, "data.train", downloads
        )
        for name, patterns in config.sources.items()
    ]
    validation = []
    for name, patterns in config.validation_sets.items():
        sides = held_out(patterns[0]) if len(patterns) == 1 else None
        if sides is None:
            validation.append(_part(name, patterns, config, "data.validation", downloads))
            continue
        for number, source in enumerate(train):
            if source.corpus is None:
                what = "data.validation cannot hold out a share of token shards"
                where = f"data.validation = {patterns[0]}"
                why = f"{source.folders[0]} was tokenized as a whole"
                fix = _other_shards(source.folders[0], train)
                raise ConfigError(what, where=where, why=why, fix=fix)
            set_name = name if len(train) == 1 else f"{name}_{source.source}"
            share = _share(sides[0], source.corpus)
            side, held = (dataclasses.replace(each, share=share) for each in sides)
            if share != sides[0].share:
                downloads.log(
                    f"holding out one document of {source.setting}: {patterns[0]} of them are none"
                )
            validation.append(Part(set_name, source.corpus, held))
            train[number] = dataclasses.replace(source, selection=side)
    for one, other in itertools.combinations(train, 2):
        _refuse_overlap(one, other, "in two sources of the training data", train)
    for source, part in itertools.product(train, validation):
        if not part.selection.held_out:
            _refuse_overlap(source, part, "both trained on and validated on", train)
    probed = [part for part in (*train, *validation) if not part.selection.held_out]
    texts = [(part.corpus, part.setting) for part in probed if part.corpus is not None]
    for corpus, setting in texts:
        probe(corpus, setting, PROBED_BYTES // len(texts))
    return train, validation


def _share(side: SplitSide, corpus: Corpus) -> float:
    """Return the share of a side; if it holds out none of the first documents, that of one."""
    if side.split != "documents" or not side.share:
        return side.share
    start = ReadBudget(PROBED_RECORDS, PROBED_BYTES)
    known: set[float] = set()
    for each in corpus.documents(LeftOut(), start):
        if start.is_read:  # the last text may be cut
            break
        known.add(position := _position(_key(each)))
        if position < side.share:
            return side.share
    return math.nextafter(min(known), 1.0) if len(known) > 1 else side.share


def _other_shards(folder: Path, train: Sequence[Part]) -> str:
    """Return flags that validate on token shards near a folder of training shards, if any.

    Several sources are in OUT/train/NAME, and those of a mix have sets in OUT/validation/NAME.
    """
    place = folder.parent
    if place.absolute().name == TRAIN:
        place = place.parent if place.name else Path("..")
    left_out = {each.resolve() for part in train for each in part.folders}
    left_out.add((place / TRAIN).resolve())
    near = sorted(path.parent for path in place.glob(f"*/{manifest.NAME}"))
    others = [str(each) for each in near if each.resolve() not in left_out]
    mixed = sorted(path.parent for path in place.glob(f"validation/*/{manifest.NAME}"))
    if not left_out.intersection(each.resolve() for each in mixed) and mixed:
        others.append(",".join(f"{each.name}={each}" for each in mixed))
    if not others:
        return "'--config.data.validation=()'    # no evaluation"
    return "\n".join(shlex.quote(f"--config.data.validation={each}") for each in others)


def check_names(config: DataConfig) -> None:
    """Raise the errors of remote entries that need no connection, and those of all local files."""
    entries = [
        (setting, pattern)
        for setting, sets in (("train", config.sources), ("validation", config.validation_sets))
        for patterns in sets.values()
        for pattern in patterns
        if remote.is_remote(pattern)
    ]
    for setting, pattern in entries:
        remote.check(pattern, f"data.{setting}")
    if not entries:
        find_parts(config)


def _part(
    name: str, patterns: tuple[str, ...], config: DataConfig, setting: str, downloads: Downloads
) -> Part:
    stored: list[Path] = []
    texts: list[str] = []
    for pattern in patterns:
        if remote.is_remote(pattern):
            if folder := downloads.shards(pattern):
                stored.append(folder)
            else:
                texts.append(pattern)
            continue
        if from_python.is_entry(pattern):
            matches = [from_python.located(pattern)]
        else:
            matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
        folders = [match for match in matches if (match / manifest.NAME).is_file()]
        stored += folders
        if not folders or any(match.is_file() for match in matches):
            texts.append(pattern)
    if not texts:
        _refuse_twice(stored, setting)
        return Part(name, None, SplitSide(), tuple(stored))
    entries = config.train if setting == "data.train" else config.validation
    config = config.of(name.rpartition("/")[2])
    corpus = Corpus.find(
        tuple(texts), config.text_key, setting, config.max_dropped, entries, config.chat, downloads
    )
    if stored:
        what = "one set cannot mix text and token shards"
        why = f"{stored[0]} holds token shards, {corpus.names[0]} is a file"
        fix = f"--config.{setting}={stored[0]}\n--config.{setting}={corpus.names[0]}"
        raise ConfigError(what, where=setting, why=why, fix=fix)
    return Part(name, corpus, SplitSide())


def _refuse_twice(folders: list[Path], setting: str) -> None:
    """Raise DataError if a shard appears twice: same folder, a link, or a copy."""
    seen: dict[str, Path] = {}
    for folder in folders:
        tokens = _tokens(folder)
        if both := [seen[digest] for digest in tokens if digest in seen]:
            raise DataError(
                "the data lists a token shard twice",
                where=setting,
                why=f"{both[0]} and {folder} hold the same tokens",
                fix="name each folder once: patterns that do not overlap, and no copies",
            )
        seen |= dict.fromkeys(tokens, folder)


def _tokens(folder: Path) -> list[str]:
    """Return the sha256 of the ids of each shard in a folder."""
    return [shard.tokens_sha256 for shard in manifest.read(folder).shards]


def _refuse_overlap(one: Part, other: Part, problem: str, train: Sequence[Part]) -> None:
    """Raise DataError if both parts have a file in common: itself, a link, or a copy."""
    if both := sorted(_overlap(one, other)):
        held = other.name.startswith(f"{TRAIN}/")
        raise DataError(
            f"{len(both)} file{'s are' if len(both) > 1 else ' is'} {problem}",
            where=f"{one.setting} and {other.setting}",
            why=", ".join(both[:3]),
            fix="name each file in one source: patterns that do not overlap, and no copies"
            if held
            else _other_shards(one.folders[0], train)
            if one.folders
            else "--config.data.validation=5%    # holds out documents instead",
        )


def _overlap(train: Part, part: Part) -> Iterator[str]:
    trained_on = {digest: folder for folder in train.folders for digest in _tokens(folder)}
    for folder in part.folders:
        both = {trained_on[digest] for digest in _tokens(folder) if digest in trained_on}
        yield from (f"{other} and {folder}" for other in both)
    corpora = [side.corpus for side in (train, part) if side.corpus is not None]
    if len(corpora) < 2:
        return
    if not any(any(corpus.named()) for corpus in corpora):  # only Python's library
        yield from map(str, set(corpora[0].files) & set(corpora[1].files))
        return
    trained, others = (
        {path.resolve(): name for path, name in zip(corpus.files, corpus.names, strict=True)}
        for corpus in corpora
    )
    yield from (str(path) for path in others if path in trained)
    left = {path: name for path, name in others.items() if path not in trained and _size(path)}
    marks: dict[Path, int | str] = {}
    # Each mark distinguishes more and reads more of fewer files: almost no file is hashed whole.
    for mark in (_size, _beginning, disk.sha256):
        marks = {path: mark(path) for path in (*trained, *left)}
        shared = {marks[path] for path in trained} & {marks[path] for path in left}
        trained, left = (
            {path: name for path, name in side.items() if marks[path] in shared}
            for side in (trained, left)
        )
    copied = {marks[path]: name for path, name in trained.items()}
    for path, name in left.items():
        yield f"{name}, a copy of {copied[marks[path]]}"


def _size(path: Path) -> int:
    return path.stat().st_size


def _beginning(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(BEGINNING_BYTES)).hexdigest()


def probe(corpus: Corpus, setting: str, most: int = PROBED_BYTES) -> None:
    """Read the first records of the user's files, at most `most` bytes, to report errors early.

    Raise DataError if nothing in them can be used.
    """
    user_files = dict(corpus.named())
    files, names = tuple(user_files), tuple(user_files.values())
    probed = dataclasses.replace(corpus, files=files, names=names)
    documents = len(corpus.files) - len(user_files)  # files of Python's library are not read again
    start = ReadBudget(PROBED_RECORDS, most)
    counts = LeftOut()
    documents += sum(1 for _ in probed.documents(counts, start))
    if not documents and not start.is_read:
        what = "the data contains no text"
        if corpus.chat is not None:
            what = "no conversation has an answer"
            if corpus.chat.kind == "prompts":
                what = "no record has a prompt"
        why = (
            f"{len(corpus.files)} file{'s' if len(corpus.files) != 1 else ''}, "
            f"{f'records: {counts}' if counts else 'all empty'}: {', '.join(corpus.names[:3])}"
        )
        fix = f"ls -l {shlex.join(corpus.names[:3])}"
        if corpus.chat is not None:
            forms = preferred.FORMS | {"prompts": prompts.ONE_PROMPT}
            fix = forms.get(corpus.chat.kind, ONE_A_LINE)
            if counts.keys() == {UNTRAINED}:
                fix = 'leave "train": false and "weight": 0 out of the answers to train'
        raise DataError(what, where=setting, why=why, fix=fix)
