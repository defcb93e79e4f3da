"""From cleaned corpora to token shards, one set for each source and split.

A run that was stopped anywhere continues with the same command.

OUT/train/NAME, OUT/validation/NAME   token shards, in the trainer's format
OUT/mix.json                          tokens, documents and shares, tokenizer digest; written last
OUT/CARD.md                           the data card
OUT/recipe.json                       the mix, and the digests of its inputs
OUT/unfinished/                       intermediate files; deleted at the end
"""

import contextlib
import dataclasses
import functools
import hashlib
import heapq
import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core import config, disk
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.corpus import engines
from jaxlm.corpus.engines import EngineName
from jaxlm.corpus.files import changed
from jaxlm.corpus.job import RECIPE, WORK, other_files
from jaxlm.corpus.mix import sources
from jaxlm.corpus.mix.card import card
from jaxlm.corpus.mix.config import Mix, named
from jaxlm.corpus.mix.sources import COUNTS, TOKENIZER, TRAIN, MixUnits, TokenizeTask
from jaxlm.corpus.run import output_folder
from jaxlm.data import cache, manifest, tokenizer_file, train_tokenizer
from jaxlm.data.config import TOKENIZER_FILES
from jaxlm.data.manifest import Shard
from jaxlm.data.shards import TokenShards
from jaxlm.data.tokenizer import Tokenizer

FORMAT_VERSION = 1
MIX, CARD = "mix.json", "CARD.md"
FAR = 0.2  # of a weight: how far the share of a source may be from it without a line in the log


def run(
    mix: Mix,
    out: Path,
    *,
    workers: int = 1,
    engine: EngineName = "processes",
    log: Log = lambda _: None,
    progress: OnProgress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Run a mix, or the unfinished part of it; return the contents of mix.json.

    Args: `mix` are the settings; the others are those of `jaxlm.corpus.run.run`.

    Raises JaxlmError if a source is missing or damaged, or if the folder belongs to another mix or
    process or cannot be written.
    """
    units = MixUnits(out, mix, sources.find(mix))
    with output_folder(out):
        noted = _noted(units)
        if (out / MIX).exists():
            # Left by a process that was killed at the very end.
            shutil.rmtree(out / WORK, ignore_errors=True)
            disk.remove_partial(out)
            return _verified(out)
        path = out / WORK / TOKENIZER
        content = None
        if not path.exists():
            if mix.tokenizer != "bytes" and not mix.tokenizer.endswith(TOKENIZER_FILES):
                log(f"training the tokenizer {mix.tokenizer}")
            texts = functools.partial(_texts, units)
            content = tokenizer_of(mix.tokenizer, "tokenizer", texts).serialize()
        disk.replace(out / RECIPE, noted)  # after the tokenizer, whose failure claims no folder
        (out / WORK).mkdir(exist_ok=True)
        if content is not None:
            disk.replace(path, content)
        sizes = [sum(written.bytes for _, written in files) for _, files in units.parts]
        left = [n for n in range(len(sizes)) if not units.tokenized(n).exists()]
        if left:
            with engines.opened(engine, workers, log, progress) as run_units:
                run_units(TokenizeTask(out), left, sizes, "tokenizing")
        answer = _gathered(units, log)
        disk.replace(out / CARD, card(answer, units.sources).encode())
        disk.replace(out / MIX, json.dumps(answer, indent=1).encode())
        disk.remove_partial(out)
        shutil.rmtree(out / WORK)
        return answer


def _noted(units: MixUnits) -> bytes:
    """Return the contents of recipe.json; raise if the folder belongs to something else."""
    setting, path = units.mix.tokenizer, units.out / RECIPE
    is_file = setting.endswith(TOKENIZER_FILES) and Path(setting).is_file()
    mine = {
        "format_version": FORMAT_VERSION,
        "mix": config.to_json(units.mix),
        "reports": {source.name: source.sha256 for source in units.sources},
        "tokenizer": hashlib.sha256(Path(setting).read_bytes()).hexdigest() if is_file else None,
    }
    content = json.dumps(mine, indent=1).encode()
    if path.exists():
        if path.read_bytes() != content:
            what = "the output folder belongs to another mix, or its sources have changed"
            why = "a folder cannot contain shards of two mixes"
            fix = shlex.quote(f"--out={units.out}-2")
            raise ConfigError(what, where=str(path), why=why, fix=fix)
    elif any(not each.name.startswith(".") for each in units.out.iterdir()):
        raise other_files(units.out)
    return content


def tokenizer_of(
    setting: str, path: str, texts: Callable[[], Iterator[str]] = lambda: iter(())
) -> Tokenizer:
    """Load a tokenizer, or train it on texts. Raises JaxlmError, which names the setting `path`."""
    try:
        if setting.endswith(TOKENIZER_FILES):
            return tokenizer_file.read(setting)
        return train_tokenizer.train(setting, texts())
    except (ConfigError, DataError, InputMissing) as error:  # they name the setting data.tokenizer
        parts = (error.where, error.why, error.fix)
        where, why, fix = (part.replace("data.tokenizer", path) for part in parts)
        raise type(error)(error.what, where=where, why=why, fix=fix) from error


def _texts(units: MixUnits) -> Iterator[str]:
    """Yield the training texts of a tokenizer: all sources interleaved in proportion to size."""
    streams = [
        source.documents(source.files, units.sides[TRAIN], Counter()) for source in units.sources
    ]
    sizes = [source.share * source.report["characters"]["kept"] for source in units.sources]
    waiting = [(0.0, number) for number in range(len(streams))]  # share read, source
    while waiting:
        read, number = heapq.heappop(waiting)
        if (document := next(streams[number], None)) is not None:
            yield document.text
            heapq.heappush(waiting, (read + len(document.text) / sizes[number], number))


def _gathered(units: MixUnits, log: Log) -> dict[str, Any]:
    """Merge the shards of the units into sets."""
    sets: dict[str, dict[str, Any]] = {}
    left_out = {source.name: Counter[str]() for source in units.sources}
    for number, (source, _) in enumerate(units.parts):
        counts = (units.tokenized(number) / COUNTS).read_text(encoding="utf-8")
        left_out[source.name].update(json.loads(counts))
    for side in units.sides:
        for source in units.sources:
            folders = [
                units.tokenized(number) / side
                for number, (each, _) in enumerate(units.parts)
                if each is source
            ]
            if parts := [folder for folder in folders if folder.exists()]:
                target = units.out / side / source.name
                gather(target, parts, left_out[source.name])
                sets.setdefault(side, {})[source.name] = _described(target)
            else:
                log(f"the source {source.name} has no document in {side}: too few are left")
        total = sum(each["tokens"] for each in sets.get(side, {}).values())
        for each in sets.get(side, {}).values():
            each["share"] = each["tokens"] / total
    if TRAIN not in sets:
        what, why = "no document is left to train on", "all were held out or dropped by weight"
        flags = f"--config.held_out=0 --out={shlex.quote(str(units.out))}-2    # no validation sets"
        fix = flags if units.mix.held_out else "weights that drop fewer documents"
        raise DataError(what, where="held_out and weights", why=why, fix=fix)
    for line in _uneven(units.mix, sets[TRAIN]):
        log(line)
    made = manifest.read(units.out / TRAIN / next(iter(sets[TRAIN])))
    tokenizer = {"sha256": made.tokenizer, "size": made.vocab}
    return {"format_version": FORMAT_VERSION, "tokenizer": tokenizer, "sets": sets}


def _uneven(mix: Mix, train: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each source whose share of the bytes is far from its weight."""
    weights = {name: float(text) for name, text in named(mix.weights).items()}
    total = sum(each["bytes"] for each in train.values())
    for name, weight in weights.items():
        share = train[name]["bytes"] / total if name in train else 0.0
        target = weight / sum(weights.values())
        if abs(share - target) > FAR * target:
            flag = shlex.quote(f"--config.data.mixture.weights={','.join(mix.weights)}")
            yield (
                f"the source {name} has {share:.1%} of the bytes, and its weight is {target:.1%}: "
                "each document is dropped or kept by chance, and these are few or long; "
                f"--config.data.mixture.name=weights {flag} draws them in these proportions"
            )


def _described(folder: Path) -> dict[str, Any]:
    made = manifest.read(folder)
    return {
        **{name: getattr(made, name) for name in ("documents", "tokens", "bytes")},
        **{"shards": len(made.shards), "unknown": made.unknown, "left_out": made.left_out},
        "manifest": hashlib.sha256((folder / manifest.NAME).read_bytes()).hexdigest(),
    }


def _verified(out: Path) -> dict[str, Any]:
    """Return the result of a finished mix, after verifying every byte of its shards."""
    path = out / MIX
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        digests = {
            out / side / name: each["manifest"]
            for side, sets in answer["sets"].items()
            for name, each in sets.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise changed(path) from error
    for folder, digest in digests.items():
        TokenShards.open(folder).verify()
        if hashlib.sha256((folder / manifest.NAME).read_bytes()).hexdigest() != digest:
            raise changed(folder / manifest.NAME)
    return answer


def gather(target: Path, parts: Sequence[Path], left_out: Counter[str]) -> None:
    """Merge folders of token shards, in order, with one tokenizer and list of files; by links."""
    with cache.built(target) as folder:
        if folder is None:
            return
        manifests = [manifest.read(part) for part in parts]
        names = (manifest.tokens_name, manifest.documents_name, manifest.checks_name)
        shards: list[Shard] = []
        for part, each in zip(parts, manifests, strict=True):
            for number, shard in enumerate(each.shards):
                for name in names:
                    _link(part / name(number), folder / name(len(shards)))
                shards.append(shard)
        for copied in (manifest.FILES, manifest.TOKENIZER):
            _link(parts[0] / copied, folder / copied)
        totals = {
            name: sum(getattr(each, name) for each in manifests)
            for name in ("documents", "tokens", "bytes", "unknown")
        }
        merged = dataclasses.replace(
            manifests[0],
            **totals,
            left_out=dict(sorted(left_out.items())),
            files_sha256=hashlib.sha256((folder / manifest.FILES).read_bytes()).hexdigest(),
            shards=tuple(shards),
        )
        merged.write(folder)


def _link(path: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    with contextlib.suppress(OSError):
        os.link(path, target)
        return
    shutil.copyfile(path, target)
