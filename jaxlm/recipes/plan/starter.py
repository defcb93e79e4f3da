"""A first config for a text: sizes that the planner predicts for a machine and a time. Free of JAX.

Example:
  >>> from jaxlm.monitor.chips import machine
  >>> request = StarterRequest(("stdlib:train",), machine("h100", flag="--on"), minutes=60)
  >>> starter = plan_starter(request)
  >>> starter.run.model.family, starter.plan.fits
  ('qwen3', True)
"""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.core.sections import show
from jaxlm.data import parts, text_size
from jaxlm.data.documents import Corpus
from jaxlm.models.cost import model_cost
from jaxlm.monitor import formatting
from jaxlm.monitor.chips import Machine
from jaxlm.parallel.config import AXES
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict, search
from jaxlm.recipes.plan.predict import Forecast, forecast
from jaxlm.recipes.scaling import resize_model

MINUTES = 60.0  # of training without --minutes and --params
# Parameters: tokens of a row. Longer rows cost attention that a small model cannot use.
ROWS = ((10e6, 256), (100e6, 512), (500e6, 1024), (math.inf, 2048))
# Bytes of text: tokenizer, and bytes of English that a token of it covers.
TOKENIZERS = (
    (2e5, "bytes", 1.0),
    (4e6, "sentencepiece:2048", 3.2),
    (40e6, "sentencepiece:4096", 3.6),
    (400e6, "sentencepiece:8192", 4.0),
    (math.inf, "sentencepiece:32768", 4.6),
)
SMALLEST, LARGEST = 1e6, 2e10  # parameters
TOKENS_PER_PARAMETER = 20  # of lowest loss for the compute: Hoffmann et al. 2022, arXiv:2203.15556
# The same for a model below `SMALL`, or if the text is too short for 20: the law was fitted to
# larger models, and configs/quickstart.py is best at fewer than one.
FEWER_TOKENS_PER_PARAMETER, SMALL = 5, 1e7
# Epochs up to which repeated text helps nearly as much as new text, and up to which it helps at
# all: Muennighoff et al. 2023, arXiv:2305.16264.
GOOD_EPOCHS, MAX_EPOCHS = 4, 16
STEPS = 2000  # updates of a run of any length, within the limits of the batch
MIN_BATCH, MAX_BATCH = 2048, 2**19  # tokens
MIN_STEPS = 100
MIN_SEQUENCE = 16  # tokens of a row on a very short text
HELD_OUT_SHARE = 0.05  # of the text, as data.validation has it; it has a row at least


@dataclasses.dataclass(frozen=True)
class StarterRequest:
    """The text, the machine, and the size or time of a first run."""

    data: tuple[str, ...]  # patterns, as in data.train
    machine: Machine
    text_key: str = "text"  # field of a record
    parameters: float | None = None  # None for as many as the time allows
    minutes: float | None = None  # None for 20 tokens per parameter


@dataclasses.dataclass(frozen=True)
class Starter:
    """A first run, its settings by path, and its plan."""

    run: Run
    settings: dict[str, Any]
    plan: Forecast
    text_bytes: int  # of the text alone; estimate of large files
    text_tokens: float  # estimate

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return model_cost.parameters(self.plan.decoder)

    @property
    def epochs(self) -> float:
        """Passes over the text."""
        return self.run.pace.tokens(self.run.train.steps) / self.text_tokens

    @property
    def minutes(self) -> tuple[float, float] | None:
        """Shortest and longest predicted time; None for a chip of unknown speed."""
        low, high = (self.run.train.steps * seconds / 60 for seconds in self.plan.seconds)
        return (low, high) if self.plan.machine.chip.is_known else None


def plan_starter(request: StarterRequest) -> Starter:
    """Return a run for the text, machine, and size or time.

    Without `parameters` it is the largest model that reads enough tokens in the time: 20 per
    parameter, or 5 if the model is small or the text is too short for 20. Without `minutes` the
    run reads 20 tokens per parameter; without both it takes 60 minutes.

    Raises:
      InputMissing: if no file matches.
      DataError: if the files contain no text, or too little for the devices.
      ConfigError: if no such model fits the machine.
    """
    corpus = Corpus.find(request.data, request.text_key, "--data")
    parts.probe(corpus, "--data")
    size = text_size.text_bytes(corpus)
    _check_size(request, size)
    minutes = request.minutes
    if minutes is None and request.parameters is None:
        minutes = MINUTES
    if request.parameters:
        best = _sized(request, size, request.parameters, minutes)
    else:
        best = _largest(request, size, minutes)
    if best is None:
        raise ConfigError(
            "no such model fits the machine",
            where=f"--on={request.machine.name}",
            why=f"{request.parameters or SMALLEST:.3g} parameters need more memory than it has",
            fix="--params=10M\n--on=h100x8",
        )
    return best


def _check_size(request: StarterRequest, size: int) -> None:
    """Raise DataError if the text is too short for a row for each device, or to hold one out."""
    devices = request.machine.devices
    # Bytes, each a token: for the shortest run, and for one row in the held-out share.
    of_steps = math.ceil(MIN_STEPS * MIN_SEQUENCE * devices / MAX_EPOCHS)
    least = max(of_steps, math.ceil(MIN_SEQUENCE / HELD_OUT_SHARE))
    if size >= least:
        return
    here = f"{devices} devices of {request.machine.name} are" if devices > 1 else "a run is"
    raise DataError(
        "the text is too short",
        where=f"--data={','.join(request.data)}",
        why=f"it has {size:,} bytes; {here} trained on {least:,} or more",
        fix="name more files: --data is repeatable, and takes a folder or a glob",
    )


def _largest(request: StarterRequest, size: int, minutes: float | None) -> Starter | None:
    """Return the largest run that reads enough tokens in the time; else the smallest, or None."""
    count = int(math.log(LARGEST / SMALLEST) / math.log(1.25))
    sizes = [SMALLEST * 1.25**power for power in range(count + 1)]
    best = _sized(request, size, sizes[0], minutes)
    low, high = 1, len(sizes)  # sizes before `low` are possible, those from `high` on are not
    while low < high:
        middle = (low + high) // 2
        starter = _sized(request, size, sizes[middle], minutes)
        if starter is not None and _reads_enough(starter):
            best, low = starter, middle + 1
        else:
            high = middle
    return best


def _reads_enough(starter: Starter) -> bool:
    tokens = starter.run.pace.tokens(starter.run.train.steps)
    is_short = MAX_EPOCHS * starter.text_tokens < TOKENS_PER_PARAMETER * starter.parameters
    is_small = starter.parameters < SMALL
    enough = FEWER_TOKENS_PER_PARAMETER if is_short or is_small else TOKENS_PER_PARAMETER
    return tokens >= enough * starter.parameters


def _sized(
    request: StarterRequest, size: int, parameters: float, minutes: float | None
) -> Starter | None:
    """Return the run with about `parameters` on a text of `size` bytes; None if none fits."""
    tokenizer, token_bytes = next(row[1:] for row in TOKENIZERS if size <= row[0])
    text_tokens = max(1.0, size / token_bytes)
    settings = _base_settings(request, parameters, tokenizer)
    run = _loaded(settings)
    vocab = predict.vocabulary(run, dict.fromkeys(AXES, 1), [])
    width = resize_model.nearest(run, vocab, parameters)
    settings |= resize_model.settings_at_width(run, width)
    run = _loaded(settings)
    plan = _fitted(run, request.machine)
    if plan is None:
        return None
    budget = float(TOKENS_PER_PARAMETER * model_cost.parameters(plan.decoder))
    if minutes is not None:
        budget = minutes * 60 * run.tokens_per_step / math.sqrt(math.prod(plan.seconds))
    tokens = min(budget, MAX_EPOCHS * text_tokens)
    if tokens > GOOD_EPOCHS * text_tokens:
        settings["model.dropout"] = 0.1
    batch = 2 ** round(math.log2(min(max(tokens / STEPS, MIN_BATCH), MAX_BATCH)))
    # The least number of steps passes over the text at most `MAX_EPOCHS` times.
    most = 2 ** math.floor(math.log2(MAX_EPOCHS * text_tokens / MIN_STEPS))
    batch, sequence, devices = min(batch, most), run.data.sequence, request.machine.devices
    held_out = HELD_OUT_SHARE * text_tokens / (1 if tokenizer == "bytes" else 2)  # an estimate
    while sequence > MIN_SEQUENCE and (sequence * devices > most or sequence > held_out):
        sequence //= 2
    settings["data.sequence"] = settings["model.max_positions"] = sequence
    rows = max(batch // sequence, devices)
    settings["train.batch"] = rows
    settings["train.steps"] = max(MIN_STEPS, round(tokens / (rows * sequence)))
    run = _loaded(settings)
    plan = _fitted(run, request.machine)
    if plan is None:
        return None
    settings |= {each.path: each.new for each in config.diff(run, plan.run)}
    return Starter(plan.run, settings, plan, size, text_tokens)


def _fitted(run: Run, machine: Machine) -> Forecast | None:
    """Return the plan of the run, with the memory settings that it needs; None if none fits."""
    try:
        plan = forecast(run, machine)
        if plan.bytes_per_device["total"] <= search.MAX_SHARE * plan.memory_bytes:
            return plan
    except ConfigError:  # it does not divide over the devices as it is
        pass
    return search.search(run, machine, []).best


def _base_settings(request: StarterRequest, parameters: float, tokenizer: str) -> dict[str, Any]:
    """Return the settings that depend on the size and machine alone."""
    sequence = next(length for limit, length in ROWS if parameters <= limit)
    return {
        "data.train": request.data,
        **({} if request.text_key == "text" else {"data.text_key": request.text_key}),
        "data.tokenizer": tokenizer,
        "data.sequence": sequence,
        "model.family": "qwen3",
        "model.max_positions": sequence,
        "model.depth": 8,
        "model.width": 512,
        "model.heads": 8,
        "model.kv_heads": 4,
        "model.tied": parameters < 1e9,
        "precision.compute": "auto",
        "train.stack": "auto",
        "optim.name": "adamw",
        # Kaplan et al. 2020, arXiv:2001.08361, equation D.1.
        "optim.lr": float(f"{max(1e-4, 0.003239 - 0.0001395 * math.log(parameters)):.1e}"),
        "schedule.warmup": "2%",
        "schedule.floor": 0.1,
        "train.batch": max(1, 8192 // sequence) * request.machine.devices,
        "eval.every": "10%",
        "checkpoint.every": "10%",
    }


REASONS = {
    "data.train": "The text. 5% of it is held out: data.validation has its default.",
    "model.family": "Size: {parameters} parameters.",
    "precision.compute": "The fastest dtype of the machine; parameters are float32.",
    "optim.name": "The rate falls with the size (arXiv:2001.08361, equation D.1).",
    "train.batch": "{tokens} tokens in {steps} steps: {epochs} times the text.",
    "eval.every": "An evaluation and a checkpoint at every tenth of the run.",
}


def config_file(starter: Starter, path: str, command: str) -> str:
    """Return the text of a config file of a run, with the reason of each group of settings.

    Args:
      starter: the run.
      path: path of the file, for the command that it shows.
      command: the command that makes the file.
    """
    run = starter.run
    figures = {
        "parameters": formatting.count(starter.parameters),
        "tokens": formatting.count(run.pace.tokens(run.train.steps)),
        "steps": f"{run.train.steps:,}",
        "epochs": f"{starter.epochs:.2g}",
    }
    workdir = f"runs/{Path(path).stem}"
    shown = f"jaxlm train --config={shlex.quote(path)} --workdir={shlex.quote(workdir)}"
    lines = [
        f'"""A language model of {figures["parameters"]} parameters on text of the user\'s own.',
        "",
        f"    {_in_docstring(shown)}",
        "",
        f"Predicted: {predicted_time(starter)} on {starter.plan.machine.name}. Made by:",
        "",
        f"    {_in_docstring(command)}",
        '"""',
        "",
        "from jaxlm.core import config",
        "from jaxlm.recipes.config import Run",
        "",
        "",
        "def get_config():",
        "    c = config.new(Run)",
    ]
    first = list(dict.fromkeys(path.partition(".")[0] for path in starter.settings))
    in_sections = sorted(
        starter.settings.items(), key=lambda item: first.index(item[0].partition(".")[0])
    )
    for path, value in in_sections:
        if path in REASONS:
            lines.append(f"    # {REASONS[path].format(**figures)}")
        lines.append(f"    c.{path} = {_literal(value)}")
    return "\n".join([*lines, "    return c", ""])


def _in_docstring(text: str) -> str:
    """Return a text as the source of a docstring holds it."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _literal(value: Any) -> str:
    """Return the Python source of a value, with double quotes."""
    if isinstance(value, tuple):
        return f"({''.join(f'{_literal(each)}, ' for each in value).rstrip(' ')})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def predicted_time(starter: Starter) -> str:
    """Return the predicted time for people."""
    if starter.minutes is None:
        return "unknown time"
    low, high = (formatting.duration(60 * minutes) for minutes in starter.minutes)
    return f"{low} to {high}"


def _loaded(settings: dict[str, Any]) -> Run:
    overrides = [(path, show(value)) for path, value in settings.items()]
    return config.load(Run, None, overrides).value
