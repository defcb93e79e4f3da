"""Every command of README.md and of the manual runs, in order, in a folder like a fresh checkout.

`jaxlm` is the one under test. The commands are the reader's; only what makes them long is cut:
where a command names the quickstart, the settings of TINY that it does not give itself are added to
it. Commands stand in blocks; what the prose names of them, flags and extras, is there.
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlm.cli.docs import page, topics
from jaxlm.cli.main import main
from jaxlm.monitor import plots
from jaxlm.recipes.diagnose import device_checks

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README": README} | {name: page(name).read_text(encoding="utf-8") for name in topics()}
MANUAL = "\n".join(PAGES.values())
COMMANDS = [
    (name, line)
    for name, text in PAGES.items()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in re.sub(r"\\\n *", "", block).splitlines()
]
SCRIPTS = [
    line for _, line in COMMANDS if line.startswith("bash scripts/")
]  # tests/scripts tests them
TINY = {
    "--config.train.steps": "4",
    "--config.train.batch": "8",
    "--config.data.train": "texts/*.txt",
    "--config.data.validation": "tail:10%",
    "--config.data.tokenizer": "bpe:512",  # a GGUF has no bytes alone
    "--config.data.sequence": "32",
    "--config.model.depth": "2",
    "--config.model.width": "32",
    "--config.model.heads": "2",
    "--config.model.kv_heads": "2",
    "--config.sample.prompts": "()",
}


TUNED = {
    "--config.train.steps": "2",
    "--config.train.batch": "4",
    "--config.data.sequence": "128",
    "--config.eval.batches": "1",
}
REINFORCED = {
    "--config.train.steps": "2",
    "--config.train.batch": "8",
    "--config.data.sequence": "32",
    "--config.rl.max_tokens": "8",
}


# Of these the last one given counts: steps of a shorter run, and a tokenizer that is a file of
# SentencePiece.
SHORTER = {
    "--stop_at": "--stop_at=2",
    "--start_at": "--start_at=3",
    "--out=my.model": "--config.data.tokenizer=sentencepiece:512",
}


# Commands that take long. Their verbs and objectives have fast tests of their own.
SLOW = "|".join(
    (
        r"--cpu_devices|^jaxlm (check|bench|lr-find|sweep) |workdir=runs/c ",
        r"config=(rl|preference)/|qlora|^jaxlm (quantize|replay|teach) |=runs/(prefix|small|e)\b",
        r"=runs/(chat|further|seed1)\b|^jaxlm compare |--adapter=adapter|--judge=number",
        r"config.objective.stored=taught|--workdir=runs/(shorter|student) |config=distill/draft",
    )
)
FIRST_RUN = "jaxlm train --config=quickstart --workdir=runs/a --stop_at=20"  # many read it


def shortened(command: str) -> str:
    """The command with what TINY, TUNED, REINFORCED and SHORTER add to it."""
    words = shlex.split(command)
    configs = [
        re.sub(r"^--config=(configs/)?|\.py$", "", w) for w in words if w.startswith("--config=")
    ]
    if any(name.startswith(("finetune/", "preference/")) for name in configs):
        return f"{command} {shlex.join(f'{name}={value}' for name, value in TUNED.items())}"
    if any(name.startswith("rl/") for name in configs):
        return f"{command} {shlex.join(f'{name}={value}' for name, value in REINFORCED.items())}"
    if "quickstart" not in configs:
        return command
    names = {word.partition("=")[0] for word in words}
    added = [f"{name}={value}" for name, value in TINY.items() if name not in names]
    added += [last for word, last in SHORTER.items() if word in names or word in words]
    return f"{command} {shlex.join(added)}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with the configs, texts, an environment to activate, and `jaxlm` on the path."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "texts").mkdir()
    for number, path in enumerate(sorted((ROOT / "jaxlm/core").glob("*.py"))):
        (folder / "texts" / f"{number}.txt").write_text(path.read_text())
    conversations = []
    for a, b in itertools.product(range(10), range(10)):
        turns = [("user", f"{a}+{b}?"), ("assistant", str(a + b))]
        messages = [{"role": role, "content": content} for role, content in turns]
        conversations.append(json.dumps({"messages": messages}) + "\n")
    (folder / "chat.jsonl").write_text("".join(conversations))
    pairs = ({"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(100))
    asked = ({"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(4))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    steps = [
        {"prompt": f"{n}?", "steps": ["a", "b"], "labels": [True, n % 2 > 0]} for n in range(100)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    texts = {"id": "1", "prompt": "1?", "a": "a", "b": "b", "order": "ab", "choice": "a"}
    texts |= {"run_a": "runs/a@1", "run_b": "runs/b@1", "rater": "eve", "seconds": 1.0}
    (folder / "ratings.jsonl").write_text(json.dumps(texts) + "\n")
    (folder / "asked.jsonl").write_text("".join(conversations[:10]))
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text("")
    jaxlm = folder / ".venv/bin/jaxlm"
    jaxlm.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jaxlm "$@"\n')
    jaxlm.chmod(0o755)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        "PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags),
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def marked(name: str, command: str):
    """The command of a page as a test; those that take long are slow."""
    marks = []
    if "--topology" in command:
        marks.append(
            pytest.mark.skipif(
                importlib.util.find_spec("libtpu") is None,
                reason="scripts/test --slow has libtpu in another environment",
            )
        )
    if re.search(SLOW, command):
        marks.append(pytest.mark.slow)
    return pytest.param(command, marks=marks, id=f"{name}: {command}")


@pytest.mark.parametrize(
    "command", [marked(name, line) for name, line in COMMANDS if line not in SCRIPTS]
)
def test_a_command_of_the_manual_runs(checkout, command, request, monkeypatch, capfd):
    """Run it in this process, on one device, if it is one fast command of jaxlm.

    Starting a process takes seconds.
    """
    words = shlex.split(shortened(command))
    is_slow = request.node.get_closest_marker("slow") is not None
    needs_shell = set("|>;&<*?$") & set(re.sub(r"'[^']*'", "", command))
    if is_slow and re.search(r"\bruns/a\b", command) and not (checkout / "runs/a").exists():
        done = run(shortened(FIRST_RUN), checkout)
        assert done.returncode == 0, done.stdout + done.stderr
    if is_slow or words[0] != "jaxlm" or words[1] == "launch" or needs_shell:
        done = run(shortened(command), checkout)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(device_checks, "SECONDS", 0.03)  # of each timing of `jaxlm doctor`
    if words[1] == "train":
        monkeypatch.setattr(plots, "draw", lambda _: [])  # `jaxlm report` draws
    code = main(words[1:])
    assert code == 0, "".join(capfd.readouterr())


@pytest.mark.slow
def test_the_quickstart_trains_evaluates_samples_and_is_done_the_second_time(checkout, tmp_path):
    """Run the script and the real jaxlm, in an environment that exists, at the size of TINY."""
    clone = tmp_path / "clone"
    shutil.copytree(checkout, clone)
    (clone / "scripts").mkdir()
    made_of = ["pyproject.toml", "scripts/constraints.txt", "scripts/setup.sh"]
    for name in (*made_of, "scripts/quickstart"):
        shutil.copy(ROOT / name, clone / name)
    (clone / ".venv/bin/python").symlink_to(sys.executable)
    stamp = run(f"cat {' '.join(made_of)} | cksum", clone).stdout
    (clone / ".venv/jaxlm-stamp").write_text(f"{stamp}\n")
    jaxlm = clone / ".venv/bin/jaxlm"
    tiny = shlex.join(f"{name}={value}" for name, value in TINY.items())
    shorter = f'[ "$1" != train ] || set -- "$@" {tiny}\nexec'
    jaxlm.write_text(jaxlm.read_text().replace("exec", shorter))
    for start in range(2):
        done = run("bash scripts/quickstart", clone)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("== .venv is up to date\n")
        assert "complete at step 4" in done.stdout
        assert ("compiling the step" in done.stderr) == (not start)
        samples = done.stdout.partition("== three samples\n")[2].partition("\n== ")[0]
        assert all(prompt in samples for prompt in ("def ", "class Test", "import os"))
        following = done.stdout.partition("What to try next:\n")[2]
        assert "  jaxlm generate --workdir=runs/quickstart" in following
        assert (clone / "runs/quickstart/report.html").is_file()


def test_the_scripts_of_the_readme_are_there():
    assert [line.split()[1] for line in SCRIPTS] == ["scripts/quickstart", "scripts/test"]
    assert all((ROOT / line.split()[1]).is_file() for line in SCRIPTS)


def test_the_first_ten_lines_name_the_notebook_of_fine_tuning():
    assert "`colab/finetune.ipynb`" in "\n".join(README.splitlines()[:10])
    assert (ROOT / "colab/finetune.ipynb").is_file()


def test_the_tour_has_ten_commands():
    tour = README.partition("## A tour\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^(?:jaxlm|source) ", tour, re.MULTILINE)) == 10


def test_every_verb_is_in_the_manual():
    from jaxlm.cli.main import VERBS

    named = {line.split()[1] for _, line in COMMANDS if line.startswith("jaxlm ")}
    assert named == set(VERBS)


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Flags of a verb, and its actions."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from flags_of(each)


def test_every_flag_and_every_extra_that_the_prose_names_is_one():
    from jaxlm.cli.arguments import Parser
    from jaxlm.cli.main import VERBS

    prose = re.sub(r"```.*?```", "", MANUAL, flags=re.DOTALL)
    prose = re.sub(r"`(pip|tensorboard) [^`]*`", "", prose)  # commands of others
    assert re.findall(r"`jaxlm [a-z-]+ [^`]*--", prose) == [], (
        "a command stands in a block, and runs"
    )
    known = {"--slow", "--help"}  # of scripts/test, and of every command
    for script in (ROOT / "scripts").rglob("*.py"):
        known |= set(re.findall(r'add_argument\(\s*"(--[a-z_]+)"', script.read_text()))
    for verb in VERBS.values():
        parser = Parser(prog="jaxlm")
        importlib.import_module(verb.module).add_arguments(parser)
        parser.add_shared()
        known |= set(flags_of(parser))
    named = {
        flag for code in re.findall(r"`[^`\n]+`", prose) for flag in re.findall(r"--[a-z_]+", code)
    }
    assert {"--min_p", "--add_token", "--workers"} < named
    assert named - known - {"--config"} == set()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = set(re.findall(r"jaxlm\[([a-z]+)\]|extra `([a-z]+)`", MANUAL))
    assert {"prepare", "tpu"} < {a or b for a, b in asked} <= set(extras)


def test_every_path_that_the_manual_names_is_there():
    rooms = re.findall(
        r"`(\w+)/`",
        PAGES["architecture"].partition("## The map of the packages")[2].partition("##")[0],
    )
    assert set(rooms) - {"families", "tests", "jaxlm"} == {
        path.name for path in (ROOT / "jaxlm").iterdir() if (path / "__init__.py").is_file()
    }
    named = re.findall(r"`((?:configs|scripts|colab|jaxlm|tests)/[\w/.]+)`", MANUAL)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_exit_codes_of_the_manual_are_those_of_the_errors():
    from jaxlm.core import errors

    shown = {int(code) for code in re.findall(r"\| (\d+) \|", PAGES["exit_codes"])}
    raised = {
        value.code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.JaxlmError)
    }
    assert raised <= shown
