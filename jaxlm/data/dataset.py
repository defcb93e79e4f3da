"""From the data section of a config to loaders: find, split, train the tokenizer, tokenise, plan."""

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
MakeReading = Callable[[Tokenizer, int], Reading]  # for rows of so many slots


@dataclasses.dataclass(frozen=True)
class Data:
    """Everything that a run reads."""

    tokenizer: Tokenizer
    train: Loader
    validation: dict[str, Loader]
    fingerprint: dict[
        str, str | int
    ]  # two runs with equal ones read the same rows in the same order


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
    """Finds, tokenises and plans what the config names; what was made before comes from the cache under `root`.

    Text is hashed to see that it is what was tokenised, 0.7 s a gigabyte; again only if a file changed, see `text_digest`.
    Of token shards nothing is hashed.

    `reading` is how the objective reads rows. Weights that change over the run need to know at which row a span of it ends, and
    how many `rows` it has in all. `warn` hears what of the data is not read as it was written, at every opening.

    Raises:
      JaxlmError: where the data is missing, broken, empty, or does not fit the tokenizer.
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
    # Runs of any seed are evaluated on the same rows.
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
    """The rows of some shards, planned with the room that the corruption needs."""
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
    """The tokenizer that the config names, trained on its training text where it is one to train."""
    train, _ = parts.find(config)
    digests = TextDigests(cache.default() if root is None else root, say=say)
    return _tokenizer(config, train, digests, say)


def tokenise(config: DataConfig, out: Path, say: Say, progress: Progress) -> dict[str, Shards]:
    """Writes each side of the data as a folder of shards under `out`, to be named in `data.train` and `data.validation`."""
    train, validation = parts.find(config)
    encoder = _tokenizer(config, train, TextDigests(cache.default(), progress, say), say)
    written = {}
    for part in (*train, *validation):
        if part.corpus is None:
            raise ConfigError(
                "this is tokenised already",
                where=str(part.folders[0]),
                why=f"it has a {manifest.NAME}; text is what is tokenised",
                fix=f"jaxlm data check {shlex.quote(str(part.folders[0]))}    # they can be trained on",
            )
        target = out / part.name
        if target.exists():
            raise DataError(
                "the output folder exists",
                where=str(target),
                why="shards are never overwritten",
                fix=f"--out={out}-2",
            )
        with cache.writing(
            target, fix="give --out a folder that can be written, on a disk with room"
        ):
            written[part.name] = _written(target, part, encoder, progress)
        for line in _losses(part.name, written[part.name].manifest):
            say(line)
    return written


def text_loaders(
    corpus: Corpus, encoder: Tokenizer, sequence: int, reading: MakeReading, root: Path, say: Say
) -> dict[str, Loader]:
    """The rows of any text under a given tokenizer, for the evaluations of an objective."""
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
        "selection": dataclasses.asdict(train[0].selection),  # that of all
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
    """The one that made the shards, where the setting does not ask for another.

    One that would be trained is compared by its kind and size: it cannot be, where there is no text. The default asks for
    none; what is read instead is said.

    Raises:
      ConfigError: where it asks for another.
    """
    own, asked = opened.tokenizer, None
    if setting.endswith(TOKENIZER_FILES):
        asked = tokenizer_file.read(setting)
    elif setting == "bytes":
        asked = Bytes()
    kind, _, size = setting.partition(":")
    is_like = kind in own.kinds and size in ("", str(own.size))
    is_own = asked.digest == own.digest if asked else is_like or setting == DataConfig().tokenizer
    if not is_own:
        raise ConfigError(
            "the tokenizer is not the one that made the token shards",
            where=f"data.tokenizer = {setting}",
            why=f"that of {opened.folder} has {_described(own)}"
            + (f", this one has {_described(asked)}" if asked else ""),
            fix=f"--config.data.tokenizer={opened.folder / manifest.TOKENIZER}",
        )
    if asked is None:
        say(f"the tokenizer is that of the token shards: {_described(own)}")
    return own


def _described(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.size} ids and the digest {tokenizer.digest[:12]}"


def _losses(name: str, manifest: Manifest) -> Iterator[str]:
    """What of a part is not as it was written: documents left out, changed or odd, characters without an id."""
    lost = {what: n for what, n in manifest.left_out.items() if what not in parts.ELSEWHERE}
    for words, reasons in (
        ("left out of", sorted(lost.keys() - set(MENDED))),
        ("in", sorted(lost.keys() & set(MENDED))),
    ):
        if reasons:
            yield f"{words} {name}: {', '.join(f'{lost[reason]} {reason}' for reason in reasons)}"
    if manifest.unknown:
        yield (
            f"{manifest.unknown} characters of {name} are not in the tokenizer and became <|unk|>"
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
                "token shards were made with another tokenizer than the training data",
                where=f"{part.setting} = {opened.folder}",
                why=f"its tokenizer has the digest {opened.manifest.tokenizer[:12]}, the run's {encoder.digest[:12]}",
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
            warn(f"the cached tokens of {part.name} are made again: {error.what}, {error.why}")
    say(
        f"tokenising {part.name}: {len(part.corpus.files)} file{'s' if len(part.corpus.files) != 1 else ''}"
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
        lambda done: progress(f"tokenising {part.name}", done, total),
        name=part.setting,
        is_whole=is_whole,
    )
    # Documents of the other side may follow its last one.
    progress(f"tokenising {part.name}", total, total)
    return written
