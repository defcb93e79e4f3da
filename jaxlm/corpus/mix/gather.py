"""Merging the shards of several units into one folder, numbered in the order of the units."""

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxlm.data import cache, manifest
from jaxlm.data.manifest import Manifest, Shard


def gather(target: Path, parts: Sequence[Path], left_out: Counter[str]) -> None:
    """Merge folders of token shards with one tokenizer and one list of files; links, not copies.

    Raises:
      DataError: a folder is damaged.
    """
    with cache.built(target) as folder:
        if folder is None:
            return
        manifests = [manifest.read(part) for part in parts]
        shards: list[Shard] = []
        for part, each in zip(parts, manifests, strict=True):
            for number, shard in enumerate(each.shards):
                renamed = {
                    name(number): name(len(shards))
                    for name in (
                        manifest.tokens_name,
                        manifest.documents_name,
                        manifest.checks_name,
                    )
                }
                for before, after in renamed.items():
                    _link(part / before, folder / after)
                shards.append(shard)
        for name in (manifest.FILES, manifest.TOKENIZER):
            _link(parts[0] / name, folder / name)
        files = (folder / manifest.FILES).read_bytes()
        first = manifests[0]
        Manifest(
            tokenizer=first.tokenizer,
            vocab=first.vocab,
            dtype=first.dtype,
            documents=sum(each.documents for each in manifests),
            tokens=sum(each.tokens for each in manifests),
            bytes=sum(each.bytes for each in manifests),
            left_out=dict(sorted(left_out.items())),
            unknown=sum(each.unknown for each in manifests),
            files_sha256=hashlib.sha256(files).hexdigest(),
            shards=tuple(shards),
        ).write(folder)


def _link(path: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    with contextlib.suppress(OSError):
        os.link(path, target)
        return
    shutil.copyfile(path, target)
