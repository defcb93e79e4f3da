"""From the data section of a config to loaders: find, split, train the tokenizer, tokenise, plan."""

import dataclasses
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError, DataError, JaxlmError
from jaxlm.data import cache, manifest, packing, tokenizer, writer
from jaxlm.data.config import DataConfig
from jaxlm.data.documents import PROBED_RECORDS, Corpus
from jaxlm.data.loader import Loader
from jaxlm.data.records import MENDED, Document
from jaxlm.data.selection import Selection, held_out
from jaxlm.data.shards import Shards
from jaxlm.data.tokenizer import Tokenizer

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # what, bytes of its files read, and of how many

NAMED = re.compile(r"([A-Za-z]\w*)=(.+)")


@dataclasses.dataclass(frozen=True)
class Part:
    """One side of a corpus that becomes a shard set; or a folder that is one already."""

    name: str
    corpus: Corpus | None
    selection: Selection
    folder: Path | None = None

    @property
    def setting(self) -> str:
        """Where an error sends the reader."""
        return "data.train" if self.name == "train" else f"data.validation ({self.name})"

    def documents(self, counts: Counter[str]) -> Iterator[Document]:
        """The documents on this side; those that are all on the other are counted."""
        assert self.corpus is not None
        for document in self.corpus.documents(counts):
            if text := self.selection.take(document.text):
                yield document._replace(text=text)
            else:
                counts["held out" if not self.selection.held_out else "for training"] += 1


@dataclasses.dataclass(frozen=True)
class Data:
    """Everything that a run reads."""

    tokenizer: Tokenizer
    train: Loader
    validation: dict[str, Loader]
    fingerprint: dict[
        str, str | int
    ]  # two runs with equal ones read the same rows in the same order


def find(config: DataConfig) -> tuple[Part, list[Part]]:
    """What to read, checked: the files are there, their first records have text, and no file is on both sides.

    Raises:
      InputMissing, DataError: as the checks find.
    """
    train = _part("train", config.train, config, "data.train")
    entries: dict[str, list[str]] = {}
    for entry in config.validation:
        match = NAMED.fullmatch(entry)
        entries.setdefault((match and match[1]) or "val", []).append(match[2] if match else entry)
    validation = []
    for name, patterns in entries.items():
        sides = held_out(patterns[0]) if len(patterns) == 1 else None
        if sides is None:
            validation.append(_part(name, tuple(patterns), config, "data.validation"))
        elif train.corpus is None:
            raise ConfigError(
                "a share cannot be held out of token shards",
                where=f"data.validation = {patterns[0]}",
                why=f"{train.folder} was tokenised as a whole",
                fix=f"jaxlm data tokenize --config.data.validation={patterns[0]} --out=DIR writes both sides",
            )
        else:
            train = dataclasses.replace(train, selection=sides[0])
            validation.append(Part(name, train.corpus, sides[1]))
    _refuse_overlap(train, validation)
    for part in (train, *validation):
        if part.corpus is not None and not part.selection.held_out:
            _probe(part.corpus, part.setting)
    return train, validation


def open_data(
    config: DataConfig,
    *,
    seed: int,
    root: Path | None = None,
    say: Say = lambda _: None,
    progress: Progress = lambda what, done, total: None,
) -> Data:
    """Finds, tokenises and plans what the config names; what was made before comes from the cache under `root`.

    Raises:
      JaxlmError: where the data is missing, broken, empty, or does not fit the tokenizer.
    """
    root = cache.default() if root is None else root
    train_part, validation_parts = find(config)
    encoder = _tokenizer(config, train_part, root, say)

    def loader(part: Part, seed: int) -> Loader:
        opened = _shards(part, encoder, root, say, progress)
        key = {
            "shards": _digests(opened),
            "sequence": config.sequence,
            "packing": config.packing,
            "seed": seed,
        }
        plan = packing.plan(
            opened,
            config.sequence,
            config.packing,
            seed,
            cache.folder(root, "plans", version=packing.VERSION, **key),
        )
        return Loader(opened, plan, config.sequence, seed, config.workers, config.prefetch)

    train = loader(train_part, seed)
    # Runs of any seed are evaluated on the same rows.
    validation = {part.name: loader(part, 0) for part in validation_parts}
    fingerprint: dict[str, str | int] = {
        "tokenizer": encoder.digest,
        "sequence": config.sequence,
        "packing": config.packing,
        "seed": seed,
        "order": packing.VERSION,
    }
    for name, part in (("train", train), *((f"validation.{n}", p) for n, p in validation.items())):
        fingerprint[name] = hashlib.sha256("".join(_digests(part.shards)).encode()).hexdigest()
        fingerprint[f"{name}.documents"] = part.shards.documents
        fingerprint[f"{name}.tokens"] = part.shards.manifest.tokens
    return Data(encoder, train, validation, fingerprint)


def open_tokenizer(
    config: DataConfig, *, root: Path | None = None, say: Say = lambda _: None
) -> Tokenizer:
    """The tokenizer that the config names, trained on its training text where it is one to train."""
    train, _ = find(config)
    return _tokenizer(config, train, cache.default() if root is None else root, say)


def tokenise(config: DataConfig, out: Path, say: Say, progress: Progress) -> dict[str, Shards]:
    """Writes each side of the data as a folder of shards under `out`, to be named in `data.train` and `data.validation`."""
    train, validation = find(config)
    encoder = _tokenizer(config, train, cache.default(), say)
    written = {}
    for part in (train, *validation):
        if part.corpus is None:
            raise ConfigError(
                "this is tokenised already",
                where=str(part.folder),
                fix="--config.data.train='texts/*.txt'",
            )
        counts: Counter[str] = Counter()
        target = out / part.name
        if target.exists():
            raise DataError(
                "the output folder exists",
                where=str(target),
                why="shards are never overwritten",
                fix=f"--out={out}-2",
            )
        written[part.name] = writer.write(
            target,
            part.documents(counts),
            encoder,
            counts,
            _told(progress, part),
            name=part.setting,
        )
    return written


def text_loader(corpus: Corpus, encoder: Tokenizer, sequence: int, root: Path, say: Say) -> Loader:
    """The rows of any text under a given tokenizer, for an evaluation."""
    opened = _shards(
        Part("text", corpus, Selection()), encoder, root, say, lambda what, done, total: None
    )
    key = {"shards": _digests(opened), "sequence": sequence, "packing": "concat", "seed": 0}
    plan = packing.plan(
        opened, sequence, "concat", 0, cache.folder(root, "plans", version=packing.VERSION, **key)
    )
    return Loader(opened, plan, sequence, 0)


def _part(name: str, patterns: tuple[str, ...], config: DataConfig, setting: str) -> Part:
    if len(patterns) == 1 and (Path(patterns[0]) / "manifest.json").is_file():
        return Part(name, None, Selection(), Path(patterns[0]))
    return Part(
        name, Corpus.find(patterns, config.text_key, setting, config.max_dropped), Selection()
    )


def _refuse_overlap(train: Part, validation: list[Part]) -> None:
    """Raises DataError where a file is both trained on and validated on: itself, through a link, or a copy of it."""
    for part in validation:
        if part.selection.held_out:
            continue
        both = sorted(_overlap(train, part))
        if both:
            raise DataError(
                f"{len(both)} file{'s are' if len(both) > 1 else ' is'} both trained on and validated on",
                where=f"data.train and {part.setting}",
                why=", ".join(both[:3]),
                fix="--config.data.validation=5% holds documents out instead",
            )


def _overlap(train: Part, part: Part) -> Iterator[str]:
    folders = [side.folder for side in (train, part) if side.folder is not None]
    if len(folders) == 2 and set.intersection(*(set(_digests(Shards.open(f))) for f in folders)):
        yield " and ".join(map(str, folders))
    corpora = [side.corpus for side in (train, part) if side.corpus is not None]
    if len(corpora) < 2 or not any(any(corpus.named()) for corpus in corpora):
        return
    trained, others = (
        {path.resolve(): name for path, name in zip(corpus.files, corpus.names, strict=True)}
        for corpus in corpora
    )
    yield from (str(path) for path in others if path in trained)
    # Only files of equal sizes can be copies, so almost nothing is hashed.
    left = {path: name for path, name in others.items() if path not in trained}
    sizes = {path.stat().st_size for path in trained} - {0}
    found = {size for path in left if (size := path.stat().st_size) in sizes}
    digests = {
        _sha256(path): name for path, name in trained.items() if path.stat().st_size in found
    }
    for path, name in left.items():
        if path.stat().st_size in found and (copy := digests.get(_sha256(path))):
            yield f"{name}, a copy of {copy}"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _probe(corpus: Corpus, setting: str) -> None:
    """Reads the start of each of the user's files, so that a broken one is named before anything is made."""
    own = list(corpus.named())
    probed = dataclasses.replace(
        corpus, files=tuple(path for path, _ in own), names=tuple(name for _, name in own)
    )
    found = len(corpus.files) - len(own)  # files of Python's library, read already
    found += sum(1 for _ in probed.documents(Counter(), PROBED_RECORDS))
    if not found:
        raise DataError(
            "there is no text in the data",
            where=setting,
            why=f"{len(corpus.files)} file{'s' if len(corpus.files) != 1 else ''}, all empty: {', '.join(corpus.names[:3])}",
            fix=f"--config.{setting.split()[0]}='texts/*.txt'",
        )


def _tokenizer(config: DataConfig, train: Part, root: Path, say: Say) -> Tokenizer:
    kind = config.tokenizer
    if train.folder is not None:
        return _tokenizer_of_shards(Shards.open(train.folder), kind)
    if kind == "bytes":
        return tokenizer.Bytes()
    if kind.endswith((".model", ".json")):
        return tokenizer.read(kind)
    assert train.corpus is not None
    made_from = {
        "kind": kind,
        "corpus": train.corpus.digest(),
        "selection": dataclasses.asdict(train.selection),
        "version": 2,
    }
    folder = cache.folder(root, "tokenizers", **made_from)
    path = folder / "tokenizer"
    if not folder.exists():
        with cache.building(folder) as partial:
            if partial is not None:
                say(f"training the tokenizer {kind}")
                texts = (document.text for document in train.documents(Counter()))
                (partial / path.name).write_bytes(tokenizer.train(kind, texts).serialise())
    return tokenizer.load(path.read_bytes(), str(path))


def _tokenizer_of_shards(opened: Shards, setting: str) -> Tokenizer:
    """The one that made the shards, where the setting does not ask for another.

    The default setting asks for none: nothing can be trained where there is no text.
    """
    asked = None
    if setting.endswith((".model", ".json")):
        asked = tokenizer.read(setting)
    elif setting == "bytes":
        asked = tokenizer.Bytes()
    if asked is not None and asked.digest != opened.manifest.tokenizer:
        raise ConfigError(
            "the tokenizer is not the one that made the token shards",
            where=f"data.tokenizer = {setting}",
            why=f"its vocabulary is {asked.size}, that of {opened.folder} is {opened.manifest.vocab}",
            fix=f"--config.data.tokenizer=sentencepiece:{max(512, opened.manifest.vocab)} takes the one beside the shards",
        )
    return opened.tokenizer


def _digests(opened: Shards) -> list[str]:
    return [
        digest
        for shard in opened.manifest.shards
        for digest in (shard.tokens_sha256, shard.documents_sha256)
    ]


def _told(progress: Progress, part: Part) -> Callable[[int], None]:
    total = part.corpus.size if part.corpus else 0
    return lambda done: progress(part.name, done, total)


def _shards(part: Part, encoder: Tokenizer, root: Path, say: Say, progress: Progress) -> Shards:
    if part.folder is not None:
        opened = Shards.open(part.folder)
        if opened.manifest.tokenizer != encoder.digest:
            raise DataError(
                "token shards were made with another tokenizer",
                where=str(part.folder),
                why=f"its tokenizer is {opened.manifest.tokenizer[:12]}, the run's {encoder.digest[:12]}",
                fix="jaxlm data tokenize writes train and validation with one tokenizer",
            )
        return opened
    assert part.corpus is not None
    made_from = {
        "corpus": part.corpus.digest(),
        "selection": dataclasses.asdict(part.selection),
        "max_dropped": part.corpus.max_dropped,
        "tokenizer": encoder.digest,
        "version": manifest.FORMAT_VERSION,
    }
    folder = cache.folder(root, "shards", **made_from)
    if folder.exists():
        try:
            return Shards.open(folder)
        except JaxlmError as error:
            say(f"the cached tokens of {part.name} are made again: {error.what}, {error.why}")
            shutil.rmtree(folder)
    say(
        f"tokenising {part.name}: {len(part.corpus.files)} file{'s' if len(part.corpus.files) != 1 else ''}"
    )
    counts: Counter[str] = Counter()
    opened = writer.write(
        folder,
        part.documents(counts),
        encoder,
        counts,
        _told(progress, part),
        name=part.setting,
    )
    for what, names in (
        ("left out of", sorted(counts.keys() - set(MENDED))),
        ("in", sorted(counts.keys() & set(MENDED))),
    ):
        if names:
            say(f"{what} {part.name}: {', '.join(f'{counts[name]} {name}' for name in names)}")
    if opened.manifest.unknown:
        say(
            f"{opened.manifest.unknown} characters of {part.name} are not in the tokenizer and became <|unk|>"
        )
    return opened
