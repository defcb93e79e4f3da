"""Cleans text, looks at data, and makes token shards of it.

jaxlm data peek --config=FILE               examples as the model sees them, trained tokens marked
jaxlm data stats --config=FILE              documents, tokens, rows, and what was left out
jaxlm data tokenize --config=FILE --out=DIR writes DIR/train and a folder for each validation set
jaxlm data check DIR                        reads every byte of token shards and compares digests
jaxlm data run --config=RECIPE --out=DIR    cleans raw files: kept, removed with reasons, and the funnel
jaxlm data clusters DIR                     duplicates that `data run` found, side by side
jaxlm data mix --config.sources=web=DIR,code=DIR --out=DIR   token shards of cleaned folders, with a data card
jaxlm data train-classifier --examples=LABEL=GLOB ... --out=DIR   tells kinds of text apart, for the stage quality
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli import data_classifier, data_clusters, data_mix, data_run
from jaxlm.cli.arguments import train_next, withhold
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.quoting import cut
from jaxlm.recipes.config import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions."""
    actions = parser.add_subparsers(
        dest="action",
        required=True,
        metavar="peek|stats|tokenize|check|run|clusters|mix|train-classifier",
    )
    peek = actions.add_parser("peek", help="examples as the model sees them, trained tokens marked")
    peek.add_argument("--rows", type=int, default=2, help="rows to show (2)")
    peek.add_argument("--step", type=int, default=0, help="of the batch at this step (0)")
    actions.add_parser("stats", help="documents, tokens, rows, and what was left out")
    tokenize = actions.add_parser(
        "tokenize", help="write token shards of data.train and data.validation"
    )
    tokenize.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    check = actions.add_parser(
        "check", help="compare token shards with the digests in their manifest"
    )
    withhold(check, "--config", "--config.a.b", why="it goes by the manifest of the folder")
    check.add_argument("folder", metavar="DIR", help="a folder with a manifest.json")
    data_run.add_arguments(
        actions.add_parser("run", help="clean raw files by a recipe; the same folder goes on")
    )
    data_classifier.add_arguments(
        actions.add_parser("train-classifier", help="train a classifier of text on examples")
    )
    data_clusters.add_arguments(
        actions.add_parser("clusters", help="show the duplicates that a run found")
    )
    data_mix.add_arguments(
        actions.add_parser("mix", help="write token shards of cleaned folders, and a data card")
    )


def run(args: Any, out: Output) -> int:
    """Does what the action asks."""
    return {
        "peek": _peek,
        "stats": _stats,
        "tokenize": _tokenize,
        "check": _check,
        "run": data_run.run,
        "clusters": data_clusters.run,
        "mix": data_mix.run,
        "train-classifier": data_classifier.run,
    }[args.action](args, out)


def _peek(args: Any, out: Output) -> int:
    from jaxlm.data.mixture import Mixture
    from jaxlm.data.peek import BOTH_WAYS, rendered
    from jaxlm.objectives.loss import mtp_views

    chosen, data = _open(args, out)
    batch = chosen.pace
    rows = min(args.rows, batch.phase(args.step).rows)
    tokens = data.train.at(args.step, batch=batch, rows=slice(0, rows))
    origins = data.train.origins(args.step, batch=batch)
    mixture = data.train if isinstance(data.train, Mixture) else None
    first = batch.rows(args.step)
    answer, lines = [], ["text between \u00ab and \u00bb is trained on"]
    if tokens.visible_until is not None:
        lines.append(f"text between {' and '.join(BOTH_WAYS)} is read both ways")
    mtp = chosen.objective.mtp_settings
    further = mtp_views(tokens, len(mtp.weights)) if mtp else []
    shown = {"text": tokens} | {f"ahead_{k}": view for k, view in enumerate(further, 2)}
    if mtp:
        lines.append(
            "ahead_2 is what the head for the token after the next is trained on, and so on"
        )
    for row in range(rows):
        texts = {
            name: rendered(view, data.tokenizer, row)
            for name, view in shown.items()
            if view is tokens or view.weights[row].any()
        }
        segments = [
            dict(zip(texts, each, strict=True)) for each in zip(*texts.values(), strict=True)
        ]
        sources = [f"{file}, record {record}" for file, record in origins[row]]
        if mixture is not None:
            name = mixture.source(mixture.keys(first + row, first + row + 1)[0])
            sources = [f"{name}, {source}" for source in sources]
        answer.append(
            [{"source": source} | each for source, each in zip(sources, segments, strict=True)]
        )
        for number, (source, each) in enumerate(zip(sources, segments, strict=True), 1):
            # A person is shown the start of a long text; --json gives all of it.
            lines.append(f"--- step {args.step}, row {row}, segment {number}: {cut(source)}")
            lines += [
                cut(text) if name == "text" else f"{name}: {cut(text)}"
                for name, text in each.items()
            ]
    out.result({"step": args.step, "rows": answer}, "\n".join(lines))
    return 0


def _stats(args: Any, out: Output) -> int:
    from jaxlm.data.mixture import Mixture

    chosen, data = _open(args, out)
    sources, told = {}, []
    if isinstance(data.train, Mixture):
        sources = {
            f"train/{name}": loader
            for name, loader in zip(data.train.names, data.train.sources, strict=True)
        }
        told = [f"mixture     {line}" for line in data.train.told(chosen.pace, chosen.train.steps)]
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
    lines += told
    lines.append(f"tokenizer   {data.tokenizer.size:,} ids, sha256 {data.tokenizer.digest[:12]}")
    out.result(
        {
            "tokenizer": {"size": data.tokenizer.size, "sha256": data.tokenizer.digest},
            "parts": answer,
        },
        "\n".join(lines),
    )
    return 0


def _described(loader: Any) -> dict[str, Any]:
    manifest = loader.shards.manifest
    slots = loader.plan.rows * loader.sequence
    return {
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
        "bytes_per_token": manifest.bytes / max(1, manifest.tokens - 2 * manifest.documents),
        "rows": loader.plan.rows,
        "padding": 1 - (manifest.tokens - manifest.documents) / slots,
        "left_out": manifest.left_out,
    }


def _tokenize(args: Any, out: Output) -> int:
    from jaxlm.data import dataset

    section = config.load(Run, args.config or args.workdir, args.overrides).value.data
    with progress_bars(out) as progress:
        written = dataset.tokenise(section, Path(args.out), out.say, progress)
    answer: dict[str, dict[str, Any]] = {
        name: {
            "folder": str(shards.folder),
            "documents": shards.documents,
            "tokens": shards.manifest.tokens,
        }
        for name, shards in written.items()
    }
    lines = [
        f"{part['folder']}: {part['documents']:,} documents, {part['tokens']:,} tokens"
        for part in answer.values()
    ]
    named = {name: f"{name.rpartition('/')[2]}={part['folder']}" for name, part in answer.items()}
    train = [text for name, text in named.items() if name.startswith("train/")]
    validation = [text for name, text in named.items() if name.partition("/")[0] != "train"]
    sources = ",".join(train) or answer["train"]["folder"]
    first = next(iter(answer.values()))["folder"]
    file = args.config or (args.workdir and f"{args.workdir}/config.json")
    # The tokenizer is that of the shards, whatever the config would train.
    lines.append(
        train_next(
            args.out,
            dict(args.overrides)
            | {"data.train": sources, "data.validation": ",".join(validation)}
            | {"data.tokenizer": f"{first}/tokenizer"},
            file,
        )
    )
    out.result(answer, "\n".join(lines))
    return 0


def _check(args: Any, out: Output) -> int:
    from jaxlm.data.shards import Shards

    shards = Shards.open(Path(args.folder))
    shards.verify()
    manifest = shards.manifest
    out.result(
        {"whole": True, "documents": manifest.documents, "tokens": manifest.tokens},
        f"whole: {manifest.documents:,} documents, {manifest.tokens:,} tokens, every digest right",
    )
    return 0


def _open(args: Any, out: Output) -> tuple[Run, Any]:
    from jaxlm.recipes import setup

    chosen = config.load(Run, args.config or args.workdir, args.overrides).value
    with progress_bars(out) as progress:
        return chosen, setup.open_data(chosen, say=out.say, warn=out.say, progress=progress)
