"""Import a Hugging Face or GGUF model: a folder with config.json and safetensors, or a .gguf file.

hf:ORG/NAME is downloaded from the Hugging Face Hub (safetensors, config and tokenizer) into the
cache of huggingface_hub.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import CPU_DEVICES, Parser, add_flag, needed, selection
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output
from jaxlm.core import config


def add_arguments(parser: Parser) -> None:
    why = "the config comes from the model; --config.a.b=V sets the other settings"
    parser.withhold(why, "--config")
    places = "DIR|FILE.gguf|hf:ORG/NAME[@REVISION]"
    doc = "folder of save_pretrained, file of llama.cpp, or model name on the Hub"
    add_flag(parser, "--from", places, str, doc, dest="source", required=True)
    doc = "token to append to the vocabulary; its rows start as the mean of the others; repeatable"
    add_flag(parser, "--add_token", "TEXT", [], doc)
    add_flag(parser, *CPU_DEVICES)


def run(args: Any, out: Output) -> int:
    workdir = Path(needed(args, "workdir"))

    from jaxlm.recipes.config import Run
    from jaxlm.recipes.exchange.import_model import ImportOptions, import_model

    flags = selection(args, "source", "overrides", "cpu_devices")
    options = ImportOptions(workdir=workdir, add_tokens=args.add_token, **flags)
    with progress_bars(out, "fetching ") as show:
        answer = import_model(options, out.log, show)
    lines = [f"{workdir}: {answer['family']}, {answer['parameters']:,} parameters"]
    if config.load(Run, str(workdir)).value.objective.prompts != "none":
        folder = shlex.quote(str(workdir))
        lines.append(f"next: jaxlm generate --workdir={folder} --prompt='...'")
    return out.result(answer, lines)
