"""Train, show and compare tokenizers.

jaxlm tokenizer train --config=FILE --out=my.model   trains data.tokenizer on data.train
jaxlm tokenizer show --config=FILE --text="a b"      size, and tokens of a text
jaxlm tokenizer show my.model
jaxlm tokenizer compare my.model bpe:8192 bytes      compression of a text; sizes are trained first
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.output import Output, columns
from jaxlm.core import config, disk
from jaxlm.core.errors import ConfigError, NotWritable, cannot_write
from jaxlm.core.quoting import printable
from jaxlm.data.config import TOKENIZER_FILES
from jaxlm.recipes.config import Run


def add_arguments(parser: Parser) -> None:
    train = parser.add_action("train", _train, "train data.tokenizer on data.train and write it")
    doc = "new file; .model for SentencePiece, else .json"
    add_flag(train, "--out", "FILE", str, doc, required=True)
    show = parser.add_action("show", _show, "size of a tokenizer, and tokens of a text")
    show.add_argument("file", nargs="?", help=".model or .json file (tokenizer of the config)")
    show.add_argument("--text", default="def f(x):\n    return x + 1\n", help="text to tokenize")
    doc = "tokens, unknown characters and speed of several"
    compare = parser.add_action("compare", _compare, doc)
    doc = "files, or values of data.tokenizer"
    compare.add_argument("tokenizers", nargs="+", metavar="FILE|KIND", help=doc)
    add_flag(compare, "--text", "GLOB", str, "files to measure on (data.validation)")


def _train(args: Any, out: Output) -> int:
    tokenizer = _of_config(args, out)
    content = tokenizer.serialize()
    fits = _fits(args, None, [(args.out, tokenizer)])
    path = Path(args.out).with_suffix(".json" if content.startswith(b"{") else ".model")
    if path.exists():
        why = "a tokenizer is never overwritten: data made with it would become unreadable"
        fix = shlex.quote(f"--out={path.with_stem(path.stem + '-2')}")
        raise NotWritable("the tokenizer file exists", where=str(path), why=why, fix=fix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(path, content)
    except OSError as error:
        fix = "--out=tokenizer-2.model"
        raise cannot_write("the tokenizer", path, error, fix=fix) from error
    answer = {"file": str(path), "size": tokenizer.size, "sha256": tokenizer.digest}
    answer["fit"] = fits[0][1].as_json() if fits else None
    text = f"{path}: {tokenizer.size:,} ids; use it with --config.data.tokenizer={path}"
    return out.result(answer, [text, *_table(fits)])


def _show(args: Any, out: Output) -> int:
    from jaxlm.data import tokenizer_file
    from jaxlm.data.peek import token_text

    _config(args)  # reports a wrong setting even if only the file is read
    tokenizer = tokenizer_file.read(args.file) if args.file else _of_config(args, out)
    ids = tokenizer.encode(args.text)
    pieces = [token_text([i], tokenizer) for i in ids]
    is_lossless = tokenizer.decode(ids).removeprefix(tokenizer.lead) == args.text
    kind, special = type(tokenizer).__name__, tokenizer.specials
    answer = {"kind": kind, "size": tokenizer.size, "sha256": tokenizer.digest, "special": special}
    answer |= {"ids": ids, "pieces": pieces, "lossless": is_lossless}
    counts = f"{tokenizer.size:,} ids, {len(special)} of them special"
    lines = [
        f"{kind}, {counts}, sha256 {tokenizer.digest[:12]}",
        f"{len(args.text.encode())} bytes in {len(ids)} tokens"
        f"{'' if is_lossless else ', decoded differently'}:",
        " ".join(f"{number}:{piece!r}" for number, piece in zip(ids, pieces, strict=True)),
    ]
    return out.result(answer, lines)


def _compare(args: Any, out: Output) -> int:
    named = [(name, _named(name, args, out)) for name in args.tokenizers]
    fits = _fits(args, args.text, named)
    if not fits:
        why, fix = "it contains tokens, or nothing", "name the text to compare on with --text"
        raise ConfigError("the comparison needs text", where="data.validation", why=why, fix=fix)
    rows = [{"tokenizer": name, **fit.as_json()} for name, fit in fits]
    return out.result({"tokenizers": rows}, _table(fits))


def _named(name: str, args: Any, out: Output) -> Any:
    from jaxlm.data import dataset, parts, tokenizer_file
    from jaxlm.data.tokenizer import Bytes

    if name.endswith(TOKENIZER_FILES):
        return tokenizer_file.read(name)
    if name == "bytes":
        return Bytes()
    config = _config(args, ("data.tokenizer", name)).data
    if any(part.folders for part in parts.find_parts(config)[0]):
        why, fix = "it contains tokens", "name text files in --config.data.train"
        raise ConfigError(f"{name} cannot be trained", where="data.train", why=why, fix=fix)
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
    return config.load(Run, args.config or args.workdir, [*args.overrides, *more]).value


def _of_config(args: Any, out: Output) -> Any:
    from jaxlm.data import dataset

    return dataset.open_tokenizer(_config(args).data, log=out.log)
