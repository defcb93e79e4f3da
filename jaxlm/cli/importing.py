"""Makes a run of a model that somebody else trained: a folder of Hugging Face with config.json and safetensors, or a GGUF.

hf:ORG/NAME is fetched from the Hugging Face Hub: its safetensors, config and tokenizer, into the cache of huggingface_hub.
"""

import argparse
import shlex
from pathlib import Path

from jaxlm.cli.arguments import needed, withhold
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output
from jaxlm.core import config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(parser, "--config", why="the model says what it is; --config.a.b=V sets the rest")
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR|FILE.gguf|hf:ORG/NAME[@REVISION]",
        help="the model's folder, as save_pretrained wrote it, its file in llama.cpp's format, or its name on the hub",
    )
    parser.add_argument(
        "--add_token",
        action="append",
        default=[],
        metavar="TEXT",
        help="a token behind those of its tokenizer, whose rows begin as the mean of the others",
    )
    parser.add_argument("--cpu_devices", type=int, metavar="N", help="split the CPU into N devices")


def run(args: argparse.Namespace, out: Output) -> int:
    workdir = Path(needed(args, "workdir"))

    from jaxlm.recipes.config import Run
    from jaxlm.recipes.exchange.import_model import Options, import_model

    options = Options(
        source=args.source,
        workdir=workdir,
        overrides=args.overrides,
        add_tokens=args.add_token,
        cpu_devices=args.cpu_devices,
    )
    with progress_bars(out, "fetching ") as show:
        answer = import_model(options, out.say, show)
    lines = [f"{workdir}: {answer['family']}, {answer['parameters']:,} parameters"]
    if config.load(Run, str(workdir)).value.objective.prompts != "none":
        place = shlex.quote(str(workdir))
        lines.append(f"next: jaxlm generate --workdir={place} --prompt='...'")
    out.result(answer, "\n".join(lines))
    return 0
