"""Loaders from the data section of a config: find, split, train the tokenizer, tokenize, plan."""

import dataclasses
import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.config import Span
from jaxlm.core.errors import ConfigError, DataError, JaxlmError
from jaxlm.data import (
    cache,
    manifest,
    mixture,
    packing,
    parts,
    tokenizer_file,
    train_tokenizer,
    writer,
)
from jaxlm.data.config import TOKENIZER_FILES, DataConfig
from jaxlm.data.corrupt.rows import AnyCorruption, Reading
from jaxlm.data.documents import Corpus
from jaxlm.data.joined import AnyShards, join, open_folders
from jaxlm.data.loader import Loader
from jaxlm.data.manifest import Manifest
from jaxlm.data.mixture import Mixture
from jaxlm.data.parts import Part, Selection
from jaxlm.data.records import MENDED
from jaxlm.data.shards import Shards
from jaxlm.data.text_digest import TextDigests
from jaxlm.data.tokenizer import Bytes, Tokenizer
from jaxlm.monitor.progress import Progress

Say = Callable[[str], None]
MakeReading = Callable[[Tokenizer, int], Reading]  # from a tokenizer and the slots of a row


@dataclasses.dataclass(frozen=True)
class Data:
    """The tokenizer, loaders and fingerprint of a run."""

    tokenizer: Tokenizer
    train: Loader
    validation: dict[str, Loader]
    # Runs with equal fingerprints read the same rows in the same order.
    fingerprint: dict[str, str | int]


def open_data(
    config: DataConfig,
    *,
    seed: int,
    reading: MakeReading = lambda tokenizer, sequence: Reading(),
    row_at: Callable[[Span], int] = lambda span: int(span.amount),
    rows: int = 0,
    root: Path | None = None,
    say: Say = lambda _: None,
    warn: Say = lambda _: None,
    progress: Progress = lambda what, done, total: None,
) -> Data:
    """Find, tokenize and plan the data of a config, reusing the cache under `root`.

    Text is hashed at 0.7 s per GB to check that the cache is current, and again only if a file
    changed (`text_digest`). Token shards are not hashed.

    Args:
      config: the data section.
      seed: seed of the order of training rows.
      reading: makes the objective's change of rows.
      row_at: row of the stream at which a span of the run ends, for weights that change.
      rows: rows of the whole run, for the same.
      root: the cache folder.
      log: prints a line.
      warn: called at every opening with documents left out or changed.
      progress: called during hashing and tokenizing.

    Raises:
      JaxlmError: if data is missing, broken, empty, or has another tokenizer.
    """
    root = cache.default() if root is None else root
    train_parts, validation_parts = parts.find(config)
    digests = TextDigests(root, progress, say)
    encoder = _tokenizer(config, train_parts, digests, say)
    read = reading(encoder, config.sequence)

    def shards(part: Part) -> AnyShards:
        return _shards(part, encoder, digests, say, warn, progress)

    sources = {
        part.source: _loader(shards(part), config, root, seed, read.train) for part in train_parts
    }
    train = sources.get(parts.TRAIN)
    if train is None:
        joined = join([loader.shards for loader in sources.values()])
        train = mixture.mixed(sources, joined, config, row_at=row_at, rows=rows)
    if config.damaged == "skip":
        train = dataclasses.replace(train, most_lost=config.max_dropped)
    # Evaluation rows are the same for every seed.
    opened = {part.name: shards(part) for part in validation_parts}
    validation = {
        f"{name}{added}": _loader(held, config, root, 0, corruption)
        for name, held in opened.items()
        for added, corruption in read.evaluations.items()
    }
    fingerprint: dict[str, str | int] = {
        "tokenizer": encoder.digest,
        "sequence": config.sequence,
        "packing": config.packing,
        "seed": seed,
        "order": packing.VERSION,
    }
    if isinstance(train, Mixture):
        fingerprint["mixture"] = mixture.VERSION
    for name, part in (
        ("train", train.shards),
        *((f"train.{n}", s.shards) for n, s in sources.items() if n != parts.TRAIN),
        *((f"validation.{n}", p) for n, p in opened.items()),
    ):
        fingerprint[name] = hashlib.sha256("".join(part.manifest.digests).encode()).hexdigest()
        fingerprint[f"{name}.documents"] = part.documents
        fingerprint[f"{name}.tokens"] = part.manifest.tokens
    return Data(encoder, train, validation, fingerprint)


def _loader(
    opened: AnyShards, config: DataConfig, root: Path, seed: int, corruption: AnyCorruption | None
) -> Loader:
    """Return the loader of some shards, planned with the slots that the corruption needs."""
    length = config.sequence - (corruption.room if corruption else 0)
    key = {
        "shards": opened.manifest.digests,
        "sequence": length,
        "packing": config.packing,
        "seed": seed,
    }
    folder = cache.folder(root, "plans", version=packing.VERSION, **key)
    return Loader(
        opened,
        packing.plan(opened, length, config.packing, seed, folder),
        config.sequence,
        seed,
        config.workers,
        config.prefetch,
        corruption=corruption,
    )


def open_tokenizer(
    config: DataConfig, *, root: Path | None = None, say: Say = lambda _: None
) -> Tokenizer:
    """Return the tokenizer of a config; train it if necessary."""
    train, _ = parts.find(config)
    digests = TextDigests(cache.default() if root is None else root, say=say)
    return _tokenizer(config, train, digests, say)


def tokenise(config: DataConfig, out: Path, say: Say, progress: Progress) -> dict[str, Shards]:
    """Write each side of the data as a folder of token shards under `out`."""
    train, validation = parts.find(config)
    encoder = _tokenizer(config, train, TextDigests(cache.default(), progress, say), say)
    written = {}
    for part in (*train, *validation):
        if part.corpus is None:
            raise ConfigError(
                "data tokenize needs text, not token shards",
                where=str(part.folders[0]),
                why=f"the folder has a {manifest.NAME}",
                fix=f"jaxlm data check {shlex.quote(str(part.folders[0]))}    # ready for training",
            )
        target = out / part.name
        if target.exists():
            raise DataError(
                "the output folder already exists",
                where=str(target),
                why="shards are never overwritten",
                fix=f"--out={out}-2",
            )
        with cache.writing(target, fix="choose a writable --out folder on a disk with free space"):
            written[part.name] = _written(target, part, encoder, progress)
        for line in _losses(part.name, written[part.name].manifest):
            say(line)
    return written


def text_loaders(
    corpus: Corpus, encoder: Tokenizer, sequence: int, reading: MakeReading, root: Path, say: Say
) -> dict[str, Loader]:
    """Return loaders of any text under a given tokenizer, one for each evaluation of an objective.

    Args:
      corpus: the text.
      encoder: the tokenizer.
      sequence: slots of a row.
      reading: makes the objective's change of rows.
      root: the cache folder.
      log: prints a line.
    """
    digests = TextDigests(root, say=say)
    opened = _shards(
        *(Part("text", corpus, Selection()), encoder, digests, say, say),
        lambda what, done, total: None,
    )
    config = DataConfig(sequence=sequence)
    return {
        f"text{added}": _loader(opened, config, root, 0, corruption)
        for added, corruption in reading(encoder, sequence).evaluations.items()
    }


def _tokenizer(config: DataConfig, train: list[Part], digests: TextDigests, say: Say) -> Tokenizer:
    kind = config.tokenizer
    if folders := tuple(folder for part in train for folder in part.folders):
        return _tokenizer_of_shards(open_folders(folders), kind, say)
    if kind == "bytes":
        return Bytes()
    if kind.endswith(TOKENIZER_FILES):
        return tokenizer_file.read(kind)
    corpora = [digests.of(part.corpus) for part in train if part.corpus is not None]
    made_from = {
        "kind": kind,
        "corpus": corpora[0] if len(corpora) == 1 else corpora,
        "selection": dataclasses.asdict(train[0].selection),  # the same for all
        "version": 2,
    }
    folder = cache.folder(digests.root, "tokenizers", **made_from)
    path = folder / "tokenizer"
    if not folder.exists():
        with cache.building(folder) as partial:
            if partial is not None:
                say(f"training the tokenizer {kind}")
                texts = (document.text for part in train for document in part.documents(Counter()))
                (partial / path.name).write_bytes(train_tokenizer.train(kind, texts).serialise())
    return tokenizer_file.load(path.read_bytes(), str(path))


def _tokenizer_of_shards(opened: AnyShards, setting: str, say: Say) -> Tokenizer:
    """Return the tokenizer of the shards, unless the setting names another.

    A trained tokenizer is compared by kind and size only, as there is no text to train it again.
    The default setting accepts any; then the tokenizer is reported.

    Raises:
      ConfigError: if the setting names another.
    """
    tokenizer, requested = opened.tokenizer, None
    if setting.endswith(TOKENIZER_FILES):
        requested = tokenizer_file.read(setting)
    elif setting == "bytes":
        requested = Bytes()
    kind, _, size = setting.partition(":")
    is_like = kind in tokenizer.kinds and size in ("", str(tokenizer.size))
    is_own = (
        requested.digest == tokenizer.digest
        if requested
        else is_like or setting == DataConfig().tokenizer
    )
    if not is_own:
        raise ConfigError(
            "the tokenizer is not the one that made the token shards",
            where=f"data.tokenizer = {setting}",
            why=f"that of {opened.folder} has {_described(tokenizer)}"
            + (f", this one has {_described(requested)}" if requested else ""),
            fix=f"--config.data.tokenizer={opened.folder / manifest.TOKENIZER}",
        )
    if requested is None:
        say(f"the tokenizer is that of the token shards: {_described(tokenizer)}")
    return tokenizer


def _described(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.size} ids and the digest {tokenizer.digest[:12]}"


def _losses(name: str, manifest: Manifest) -> Iterator[str]:
    """Yield lines about a part: documents left out or changed, characters without an id."""
    lost = {what: n for what, n in manifest.left_out.items() if what not in parts.ELSEWHERE}
    for words, reasons in (
        ("left out of", sorted(lost.keys() - set(MENDED))),
        ("in", sorted(lost.keys() & set(MENDED))),
    ):
        if reasons:
            yield f"{words} {name}: {', '.join(f'{lost[reason]} {reason}' for reason in reasons)}"
    if manifest.unknown:
        yield (
            f"{manifest.unknown} characters of {name} are not in the tokenizer; they became <|unk|>"
        )


def _shards(
    part: Part,
    encoder: Tokenizer,
    digests: TextDigests,
    say: Say,
    warn: Say,
    progress: Progress,
) -> AnyShards:
    opened = _opened(part, encoder, digests, say, warn, progress)
    for line in _losses(part.name, opened.manifest):
        warn(line)
    return opened


def _opened(
    part: Part,
    encoder: Tokenizer,
    digests: TextDigests,
    say: Say,
    warn: Say,
    progress: Progress,
) -> AnyShards:
    if part.folders:
        opened = open_folders(part.folders)
        if opened.manifest.tokenizer != encoder.digest:
            raise ConfigError(
                "token shards have another tokenizer than the training data",
                where=f"{part.setting} = {opened.folder}",
                why=f"the digest is {opened.manifest.tokenizer[:12]}, that of the run "
                f"{encoder.digest[:12]}",
                fix="'--config.data.validation=()'    # no evaluation",
            )
        return opened
    assert part.corpus is not None
    made_from = {
        "corpus": digests.of(part.corpus),
        "selection": dataclasses.asdict(part.selection),
        "max_dropped": part.corpus.max_dropped,
        "tokenizer": encoder.digest,
        "version": manifest.FORMAT_VERSION,
        "encoding": writer.ENCODING,
    }
    folder = cache.folder(digests.root, "shards", **made_from)
    if folder.exists():
        try:
            return Shards.open(folder)
        except JaxlmError as error:
            warn(f"rebuilding the cached tokens of {part.name}: {error.what}, {error.why}")
    say(
        f"tokenizing {part.name}: {len(part.corpus.files)} "
        f"file{'s' if len(part.corpus.files) != 1 else ''}"
    )
    with cache.writing(folder):
        return _written(folder, part, encoder, progress, _is_whole)


def _is_whole(folder: Path) -> bool:
    try:
        Shards.open(folder)
    except JaxlmError:
        return False
    return True


def _written(
    folder: Path,
    part: Part,
    encoder: Tokenizer,
    progress: Progress,
    is_whole: Callable[[Path], bool] = lambda folder: True,
) -> Shards:
    assert part.corpus is not None
    counts: Counter[str] = Counter()
    total = part.corpus.size
    written = writer.write(
        folder,
        part.documents(counts),
        encoder,
        counts,
        lambda done: progress(f"tokenizing {part.name}", done, total),
        name=part.setting,
        is_whole=is_whole,
    )
    # Documents of the other side may follow the last one.
    progress(f"tokenizing {part.name}", total, total)
    return written
