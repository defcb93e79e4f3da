"""Loaders from the data section of a config: find, split, train the tokenizer, tokenize, plan."""

import dataclasses
import hashlib
import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.config import Span
from jaxlm.core.errors import ConfigError, DataError, JaxlmError
from jaxlm.data import (
    cache,
    chat_templates,
    manifest,
    mixture,
    packing,
    parts,
    tokenizer_file,
    writer,
)
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.chat_encoder import ChatEncoder
from jaxlm.data.config import TOKENIZER_FILES, DataConfig
from jaxlm.data.corrupt.rows import RowChange, RowChanges
from jaxlm.data.documents import Corpus
from jaxlm.data.loader import Loader
from jaxlm.data.manifest import Manifest
from jaxlm.data.mixture import MixtureLoader
from jaxlm.data.parts import Part, SplitSide
from jaxlm.data.prompt_overlap import refuse_shared_prompts
from jaxlm.data.records import MENDED, LeftOut
from jaxlm.data.remote import Downloads
from jaxlm.data.shards import AnyShards, TokenShards, join, open_folders
from jaxlm.data.text_digest import TextDigests
from jaxlm.data.tokenizer import Bytes, Tokenizer
from jaxlm.data.train_tokenizer import train as train_tokenizer

PrepareRows = Callable[[Tokenizer, int], RowChanges]  # from a tokenizer and the slots of a row


@dataclasses.dataclass(frozen=True)
class Data:
    """The tokenizer, loaders and fingerprint of a run."""

    tokenizer: Tokenizer
    train: Loader
    validation: dict[str, Loader]
    # Runs with equal fingerprints read the same rows in the same order.
    fingerprint: dict[str, str | int]
    template: ChatTemplate | None = None  # of conversations


def open_data(
    config: DataConfig,
    *,
    seed: int,
    prepare: PrepareRows = lambda tokenizer, sequence: RowChanges(),
    row_at: Callable[[Span], int] = lambda span: int(span.amount),
    rows: int = 0,
    reserved: int = 0,
    samples: int = 1,
    root: Path | None = None,
    log: Log = lambda _: None,
    warn: Log = lambda _: None,
    progress: OnProgress = lambda what, done, total: None,
) -> Data:
    """Find, tokenize and plan the data of a config, reusing the cache under `root`.

    Text is hashed at 0.7 s per GB to check that the cache is current, and again only if a file
    changed (`text_digest`). Token shards are not hashed.

    Args:
      seed: seed of the order of training rows.
      prepare: makes the objective's changes of rows.
      row_at: row of the stream at which a span of the run ends, for weights that change.
      rows: rows of the whole run, for the maximum epochs of sources; 0 if they are not known.
      reserved: slots of a row that the prompts of `data.kind=prompts` leave free.
      samples: rows of the run for each prompt of a mixture of prompts.
      warn: called at every opening with documents left out or changed.
      progress: called during hashing and tokenizing.

    Raises:
      JaxlmError: if data is missing, broken, empty, or has another tokenizer.
    """
    root = cache.default() if root is None else root
    downloads = Downloads(root, log, progress)
    train_parts, validation_parts = parts.find_parts(config, downloads)
    digests = TextDigests(root, progress, log)
    encoder = _tokenizer(config, train_parts, digests)
    changes = prepare(encoder, config.sequence)
    chat = _chat_encoder(config, encoder, warn)
    if chat is not None and config.has_prompts:
        chat = dataclasses.replace(chat, sequence=config.sequence - reserved)
    opener = _Opener(encoder, chat, digests, warn)
    opened = {part.source: opener.shards(part) for part in train_parts}
    _check_changes(opened.values(), changes)
    _check_answers([*opened.values()], config)
    sources = {}
    for name, shards in opened.items():
        sources[name] = _loader(shards, config, root, seed, changes.train)
    train = sources.get(parts.TRAIN)
    if train is None:
        joined = join([loader.shards for loader in sources.values()])
        train = mixture.mix_loaders(
            sources,
            joined,
            config,
            row_at=row_at,
            rows=rows,
            samples=samples if config.has_prompts else 1,
        )
    if config.damaged == "skip":
        train = dataclasses.replace(train, max_lost=config.max_dropped)
    refuse_shared_prompts(train_parts, validation_parts, digests)
    held_out = {part.name: opener.shards(part) for part in validation_parts}
    both = {part.name: opened[part.source] for part in train_parts} | held_out
    for line in _uneven(train_parts, validation_parts, both):
        warn(line)
    if held_out:
        _check_answers([*held_out.values()], config)
    template = train.shards.template
    fingerprint: dict[str, str | int] = {
        "tokenizer": encoder.digest,
        "sequence": config.sequence,
        "packing": config.packing,
        "seed": seed,
        "order": packing.VERSION,
    }
    if isinstance(train, MixtureLoader):
        fingerprint["mixture"] = mixture.VERSION
    sets = {"train": train.shards}
    sets |= {f"train.{n}": each.shards for n, each in sources.items() if n != parts.TRAIN}
    sets |= {f"validation.{n}": each for n, each in held_out.items()}
    for name, shards in sets.items():
        fingerprint[name] = hashlib.sha256("".join(shards.manifest.digests).encode()).hexdigest()
        fingerprint[f"{name}.documents"] = shards.documents
        fingerprint[f"{name}.tokens"] = shards.manifest.tokens
    if template is not None:
        fingerprint["template"] = train.shards.manifest.template
    validation = _evaluations(held_out, config, root, changes)
    return Data(encoder, train, validation, fingerprint, template)


def _chat_encoder(config: DataConfig, tokenizer: Tokenizer, warn: Log) -> ChatEncoder | None:
    """Return the encoding of conversations; None for text. Warn of a date in the template."""
    if not config.has_chats:
        return None
    path = Path(config.tokenizer).parent
    folders = (
        (path / chat_templates.HUB, path) if config.tokenizer.endswith(TOKENIZER_FILES) else ()
    )
    template = chat_templates.choose(config.template, tokenizer, folders)
    if note := chat_templates.date_note(template):
        warn(note)
    options = config.sequence, config.overlong, config.max_dropped, config.answers
    return ChatEncoder(tokenizer, template, *options)


def _check_changes(opened: Iterable[AnyShards], changes: RowChanges) -> None:
    """Raise ConfigError if an objective that changes rows would read conversations."""
    if changes.train is not None and any(shards.manifest.weights for shards in opened):
        raise ConfigError(
            "the objective does not train on conversations",
            where="objective.name",
            why="it chooses the predicted tokens itself, and conversations have a weight for each",
            fix="--config.objective.name=causal",
        )


def _check_answers(opened: Sequence[AnyShards], config: DataConfig) -> None:
    """Raise ConfigError if token shards have judged answers and the config does not, or inverse.

    Raise DataError if the labels of all shards together are of one kind.
    """
    for shards in opened:
        manifests = [part.manifest for part in getattr(shards, "parts", (shards,))]
        kinds = {each.answers for each in manifests}
        if kinds != {config.answers}:
            kind = max(kinds - {config.answers})
            raise ConfigError(
                f"token shards were written with data.kind = {kind or 'text or chat'}",
                where=f"data.kind = {config.kind}",
                why=f"the ids of {shards.folder} have {'' if kind else 'no '}judgments of answers",
                fix=f"--config.data.kind={kind or 'chat'}\nwrite the shards again",
            )
    is_step = config.answers == "steps"
    good, bad = ("right", "wrong") if is_step else ("chosen", "rejected")
    figures = Counter[str]()
    for shards in opened:
        figures.update(shards.manifest.figures)
    if config.answers and not (figures[good] and figures[bad]):
        one, other = ("true", "false") if figures[good] else ("false", "true")
        things = "steps" if is_step else "answers"
        count = figures["trained_tokens"] if is_step else sum(each.documents for each in opened)
        learns = "--config.data.kind=completion --config.objective.name=causal"
        raise DataError(
            f"the labels of all {things} are equal",
            where="; ".join(shards.source for shards in opened),
            why=f"each of {count} {things} has the label {one}, so that the data has no preference",
            fix=f"name files with labels that are {other} too"
            + ("" if is_step else f"\n{learns}    # learns them all"),
        )


def _loader(
    shards: AnyShards, config: DataConfig, root: Path, seed: int, change: RowChange | None
) -> Loader:
    """Return the loader of some shards, planned with the slots that `change` reserves."""
    length = config.sequence - (change.reserved_slots if change else 0)
    figures = shards.manifest.figures
    packed: packing.Packing = "first_fit" if figures else config.packing  # conversations stay whole
    longest = figures.get("longest_pair", figures.get("longest", 0) - 1)
    if longest > length:
        where = shards.source
        why = f"the longest has {longest + 1} tokens, and rows of {length} hold {length + 1}"
        fix = f"--config.data.sequence={longest}"
        raise DataError("a conversation is longer than a row", where=where, why=why, fix=fix)
    made_from = {"shards": shards.manifest.digests, "sequence": length, "packing": packed}
    folder = cache.folder(root, "plans", version=packing.VERSION, seed=seed, **made_from)
    plan = packing.open_plan(shards, length, packed, seed, folder)
    options = config.sequence, seed, config.workers, config.prefetch
    return Loader(shards, plan, *options, corruption=change)


def in_order_of_evaluation(loader: Loader, config: DataConfig) -> Loader:
    """Return a loader of the same documents in rows that do not depend on the seed of a run."""
    return _loader(loader.shards, config, cache.default(), 0, None)


def open_tokenizer(
    config: DataConfig, *, root: Path | None = None, log: Log = lambda _: None
) -> Tokenizer:
    """Return the tokenizer of a config; train it if necessary."""
    train, _ = parts.find_parts(config, Downloads(root, log))
    return _tokenizer(config, train, TextDigests(root or cache.default(), log=log))


def tokenize(
    config: DataConfig, out: Path, log: Log, progress: OnProgress
) -> dict[str, TokenShards]:
    """Write each side of the data as a folder of token shards under `out`."""
    train, validation = parts.find_parts(config, Downloads(None, log, progress))
    encoder = _tokenizer(config, train, TextDigests(cache.default(), progress, log))
    chat = _chat_encoder(config, encoder, log)
    written = {}
    for part in (*train, *validation):
        if part.corpus is None:
            what = "data tokenize needs text, not token shards"
            where = str(part.folders[0])
            fix = f"jaxlm data check {shlex.quote(str(part.folders[0]))}    # ready for training"
            raise ConfigError(what, where=where, why=f"the folder has a {manifest.NAME}", fix=fix)
        target = out / part.name
        if target.exists():
            what = "the output folder already exists"
            why = "shards are never overwritten"
            fix = shlex.quote(f"--out={out}-2")
            raise DataError(what, where=str(target), why=why, fix=fix)
        with cache.writing(target, fix="choose a writable --out folder on a disk with free space"):
            form = chat if part.corpus.chat is not None else None
            written[part.name] = _written(target, part, encoder, form, progress)
        for line in _losses(part.name, written[part.name].manifest):
            log(line)
    for line in _uneven(train, validation, written):
        log(line)
    return written


def text_loaders(
    corpus: Corpus,
    encoder: Tokenizer,
    sequence: int,
    prepare: PrepareRows,
    root: Path,
    log: Log,
    chat: ChatEncoder | None = None,
) -> dict[str, Loader]:
    """Return loaders of any text under a given tokenizer, one for each evaluation of an objective.

    Args:
      prepare: makes the objective's changes of rows.
      chat: the encoding of conversations; None for text.
    """
    part = Part("text", corpus, SplitSide())
    opener = _Opener(encoder, chat, TextDigests(root, log=log), log)
    sets = {part.name: opener.shards(part)}
    return _evaluations(sets, DataConfig(sequence=sequence), root, prepare(encoder, sequence))


def _evaluations(
    sets: dict[str, AnyShards], config: DataConfig, root: Path, changes: RowChanges
) -> dict[str, Loader]:
    """Return a loader for each set and evaluation; the rows are the same for every seed."""
    return {
        f"{name}{suffix}": _loader(shards, config, root, 0, change)
        for name, shards in sets.items()
        for suffix, change in changes.evaluations.items()
    }


def _tokenizer(config: DataConfig, train: list[Part], digests: TextDigests) -> Tokenizer:
    kind = config.tokenizer
    if folders := tuple(folder for part in train for folder in part.folders):
        return _tokenizer_of_shards(open_folders(folders), kind, digests.log)
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
                digests.log(f"training the tokenizer {kind}")
                texts = (document.text for part in train for document in part.documents(LeftOut()))
                (partial / path.name).write_bytes(train_tokenizer(kind, texts).serialize())
    return tokenizer_file.load(path.read_bytes(), str(path))


def _tokenizer_of_shards(shards: AnyShards, setting: str, log: Log) -> Tokenizer:
    """Return the tokenizer of the shards. Raise ConfigError if the setting names another.

    A trained tokenizer is compared by kind and size only, as there is no text to train it again.
    The default setting accepts any; then the tokenizer is reported.
    """
    tokenizer, requested = shards.tokenizer, None
    if setting.endswith(TOKENIZER_FILES):
        requested = tokenizer_file.read(setting)
    elif setting == "bytes":
        requested = Bytes()
    kind, _, size = setting.partition(":")
    is_like = kind in tokenizer.kinds and size in ("", str(tokenizer.size))
    if (
        requested.digest != tokenizer.digest
        if requested
        else not is_like and setting != DataConfig().tokenizer
    ):
        what = "the tokenizer is not the one that made the token shards"
        why = f"that of {shards.folder} has {_described(tokenizer)}" + (
            f", this one has {_described(requested)}" if requested else ""
        )
        fix = f"--config.data.tokenizer={shards.folder / manifest.TOKENIZER}"
        raise ConfigError(what, where=f"data.tokenizer = {setting}", why=why, fix=fix)
    if requested is None:
        log(f"the tokenizer is that of the token shards: {_described(tokenizer)}")
    return tokenizer


def _described(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.size} ids and the digest {tokenizer.digest[:12]}"


def _uneven(
    train: Sequence[Part], validation: Sequence[Part], shards: Mapping[str, AnyShards]
) -> Iterator[str]:
    """Yield lines about shares of documents that differ from those that were set."""
    held_out, for_training = parts.ELSEWHERE
    for part, source in itertools.product(validation, train):
        if part.selection.split == "documents" and part.corpus is source.corpus:
            held = shards[source.name].manifest.left_out.get(held_out, 0)
            others = shards[part.name].manifest.left_out.get(for_training, 0)
            if line := parts.uneven_note(part, held, others):
                yield line


def _losses(name: str, manifest: Manifest) -> Iterator[str]:
    """Yield lines about a part: documents left out or changed, characters without an id."""
    lost = manifest.left_out.keys() - set(parts.ELSEWHERE)
    changed = lost & set(MENDED)
    for words, reasons in (("left out of", lost - changed), ("in", changed)):
        if reasons:
            counts = ", ".join(manifest.counted(reason) for reason in sorted(reasons))
            yield f"{words} {name}: {counts}"
    if n := manifest.unknown:
        yield f"{n} characters of {name} are not in the tokenizer; they became <|unk|>"
    if n := manifest.figures.get("answers_in_prompt_token", 0):
        yield (
            f"{n} of {manifest.figures['trained_turns']} answers of {name} start inside a token of "
            "their prompt, which is not trained"
        )


@dataclasses.dataclass(frozen=True)
class _Opener:
    """Opens the shards of parts, from folders or the cache, with the encoding of a run."""

    encoder: Tokenizer
    chat: ChatEncoder | None
    digests: TextDigests
    warn: Log

    def shards(self, part: Part) -> AnyShards:
        """Open the shards of a part; report its losses."""
        if part.folders:
            shards = open_folders(part.folders)
            if shards.manifest.tokenizer != self.encoder.digest:
                raise ConfigError(
                    "token shards have another tokenizer than the training data",
                    where=f"{part.setting} = {shards.folder}",
                    why=f"the digest is {shards.manifest.tokenizer[:12]}, that of the run "
                    f"{self.encoder.digest[:12]}",
                    fix="'--config.data.validation=()'    # no evaluation",
                )
        else:
            shards = self._cached(part)
        for line in _losses(part.name, shards.manifest):
            self.warn(line)
        return shards

    def _cached(self, part: Part) -> TokenShards:
        assert part.corpus is not None
        made_from = {
            "corpus": self.digests.of(part.corpus),
            "selection": dataclasses.asdict(part.selection),
            "max_dropped": part.corpus.max_dropped,
            "tokenizer": self.encoder.digest,
            "version": manifest.FORMAT_VERSION,
            "encoding": writer.ENCODING,
        }
        chat = self.chat if part.corpus.chat is not None else None
        if chat is not None:
            made_from["chat"] = chat.key
            if part.selection.split == "documents":
                made_from["split"] = parts.SPLIT_OF_CONVERSATIONS
        folder = cache.folder(self.digests.root, "shards", **made_from)
        if folder.exists():
            try:
                return TokenShards.open(folder)
            except JaxlmError as error:
                line = f"rebuilding the cached tokens of {part.name}: {error.what}, {error.why}"
                self.warn(line)
        count = len(part.corpus.files)
        self.digests.log(f"tokenizing {part.name}: {count} file{'s' if count != 1 else ''}")
        with cache.writing(folder):
            progress = self.digests.progress
            return _written(folder, part, self.encoder, chat, progress, _is_whole)


def _is_whole(folder: Path) -> bool:
    try:
        TokenShards.open(folder)
    except JaxlmError:
        return False
    return True


def _written(
    folder: Path,
    part: Part,
    encoder: Tokenizer,
    chat: ChatEncoder | None,
    progress: OnProgress,
    is_whole: Callable[[Path], bool] = lambda folder: True,
) -> TokenShards:
    assert part.corpus is not None
    counts, total, title = LeftOut(), part.corpus.size, f"tokenizing {part.name}"
    stream = folder, part.documents(counts), encoder, counts, lambda n: progress(title, n, total)
    written = writer.write(*stream, name=part.setting, is_whole=is_whole, chat=chat)
    progress(title, total, total)  # documents of the other side may follow the last one
    return written
