"""Clean text, inspect data, and write token shards.

jaxlm data peek --config=FILE               examples as the model sees them, targets marked
jaxlm data stats --config=FILE              documents, tokens, rows, skipped documents
jaxlm data tokenize --config=FILE --out=DIR writes DIR/train and a folder per validation set
jaxlm data check DIR                        verifies the digests of token shards
jaxlm data run --config=RECIPE --out=DIR    cleans raw files; kept, removed with reasons, funnel
jaxlm data clusters DIR                     duplicates that `data run` removed, side by side
jaxlm data mix --config.sources=web=DIR,code=DIR --out=DIR       token shards and a data card
jaxlm data train-classifier --examples=LABEL=GLOB ... --out=DIR  classifier for the stage quality
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import add_flag, train_next, withhold
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.data import classifier, corpus
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.quoting import cut
from jaxlm.recipes.config import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = parser.add_subparsers(
        dest="action",
        required=True,
        metavar="peek|stats|tokenize|check|run|clusters|mix|train-classifier",
    )
    peek = actions.add_parser("peek", help="examples as the model sees them, targets marked")
    add_flag(peek, "--rows", "N", 2, "number of rows")
    add_flag(peek, "--step", "N", 0, "step of the batch")
    actions.add_parser("stats", help="documents, tokens, rows, skipped documents")
    doc = "write token shards of data.train and data.validation"
    tokenize = actions.add_parser("tokenize", help=doc)
    add_flag(tokenize, "--out", "DIR", str, "new folder", required=True)
    check = actions.add_parser("check", help="compare token shards with the manifest's digests")
    withhold(check, "shards are compared with the manifest of their folder")
    check.add_argument("folder", metavar="DIR", help="folder with a manifest.json")
    doc = "clean raw files by a recipe; the same folder resumes"
    corpus.add_run(actions.add_parser("run", help=doc))
    doc = "train a text classifier on examples"
    classifier.add_arguments(actions.add_parser("train-classifier", help=doc))
    corpus.add_clusters(actions.add_parser("clusters", help="show duplicates that a run removed"))
    doc = "write token shards of cleaned folders, and a data card"
    corpus.add_mix(actions.add_parser("mix", help=doc))


def run(args: Any, out: Output) -> int:
    """Run the action."""
    return {
        "peek": _peek,
        "stats": _stats,
        "tokenize": _tokenize,
        "check": _check,
        "run": corpus.run,
        "clusters": corpus.clusters,
        "mix": corpus.mix,
        "train-classifier": classifier.run,
    }[args.action](args, out)


def _peek(args: Any, out: Output) -> int:
    from jaxlm.data.mixture import MixtureLoader
    from jaxlm.data.peek import BOTH_WAYS, render_segments
    from jaxlm.objectives.loss import mtp_views

    chosen, data = _open(args, out)
    batch = chosen.pace
    rows = min(args.rows, batch.phase(args.step).rows)
    tokens = data.train.at(args.step, batch=batch, rows=slice(0, rows))
    origins = data.train.origins(args.step, batch=batch)
    mixture = data.train if isinstance(data.train, MixtureLoader) else None
    first = batch.rows(args.step)
    answer, lines = [], ["text between \u00ab and \u00bb has training targets"]
    if tokens.visible_until is not None:
        lines.append(f"text between {' and '.join(BOTH_WAYS)} has bidirectional attention")
    mtp = chosen.objective.mtp_settings
    further = mtp_views(tokens, len(mtp.weights)) if mtp else []
    shown = {"text": tokens} | {f"ahead_{k}": view for k, view in enumerate(further, 2)}
    if mtp:
        lines.append("ahead_2 shows the targets of the head for the token after the next, etc.")
    for row in range(rows):
        texts = {
            name: render_segments(view, data.tokenizer, row)
            for name, view in shown.items()
            if view is tokens or view.weights[row].any()
        }
        columns = zip(*texts.values(), strict=True)
        segments = [dict(zip(texts, each, strict=True)) for each in columns]
        sources = [f"{file}, record {record}" for file, record in origins[row]]
        if mixture is not None:
            name = mixture.source(mixture.keys(first + row, first + row + 1)[0])
            sources = [f"{name}, {source}" for source in sources]
        pairs = list(zip(sources, segments, strict=True))
        answer.append([{"source": source} | each for source, each in pairs])
        for number, (source, each) in enumerate(pairs, 1):
            # Only the start of a long text is printed; --json has all of it.
            lines.append(f"--- step {args.step}, row {row}, segment {number}: {cut(source)}")
            lines += [
                cut(text) if name == "text" else f"{name}: {cut(text)}"
                for name, text in each.items()
            ]
    out.result({"step": args.step, "rows": answer}, "\n".join(lines))
    return 0


def _stats(args: Any, out: Output) -> int:
    from jaxlm.data.mixture import MixtureLoader

    chosen, data = _open(args, out)
    sources, mixture = {}, []
    if isinstance(data.train, MixtureLoader):
        pairs = zip(data.train.names, data.train.sources, strict=True)
        sources = {f"train/{name}": loader for name, loader in pairs}
        shares = data.train.describe(chosen.pace, chosen.train.steps)
        mixture = [f"mixture     {line}" for line in shares]
    parts = {"train": data.train, **sources, **data.validation}
    answer = {name: _described(loader) for name, loader in parts.items()}
    for name, seen in (data.train.seen(chosen.rows) if sources else {}).items():
        answer[f"train/{name}"] |= seen
    columns = ("documents", "tokens", "bytes", "bytes_per_token", "rows", "padding")
    lines = [f"{'':<12}" + "".join(f"{column:>16}" for column in columns)]
    for name, row in answer.items():
        cells = (f"{row[c]:,.3f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in columns)
        lines.append(f"{name:<12}" + "".join(f"{cell:>16}" for cell in cells))
        lines += [f"{'':<12}{count:,} {reason}" for reason, count in row["left_out"].items()]
    lines += mixture
    lines.append(f"tokenizer   {data.tokenizer.size:,} ids, sha256 {data.tokenizer.digest[:12]}")
    tokenizer = {"size": data.tokenizer.size, "sha256": data.tokenizer.digest}
    out.result({"tokenizer": tokenizer, "parts": answer}, "\n".join(lines))
    return 0


def _described(loader: Any) -> dict[str, Any]:
    manifest = loader.shards.manifest
    slots = loader.plan.rows * loader.sequence
    return {
        **{name: getattr(manifest, name) for name in ("documents", "tokens", "bytes")},
        "bytes_per_token": manifest.bytes / max(1, manifest.tokens - 2 * manifest.documents),
        "rows": loader.plan.rows,
        "padding": 1 - (manifest.tokens - manifest.documents) / slots,
        "left_out": manifest.left_out,
    }


def _tokenize(args: Any, out: Output) -> int:
    from jaxlm.data import dataset

    section = config.load(Run, args.config or args.workdir, args.overrides).value.data
    with progress_bars(out) as progress:
        written = dataset.tokenize(section, Path(args.out), out.log, progress)
    answer: dict[str, dict[str, Any]] = {}
    for name, shards in written.items():
        counts = {"documents": shards.documents, "tokens": shards.manifest.tokens}
        answer[name] = {"folder": str(shards.folder), **counts}
    lines = [
        f"{part['folder']}: {part['documents']:,} documents, {part['tokens']:,} tokens"
        for part in answer.values()
    ]
    named = {name: f"{name.rpartition('/')[2]}={part['folder']}" for name, part in answer.items()}
    train = [text for name, text in named.items() if name.startswith("train/")]
    validation = [text for name, text in named.items() if name.partition("/")[0] != "train"]
    data = dict(args.overrides) | {
        "data.train": ",".join(train) or answer["train"]["folder"],
        "data.validation": ",".join(validation),
        # The tokenizer of the shards replaces the one of the config.
        "data.tokenizer": f"{next(iter(answer.values()))['folder']}/tokenizer",
    }
    file = args.config or (args.workdir and f"{args.workdir}/config.json")
    lines.append(train_next(args.out, data, file))
    out.result(answer, "\n".join(lines))
    return 0


def _check(args: Any, out: Output) -> int:
    from jaxlm.data.shards import TokenShards

    shards = TokenShards.open(Path(args.folder))
    shards.verify()
    manifest = shards.manifest
    out.result(
        {"whole": True, "documents": manifest.documents, "tokens": manifest.tokens},
        f"whole: {manifest.documents:,} documents, {manifest.tokens:,} tokens, all digests match",
    )
    return 0


def _open(args: Any, out: Output) -> tuple[Run, Any]:
    from jaxlm.recipes import setup

    chosen = config.load(Run, args.config or args.workdir, args.overrides).value
    with progress_bars(out) as progress:
        return chosen, setup.open_data(chosen, say=out.log, warn=out.log, progress=progress)
