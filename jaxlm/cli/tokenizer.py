"""Trains a tokenizer, and shows one.

jaxlm tokenizer train --config=FILE --out=my.model   on data.train, as data.tokenizer says
jaxlm tokenizer show --config=FILE --text="a b"      its size, and how it cuts a text
jaxlm tokenizer show my.model
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import NotWritable
from jaxlm.recipes.config import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|show")
    train = actions.add_parser("train", help="train data.tokenizer on data.train and write it")
    train.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="ends in .model for SentencePiece, in .json else",
    )
    show = actions.add_parser("show", help="the size of a tokenizer, and how it cuts a text")
    show.add_argument(
        "file", nargs="?", help="a .model or .json file; none is the one of the config"
    )
    show.add_argument("--text", default="def f(x):\n    return x + 1\n", help="what to cut")


def run(args: Any, out: Output) -> int:
    """Does what the action asks."""
    return {"train": _train, "show": _show}[args.action](args, out)


def _train(args: Any, out: Output) -> int:
    from jaxlm.data import cache

    tokenizer = _of_config(args, out)
    content = tokenizer.serialise()
    path = Path(args.out).with_suffix(".json" if content.startswith(b"{") else ".model")
    if path.exists():
        raise NotWritable(
            "the tokenizer file exists",
            where=str(path),
            why="a tokenizer is never overwritten: what was made with it would be lost",
            fix=f"--out={path.with_stem(path.stem + '-2')}",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cache.write_file(path, content)
    except OSError as error:
        raise NotWritable(
            "the tokenizer cannot be written",
            where=str(path),
            why=str(error.strerror),
            fix="--out=a/writable/place.model",
        ) from error
    out.result(
        {"file": str(path), "size": tokenizer.size, "sha256": tokenizer.digest},
        f"{path}: {tokenizer.size:,} ids; use it with --config.data.tokenizer={path}",
    )
    return 0


def _show(args: Any, out: Output) -> int:
    from jaxlm.data import tokenizer as tokenizers
    from jaxlm.data.peek import spelt

    tokenizer = tokenizers.read(args.file) if args.file else _of_config(args, out)
    ids = tokenizer.encode(args.text)
    pieces = [spelt([i], tokenizer) for i in ids]
    answer = {
        "kind": type(tokenizer).__name__,
        "size": tokenizer.size,
        "sha256": tokenizer.digest,
        "special": tokenizer.specials,
        "ids": ids,
        "pieces": pieces,
        "lossless": tokenizer.decode(ids).removeprefix(tokenizer.lead) == args.text,
    }
    lines = [
        f"{answer['kind']}, {tokenizer.size:,} ids, {len(tokenizer.specials)} of them special, sha256 {tokenizer.digest[:12]}",
        f"{len(args.text.encode())} bytes in {len(ids)} tokens{'' if answer['lossless'] else ', not given back exactly'}:",
        " ".join(f"{number}:{piece!r}" for number, piece in zip(ids, pieces, strict=True)),
    ]
    out.result(answer, "\n".join(lines))
    return 0


def _of_config(args: Any, out: Output) -> Any:
    from jaxlm.data import dataset

    return dataset.open_tokenizer(
        config.load(Run, args.config or args.workdir, args.overrides).value.data, say=out.say
    )
