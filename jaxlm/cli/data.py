"""Clean text, inspect data, and write token shards.

jaxlm data peek --config=FILE                examples as the model sees them, targets marked
jaxlm data stats --config=FILE               documents, tokens, rows, skipped documents
jaxlm data tokenize --config=FILE --out=DIR  writes DIR/train and a folder per validation set
jaxlm data check DIR                         verifies the digests of token shards
jaxlm data run --config=RECIPE --out=DIR     cleans raw files; kept, removed with reasons, funnel
jaxlm data clusters DIR                      duplicates that `data run` removed, side by side
jaxlm data mix --config.sources=web=DIR,code=DIR --out=DIR       token shards and a data card
jaxlm data train-classifier --examples=LABEL=GLOB --out=DIR      classifier for the stage quality
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli import arguments
from jaxlm.cli.arguments import Parser, add_flag, read_share, selection, train_next
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.init_from import add_init_from, with_init_from
from jaxlm.cli.output import Output, columns
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.core.quoting import cut, printable
from jaxlm.recipes.config import Run

CLASSIFIER = "jaxlm data train-classifier"
INIT_FROM = "tokenizer and chat template are"  # used by `--init_from`


def add_arguments(parser: Parser) -> None:
    peek = parser.add_action("peek", _peek, "examples as the model sees them, targets marked")
    add_init_from(peek, INIT_FROM)
    add_flag(peek, "--rows", "N", 2, "number of rows", least=1)
    add_flag(peek, "--step", "N", 0, "step of the batch", least=0)
    stats = parser.add_action("stats", _stats, "documents, tokens, rows, skipped documents")
    add_init_from(stats, INIT_FROM)
    doc = "write token shards of data.train and data.validation"
    tokenize = parser.add_action("tokenize", _tokenize, doc)
    add_init_from(tokenize, INIT_FROM)
    add_flag(tokenize, "--out", "DIR", str, "new folder", required=True)
    check = parser.add_action("check", _check, "compare token shards with the manifest's digests")
    check.withhold("shards are compared with the manifest of their folder")
    check.add_argument("folder", metavar="DIR", help="folder with a manifest.json")

    doc = "clean raw files by a recipe; the same folder resumes"
    clean = parser.add_action("run", _clean, doc)
    clean.set_defaults(schema="jaxlm.corpus.config:Recipe")
    add_engine(clean)
    doc = "URL to copy the output to, such as s3://bucket/clean"
    add_flag(clean, "--copy_to", "URL", str, doc)
    doc = "share of the records, such as 1%% for a preview"
    add_flag(clean, "--sample", "SHARE", "100%", doc)
    clusters = parser.add_action("clusters", _clusters, "show duplicates that a run removed")
    clusters.withhold("clusters are shown as the recipe of the folder produced them")
    clusters.add_argument("folder", metavar="DIR", help="--out of a finished run")
    add_flag(clusters, "--kind", ["all", "exact", "near"], "all", "kind of duplicates")
    add_flag(clusters, "--most", "N", 10, "number of clusters, the largest first", least=1)
    add_flag(clusters, "--characters", "N", 200, "characters of each text", least=1)
    mix = parser.add_action("mix", _mix, "write token shards of cleaned folders, and a data card")
    mix.set_defaults(schema="jaxlm.corpus.mix.config:Mix")
    add_engine(mix)

    train = parser.add_action("train-classifier", _train, "train a text classifier on examples")
    train.withhold("the flags of train-classifier are all its settings")
    doc = "files of a label, of any kind that `data run` reads; repeatable"
    add_flag(train, "--examples", "LABEL=GLOB", [], doc)
    add_flag(train, "--out", "DIR", str, "new folder", required=True)
    add_flag(train, "--text_key", "NAME", "text", "field that contains the text")
    add_flag(train, "--held_out", "SHARE", "10%", "share of examples for evaluation")
    add_flag(train, "--epochs", "N", 5, "passes over the examples", least=1)
    add_flag(train, "--run", "N", 2, "words of the longest n-gram", least=1)
    add_flag(train, "--buckets", "N", 2**18, "hash buckets of the n-grams", least=1)
    add_flag(train, "--seed", "N", 0, "seed of the order of examples")


def add_engine(parser: Parser) -> None:
    """Add the flags of `data run` and `data mix`: output folder, workers and engine."""
    add_flag(parser, "--out", "DIR", str, "new folder, or one to resume", required=True)
    add_flag(
        parser, "--workers", "N", 1, "number of processes; does not change the output", least=1
    )
    doc = "processes of this machine, or a Ray cluster that shares the folders; the same output"
    add_flag(parser, "--engine", ["processes", "ray"], "processes", doc)


def _peek(args: Any, out: Output) -> int:
    from jaxlm.data import formats
    from jaxlm.data.mixture import MixtureLoader
    from jaxlm.data.peek import BOTH_WAYS, render_segments
    from jaxlm.objectives.loss import mtp_views

    chosen, data = _open(args, out)
    if data.train.shards.prompts:
        return _peek_prompts(args, out, chosen, data)
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
        segments = [
            dict(zip(texts, each, strict=True)) for each in zip(*texts.values(), strict=True)
        ]
        sources = [formats.place(*origin) for origin in origins[row]]
        if mixture is not None:
            name = mixture.source(mixture.keys(first + row, first + row + 1)[0])
            sources = [f"{name}, {source}" for source in sources]
        if tokens.answers is not None:
            sides = tokens.answers.sides[row].tolist()
            names = {1.0: "chosen", -1.0: "rejected"}
            judged = zip(sources, sides, strict=False)
            sources = [f"{names.get(side, 'unread')}, {source}" for source, side in judged]
        pairs = list(zip(sources, segments, strict=True))
        answer.append([{"source": source} | each for source, each in pairs])
        for number, (source, each) in enumerate(pairs, 1):
            # Only the start of a long text is printed; --json has all of it.
            lines.append(f"--- step {args.step}, row {row}, segment {number}: {cut(source)}")
            named = ((f"{name}: " if name != "text" else "", text) for name, text in each.items())
            lines += [f"{label}{cut(text)}" for label, text in named]
    return out.result({"step": args.step, "rows": answer}, lines)


def _peek_prompts(args: Any, out: Output, chosen: Run, data: Any) -> int:
    from jaxlm.data import formats
    from jaxlm.data.mixture import MixtureLoader
    from jaxlm.data.peek import token_text
    from jaxlm.rl.scoring import prompt_ids

    numbers = chosen.rl.prompts_at(args.step, chosen.train.batch)[: args.rows]
    answer, lines = [], ["prompts, whose answers the model samples"]
    for number, document in zip(
        numbers, data.train.documents(numbers.start, numbers.stop), strict=True
    ):
        source = formats.place(*data.train.shards.origin(document))
        if isinstance(data.train, MixtureLoader):
            source = f"{data.train.source_of(document)}, {source}"
        text = token_text(prompt_ids(data.train, document).tolist(), data.tokenizer)
        answer.append({"source": source, "text": text})
        lines += [f"--- step {args.step}, prompt {number}: {cut(source)}", cut(text)]
    return out.result({"step": args.step, "prompts": answer}, lines)


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
    names = ("documents", "tokens", "bytes", "bytes_per_token", "rows", "padding")
    lines = [f"{'':<12}" + "".join(f"{name:>16}" for name in names)]
    for part, row in answer.items():
        cells = (f"{row[c]:,.3f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in names)
        lines.append(f"{part:<12}" + "".join(f"{cell:>16}" for cell in cells))
        manifest = parts[part].shards.manifest
        lines += [f"{'':<12}{manifest.counted(reason)}" for reason in row["left_out"]]
        if chat := row.get("chat"):
            lines.append(
                f"{'':<12}{chat['trained_tokens']:,} trained tokens, {chat['trained_share']:.1%} "
                f"of all, in {chat['trained_turns']:,} of {chat['turns']:,} turns; the longest "
                f"conversation has {chat['longest']:,} tokens"
            )
            if "chosen" in chat or "rejected" in chat:
                sides = (
                    f"{chat.get(side, 0):,} {side}, {chat.get(f'{side}_tokens', 0):,} tokens"
                    for side in ("chosen", "rejected")
                )
                lines.append(f"{'':<12}answers: {'; '.join(sides)}")
            if "right" in chat or "wrong" in chat:
                counts = (f"{chat.get(side, 0):,} {side}" for side in ("right", "wrong"))
                lines.append(f"{'':<12}steps: {', '.join(counts)}")
            if count := chat["answers_in_prompt_token"]:
                lines.append(f"{'':<12}{count:,} answers start inside a token of their prompt")
            if count := chat.get("turns_cut"):
                lines.append(f"{'':<12}{count:,} first turns of longer conversations left out")
    tokenizer = {"size": data.tokenizer.size, "sha256": data.tokenizer.digest}
    lines += [*mixture, _tokenizer_line(tokenizer)]
    return out.result({"tokenizer": tokenizer, "parts": answer}, lines)


def _described(loader: Any) -> dict[str, Any]:
    manifest = loader.shards.manifest
    slots = loader.plan.rows * loader.sequence
    chat = manifest.figures and {
        "chat": manifest.figures | {"trained_share": manifest.trained / manifest.tokens}
    }
    return {
        **{name: getattr(manifest, name) for name in ("documents", "tokens", "bytes")},
        "bytes_per_token": manifest.bytes / max(1, manifest.tokens - 2 * manifest.documents),
        "rows": loader.plan.rows,
        "padding": 1 - (manifest.tokens - manifest.documents) / slots,
        "left_out": manifest.left_out,
        "first_left_out": manifest.first_left_out,
        **chat,
    }


def _tokenizer_line(tokenizer: dict[str, Any]) -> str:
    return f"tokenizer   {tokenizer['size']:,} ids, sha256 {tokenizer['sha256'][:12]}"


def _tokenize(args: Any, out: Output) -> int:
    from jaxlm.data import dataset

    section = _config(args, out).data
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
    return out.result(answer, [*lines, train_next(args.out, data, file)])


def _check(args: Any, out: Output) -> int:
    from jaxlm.data.shards import TokenShards

    shards = TokenShards.open(Path(args.folder))
    shards.verify()
    documents, tokens = shards.manifest.documents, shards.manifest.tokens
    answer = {"whole": True, "documents": documents, "tokens": tokens}
    text = f"whole: {documents:,} documents, {tokens:,} tokens, all digests match"
    return out.result(answer, text)


def _config(args: Any, out: Output) -> Run:
    """Return the config that `jaxlm train` would have with these flags."""
    loaded = config.load(Run, args.config or args.workdir, args.overrides)
    return with_init_from(loaded, args, out).value


def _open(args: Any, out: Output) -> tuple[Run, Any]:
    from jaxlm.recipes import setup

    chosen = _config(args, out)
    with progress_bars(out) as progress:
        return chosen, setup.open_data(chosen, say=out.log, warn=out.log, progress=progress)


def _clean(args: Any, out: Output) -> int:
    """Run a recipe and show its funnel."""
    from jaxlm.corpus.config import Recipe
    from jaxlm.corpus.mix import after
    from jaxlm.corpus.report import nothing_kept, table
    from jaxlm.corpus.run import run as prepare

    file = arguments.needed_config(args, Recipe, "data")
    recipe: Recipe = config.load(Recipe, file, args.overrides).value
    after.check(recipe)
    if args.copy_to:
        from jaxlm.data import stores

        stores.open_store(args.copy_to)  # errors of the store are raised before hours of work
    scorer: Any = None
    if "perplexity" in recipe.stages:
        from jaxlm.recipes.use import evaluate

        scorer = evaluate.scorer
    sample = read_share(args.sample, 1.0, "--sample", "jaxlm data run")
    folder, shards = Path(args.out), {}
    with progress_bars(out) as progress:
        work = selection(args, "workers", "engine") | {"progress": progress}
        outcome = prepare(recipe, folder, sample=sample, scorer=scorer, log=out.log, **work)
        if recipe.shards.tokenizer:
            shards = after.write(recipe, folder, outcome.report, log=out.log, **work)
    if args.copy_to:
        from jaxlm.corpus.upload import copy_to

        count = copy_to(folder, list(outcome.report["files"]), args.copy_to)
        out.log(f"{count:,} files copied to {args.copy_to}" if count else "the copy is complete")
    megabytes = outcome.bytes / 1e6
    speed = {
        "seconds": outcome.seconds,
        "bytes": outcome.bytes,
        "core_seconds": outcome.stage_seconds,
        "megabytes_per_second": megabytes / outcome.seconds,
    }
    lines = [table(outcome.report)]
    if outcome.bytes:
        core = sum(outcome.stage_seconds.values())
        parts = ", ".join(f"{name} {spent:.1f}" for name, spent in outcome.stage_seconds.items())
        files = f"{megabytes:,.1f} MB of files in {outcome.seconds:,.1f} s"
        lines.append(f"{files}; core seconds: {core:.1f} ({parts})")
    lines.append(f"report: {args.out}/report.html")
    answer = {name: value for name, value in outcome.report.items() if name != "files"}
    if shards:
        lines += _mixed(shards, f"{args.out}/{after.SHARDS}")
        answer[after.SHARDS] = shards
    elif not outcome.report["kept"]:
        lines.append(nothing_kept(outcome.report, folder, recipe.text_key))
    else:
        data = {"data.train": f"{args.out}/kept/*.jsonl", "data.validation": "5%"}
        lines.append(train_next(args.out, data))
    return out.result({"out": args.out, **answer, "speed": speed}, lines)


def _mix(args: Any, out: Output) -> int:
    """Write token shards of cleaned corpora."""
    from jaxlm.corpus.mix.config import Mix
    from jaxlm.corpus.mix.run import run as mix_sources

    sources = config.load(Mix, args.config, args.overrides).value
    with progress_bars(out) as progress:
        work = selection(args, "workers", "engine")
        answer = mix_sources(sources, Path(args.out), log=out.log, progress=progress, **work)
    return out.result({"out": args.out, **answer}, _mixed(answer, args.out))


def _mixed(answer: dict[str, Any], folder: str) -> list[str]:
    """Return the table of a mix's sets, the path of its card, and the command to train on it."""
    rows = [("set", "source", "documents", "tokens", "share")]
    rows += [
        (side, name, f"{each['documents']:,}", f"{each['tokens']:,}", f"{each['share']:.1%}")
        for side, sets in answer["sets"].items()
        for name, each in sets.items()
    ]
    lines = columns(rows, "<<")
    lines += [_tokenizer_line(answer["tokenizer"]), f"data card   {folder}/CARD.md"]
    train = [f"{folder}/train/{name}" for name in answer["sets"]["train"]]
    validation = answer["sets"].get("validation", {})
    data = {
        "data.train": ",".join(train),
        "data.validation": ",".join(f"{name}={folder}/validation/{name}" for name in validation),
        "data.tokenizer": f"{train[0]}/tokenizer",
    }
    return [*lines, train_next(folder, data)]


def _clusters(args: Any, out: Output) -> int:
    """Show clusters of duplicates with the beginnings of their texts."""
    from jaxlm.corpus import comparison as duplicates

    folder = Path(args.folder)
    every = duplicates.clusters(folder, args.kind)
    shown = duplicates.with_texts(folder, every[: args.most])
    documents = sum(len(cluster["removed"]) for cluster in every)
    lines = [f"{len(every):,} clusters, {documents:,} documents removed as duplicates"]
    for number, cluster in enumerate(shown, 1):
        lines.append(f"--- {number}: {cluster['kind']}, {len(cluster['removed'])} removed")
        rows = [("kept", cluster["kept"]), *(("gone", row) for row in cluster["removed"])]
        for fate, row in rows:
            row["text"] = row["text"][: args.characters]
            near = f", agreement {row['agreement']:g}" if "agreement" in row else ""
            text = " ".join(printable(row["text"]).split())
            lines.append(f"{fate}  {printable(row['file'])}, record {row['record']}{near}: {text}")
    return out.result({"clusters": len(every), "removed": documents, "shown": shown}, lines)


def _train(args: Any, out: Output) -> int:
    """Train a classifier, and show its precision and recall on held-out examples."""
    held_out = read_share(args.held_out, 0.5, "--held_out", CLASSIFIER)
    examples = _examples(args.examples)

    from jaxlm.corpus.filters.linear import Features
    from jaxlm.recipes.train_classifier import ClassifierOptions, train

    features = Features(buckets=args.buckets, run=args.run)
    flags = selection(args, "text_key", "epochs", "seed") | {"held_out": held_out}
    options = ClassifierOptions(examples=examples, out=Path(args.out), features=features, **flags)
    answer = train(options, out.log)
    return out.result({"out": args.out, **answer}, _classified(args.out, answer))


def _classified(folder: str, answer: dict[str, Any]) -> list[str]:
    def percents(figures: dict[str, float | None]) -> list[str]:
        shares = (figures["precision"], figures["recall"])
        return ["-" if share is None else f"{share:.2%}" for share in shares]

    rows = [["label", "examples", "held out", "precision", "recall"]]
    for label, figures in answer["labels"].items():
        counts = [f"{answer[name][label]:,}" for name in ("examples", "held_out")]
        rows.append([label, *counts, *percents(figures)])
    first, figures = next(iter(answer["labels"].items()))
    thresholds = figures["thresholds"].items()
    rows += [[f"{first} from {share}", "", "", *percents(pair)] for share, pair in thresholds]
    return [
        *columns(rows, "<"),
        *(f"{count:,} {what}" for what, count in answer["left_out"].items()),
        f"accuracy on held-out examples: {answer['accuracy']:.2%}",
        "next: --config.stages=normalize,length,quality "
        f"--config.quality.model={shlex.quote(str(folder))} "
        f"--config.quality.label={shlex.quote(first)}    # of jaxlm data run",
    ]


def _examples(flags: list[str]) -> dict[str, tuple[str, ...]]:
    examples: dict[str, tuple[str, ...]] = {}
    for each in flags:
        label, _, pattern = each.partition("=")
        if not label or not pattern:
            what, why = f"--examples={each} names no label", "the form of --examples is LABEL=GLOB"
            raise CommandError(what, where=CLASSIFIER, why=why, fix=f"{CLASSIFIER} --help")
        examples[label] = (*examples.get(label, ()), pattern)
    if len(examples) < 2:
        what = f"a classifier needs two labels, and there are {len(examples)}"
        why = "each label needs an --examples=LABEL=GLOB"
        raise CommandError(what, where=CLASSIFIER, why=why, fix=f"{CLASSIFIER} --help")
    return examples
