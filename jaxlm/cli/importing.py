"""Import a Hugging Face or GGUF model: a folder with config.json and safetensors, or a .gguf file.

jaxlm import --from=hf:Qwen/Qwen3-0.6B --workdir=runs/qwen               from the Hub
jaxlm import --from=model.gguf --workdir=runs/m                          a file of llama.cpp
jaxlm import --adapter=lora --init_from=runs/qwen --workdir=runs/lora    of PEFT

hf:ORG/NAME is downloaded from the Hugging Face Hub (safetensors, config and tokenizer) into the
cache of huggingface_hub. --adapter=DIR --init_from=RUN imports an adapter of PEFT for a model; one
of another library is imported first, to WORKDIR-base.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import CPU_DEVICES, Parser, add_flag, is_run, needed, selection
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import CommandError


def add_arguments(parser: Parser) -> None:
    why = "the config comes from the model; --config.a.b=V sets the other settings"
    parser.withhold(why, "--config")
    places = "DIR|FILE.gguf|hf:ORG/NAME[@REVISION]"
    doc = "folder of save_pretrained, file of llama.cpp, or model name on the Hub"
    add_flag(parser, "--from", places, str, doc, dest="source")
    doc = "folder of PEFT with the adapter, instead of --from"
    add_flag(parser, "--adapter", "DIR", str, doc)
    doc = "the model that the adapter changes: a run, or what --from takes"
    add_flag(parser, "--init_from", "RUN[@STEP]", str, doc)
    doc = "token to append to the vocabulary; its rows start as the mean of the others; repeatable"
    add_flag(parser, "--add_token", "TEXT", [], doc)
    add_flag(parser, *CPU_DEVICES)


def run(args: Any, out: Output) -> int:
    workdir = Path(needed(args, "workdir"))

    _check_flags(args)
    if args.adapter:
        return _import_adapter(workdir, args, out)

    from jaxlm.recipes.config import Run
    from jaxlm.recipes.exchange.import_model import ImportOptions, import_model

    _check_source(args.source)
    flags = selection(args, "source", "overrides", "cpu_devices")
    options = ImportOptions(workdir=workdir, add_tokens=args.add_token, **flags)
    with progress_bars(out, "fetching ") as show:
        answer = import_model(options, out.log, show)
    lines = [f"{workdir}: {answer['family']}, {answer['parameters']:,} parameters"]
    if config.load(Run, str(workdir)).value.objective.prompts != "none":
        folder = shlex.quote(str(workdir))
        lines.append(f"next: jaxlm generate --workdir={folder} --prompt='...'")
    return out.result(answer, lines)


def _check_flags(args: Any) -> None:
    """Raise CommandError unless the flags name one model, or one adapter and its base."""
    has_base, is_adapter = bool(args.init_from), bool(args.adapter)
    if bool(args.source) != is_adapter == has_base and not (is_adapter and args.add_token):
        return
    raise CommandError(
        "the flags name no model and no adapter with its base",
        where=f"jaxlm {shlex.join(args.words)}",
        why="import needs --from, or --adapter and --init_from, without --add_token",
        fix="--from=model\n--adapter=adapter --init_from=runs/base",
    )


def _check_source(source: str) -> None:
    """Raise CommandError if the model to import is a run, which needs no import."""
    if is_run(source) and (Path(source) / "checkpoints").is_dir():
        raise CommandError(
            "the folder is a run of jaxlm",
            where=f"--from={source}",
            why="a run needs no import: --workdir and --init_from name it",
            fix=f"jaxlm generate {shlex.quote(f'--workdir={source}')} --prompt=Hello",
        )


def _import_adapter(workdir: Path, args: Any, out: Output) -> int:
    from jaxlm.recipes.exchange.import_adapter import AdapterOptions, import_adapter

    flags = selection(args, "init_from", "overrides", "cpu_devices")
    answer = import_adapter(
        AdapterOptions(adapter=Path(args.adapter), workdir=workdir, **flags), out.log
    )
    base, folder = answer["base"], shlex.quote(str(workdir))
    model = f"{workdir}: {answer['adapter']}, {answer['parameters']:,} parameters"
    lines = [f"{model}, on step {base['step']} of {base['run']}"]
    return out.result(answer, [*lines, f"next: jaxlm generate --workdir={folder} --prompt='...'"])
