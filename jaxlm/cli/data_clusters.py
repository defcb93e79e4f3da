"""`jaxlm data clusters`: the duplicates that a run found, side by side."""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError
from jaxlm.core.quoting import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose clusters, which of them, and how much of each text."""
    withhold(parser, "--config", "--config.a.b", why="it shows what was found by the run's own")
    parser.add_argument("folder", metavar="DIR", help="the --out of a finished run")
    parser.add_argument("--kind", default="all", choices=("all", "exact", "near"))
    parser.add_argument("--most", type=int, default=10, help="clusters, the largest first (10)")
    parser.add_argument("--characters", type=int, default=200, help="of each text (200)")


def run(args: Any, out: Output) -> int:
    """Shows clusters with the beginnings of their texts."""
    from jaxlm.corpus.clusters import clusters, with_texts

    for name in ("most", "characters"):
        if getattr(args, name) < 1:
            raise CommandError(
                f"--{name}={getattr(args, name)} shows nothing",
                where="jaxlm data clusters",
                why="it is at least 1",
                fix="jaxlm data clusters --help",
            )
    folder = Path(args.folder)
    every = clusters(folder, args.kind)
    shown = with_texts(folder, every[: args.most])
    documents = sum(len(cluster["removed"]) for cluster in every)
    lines = [f"{len(every):,} clusters, {documents:,} documents removed for one that stays"]
    for number, cluster in enumerate(shown, 1):
        lines.append(f"--- {number}: {cluster['kind']}, {len(cluster['removed'])} removed")
        for fate, row in (
            ("kept", cluster["kept"]),
            *(("gone", row) for row in cluster["removed"]),
        ):
            row["text"] = row["text"][: args.characters]
            near = f", agreement {row['agreement']:g}" if "agreement" in row else ""
            text = " ".join(printable(row["text"]).split())
            lines.append(f"{fate}  {printable(row['file'])}, record {row['record']}{near}: {text}")
    answer = {"clusters": len(every), "removed": documents, "shown": shown}
    out.result(answer, "\n".join(lines))
    return 0
