"""Trains a tokenizer, shows one, and compares several.

jaxlm tokenizer train --config=FILE --out=my.model   on data.train, as data.tokenizer says
jaxlm tokenizer show --config=FILE --text="a b"      its size, and how it cuts a text
jaxlm tokenizer show my.model
jaxlm tokenizer compare my.model bpe:8192 bytes      how each fits a text; those of a size are trained on data.train
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.output import Output
from jaxlm.core import config, disk
from jaxlm.core.errors import ConfigError, NotWritable
from jaxlm.core.quoting import printable
from jaxlm.data.config import TOKENIZER_FILES
from jaxlm.recipes.config import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|show|compare")
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
    compare = actions.add_parser("compare", help="tokens, unknown characters and speed of several")
    compare.add_argument(
        "tokenizers", nargs="+", metavar="FILE|KIND", help="files, or what data.tokenizer takes"
    )
    compare.add_argument(
        "--text", metavar="GLOB", help="files to measure on; none is data.validation"
    )
    show.add_argument("--text", default="def f(x):\n    return x + 1\n", help="what to cut")


def run(args: Any, out: Output) -> int:
    """Does what the action asks."""
    return {"train": _train, "show": _show, "compare": _compare}[args.action](args, out)


def _train(args: Any, out: Output) -> int:
    tokenizer = _of_config(args, out)
    content = tokenizer.serialise()
    fits = _fits(args, None, [(args.out, tokenizer)])
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
        disk.replace(path, content)
    except OSError as error:
        raise NotWritable(
            "the tokenizer cannot be written",
            where=str(path),
            why=str(error.strerror),
            fix="--out=tokenizer-2.model",
        ) from error
    out.result(
        {"file": str(path), "size": tokenizer.size, "sha256": tokenizer.digest}
        | {"fit": fits[0][1].as_json() if fits else None},
        "\n".join(
            [
                f"{path}: {tokenizer.size:,} ids; use it with --config.data.tokenizer={path}",
                *_table(fits),
            ]
        ),
    )
    return 0


def _show(args: Any, out: Output) -> int:
    from jaxlm.data import tokenizer_file
    from jaxlm.data.peek import spelt

    _config(args)  # a wrong setting is told also where the file alone is read
    tokenizer = tokenizer_file.read(args.file) if args.file else _of_config(args, out)
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


def _compare(args: Any, out: Output) -> int:
    named = [(name, _named(name, args, out)) for name in args.tokenizers]
    fits = _fits(args, args.text, named)
    if not fits:
        raise ConfigError(
            "there is no text to compare on",
            where="data.validation",
            why="it is tokens already, or empty",
            fix="name the text to compare on with --text",
        )
    out.result(
        {"tokenizers": [{"tokenizer": name, **fit.as_json()} for name, fit in fits]},
        "\n".join(_table(fits)),
    )
    return 0


def _named(name: str, args: Any, out: Output) -> Any:
    from jaxlm.data import dataset, parts, tokenizer_file
    from jaxlm.data.tokenizer import Bytes

    if name.endswith(TOKENIZER_FILES):
        return tokenizer_file.read(name)
    if name == "bytes":
        return Bytes()
    config = _config(args, ("data.tokenizer", name)).data
    if any(part.folders for part in parts.find(config)[0]):
        raise ConfigError(
            f"{name} cannot be trained",
            where="data.train",
            why="it is tokens already",
            fix="name text files in --config.data.train",
        )
    return dataset.open_tokenizer(config, say=out.say)


def _fits(args: Any, pattern: str | None, named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """How each fits the text; none where there is no text."""
    from jaxlm.data import tokenizer_report

    found = tokenizer_report.texts(_config(args).data, pattern)
    return [(name, tokenizer_report.measure(each, found)) for name, each in named if found]


def _table(fits: list[tuple[str, Any]]) -> list[str]:
    if not fits:
        return []
    width = max(len("tokenizer"), *(len(name) for name, _ in fits))
    head = f"{'tokenizer':<{width}}  {'ids':>7}  {'tokens':>9}  bytes/token  tokens/word  unknown  coverage  lossless    MB/s"
    first = fits[0][1]
    return [
        f"on {first.documents:,} documents, {first.bytes:,} bytes:",
        head,
        *(
            f"{printable(name):<{width}}  {fit.size:>7,}  {fit.tokens:>9,}  {fit.bytes_per_token:>11.3f}  {fit.tokens_per_word:>11.3f}"
            f"  {fit.unknown:>7.2%}  {fit.coverage:>8.3%}  {fit.lossless:>8.1%}  {fit.bytes_per_second / 1e6:>6.2f}"
            for name, fit in fits
        ),
    ]


def _config(args: Any, *more: tuple[str, str]) -> Run:
    overrides = [*args.overrides, *more]
    return config.load(Run, args.config or args.workdir, overrides).value


def _of_config(args: Any, out: Output) -> Any:
    from jaxlm.data import dataset

    return dataset.open_tokenizer(_config(args).data, say=out.say)
