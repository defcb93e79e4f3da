"""Train, show and compare tokenizers.

jaxlm tokenizer train --config=FILE --out=my.model   trains data.tokenizer on data.train
jaxlm tokenizer show --config=FILE --text="a b"      size, and tokens of a text
jaxlm tokenizer show my.model
jaxlm tokenizer compare my.model bpe:8192 bytes      compression of a text; sizes are trained first
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import add_flag
from jaxlm.cli.output import Output, columns
from jaxlm.core import config, disk
from jaxlm.core.errors import ConfigError, NotWritable, cannot_write
from jaxlm.core.quoting import printable
from jaxlm.data.config import TOKENIZER_FILES
from jaxlm.recipes.config import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|show|compare")
    train = actions.add_parser("train", help="train data.tokenizer on data.train and write it")
    doc = "new file; .model for SentencePiece, else .json"
    add_flag(train, "--out", "FILE", str, doc, required=True)
    show = actions.add_parser("show", help="size of a tokenizer, and tokens of a text")
    show.add_argument("file", nargs="?", help=".model or .json file (tokenizer of the config)")
    show.add_argument("--text", default="def f(x):\n    return x + 1\n", help="text to tokenize")
    compare = actions.add_parser("compare", help="tokens, unknown characters and speed of several")
    compare.add_argument(
        "tokenizers", nargs="+", metavar="FILE|KIND", help="files, or values of data.tokenizer"
    )
    add_flag(compare, "--text", "GLOB", str, "files to measure on (data.validation)")


def run(args: Any, out: Output) -> int:
    """Run the action."""
    return {"train": _train, "show": _show, "compare": _compare}[args.action](args, out)


def _train(args: Any, out: Output) -> int:
    tokenizer = _of_config(args, out)
    content = tokenizer.serialize()
    fits = _fits(args, None, [(args.out, tokenizer)])
    path = Path(args.out).with_suffix(".json" if content.startswith(b"{") else ".model")
    if path.exists():
        raise NotWritable(
            "the tokenizer file exists",
            where=str(path),
            why="a tokenizer is never overwritten: data made with it would become unreadable",
            fix=f"--out={path.with_stem(path.stem + '-2')}",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(path, content)
    except OSError as error:
        fix = "--out=tokenizer-2.model"
        raise cannot_write("the tokenizer", path, error, fix=fix) from error
    answer = {"file": str(path), "size": tokenizer.size, "sha256": tokenizer.digest}
    answer["fit"] = fits[0][1].as_json() if fits else None
    text = f"{path}: {tokenizer.size:,} ids; use it with --config.data.tokenizer={path}"
    out.result(answer, "\n".join([text, *_table(fits)]))
    return 0


def _show(args: Any, out: Output) -> int:
    from jaxlm.data import tokenizer_file
    from jaxlm.data.peek import token_text

    _config(args)  # reports a wrong setting even if only the file is read
    tokenizer = tokenizer_file.read(args.file) if args.file else _of_config(args, out)
    ids = tokenizer.encode(args.text)
    pieces = [token_text([i], tokenizer) for i in ids]
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
        f"{answer['kind']}, {tokenizer.size:,} ids, {len(tokenizer.specials)} of them special, "
        f"sha256 {tokenizer.digest[:12]}",
        f"{len(args.text.encode())} bytes in {len(ids)} tokens"
        f"{'' if answer['lossless'] else ', decoded differently'}:",
        " ".join(f"{number}:{piece!r}" for number, piece in zip(ids, pieces, strict=True)),
    ]
    out.result(answer, "\n".join(lines))
    return 0


def _compare(args: Any, out: Output) -> int:
    named = [(name, _named(name, args, out)) for name in args.tokenizers]
    fits = _fits(args, args.text, named)
    if not fits:
        raise ConfigError(
            "the comparison needs text",
            where="data.validation",
            why="it contains tokens, or nothing",
            fix="name the text to compare on with --text",
        )
    rows = [{"tokenizer": name, **fit.as_json()} for name, fit in fits]
    out.result({"tokenizers": rows}, "\n".join(_table(fits)))
    return 0


def _named(name: str, args: Any, out: Output) -> Any:
    from jaxlm.data import dataset, parts, tokenizer_file
    from jaxlm.data.tokenizer import Bytes

    if name.endswith(TOKENIZER_FILES):
        return tokenizer_file.read(name)
    if name == "bytes":
        return Bytes()
    config = _config(args, ("data.tokenizer", name)).data
    if any(part.folders for part in parts.find_parts(config)[0]):
        raise ConfigError(
            f"{name} cannot be trained",
            where="data.train",
            why="it contains tokens",
            fix="name text files in --config.data.train",
        )
    return dataset.open_tokenizer(config, log=out.log)


def _fits(args: Any, pattern: str | None, named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the measurements of each tokenizer on the text; empty without text."""
    from jaxlm.data import tokenizer_report

    texts = tokenizer_report.sample_texts(_config(args).data, pattern)
    return [(name, tokenizer_report.measure(each, texts)) for name, each in named if texts]


def _table(fits: list[tuple[str, Any]]) -> list[str]:
    if not fits:
        return []
    head = "tokenizer,ids,tokens,bytes/token,tokens/word,unknown,coverage,lossless,MB/s"
    rows = [head.split(",")]
    for name, fit in fits:
        means = [f"{value:.3f}" for value in (fit.bytes_per_token, fit.tokens_per_word)]
        shares = [f"{fit.unknown:.2%}", f"{fit.coverage:.3%}", f"{fit.lossless:.1%}"]
        speed = f"{fit.bytes_per_second / 1e6:.2f}"
        rows.append([printable(name), f"{fit.size:,}", f"{fit.tokens:,}", *means, *shares, speed])
    first = fits[0][1]
    text = f"on {first.documents:,} documents, {first.bytes:,} bytes:"
    return [text, *columns(rows, "<")]


def _config(args: Any, *more: tuple[str, str]) -> Run:
    overrides = [*args.overrides, *more]
    return config.load(Run, args.config or args.workdir, overrides).value


def _of_config(args: Any, out: Output) -> Any:
    from jaxlm.data import dataset

    return dataset.open_tokenizer(_config(args).data, log=out.log)
