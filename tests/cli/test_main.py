"""The front door: verbs, flags, exit codes, and the form of errors."""

import argparse
import errno
import importlib
import io
import itertools
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxlm
import jaxlm.cli
from jaxlm.cli import arguments
from jaxlm.cli import main as front
from jaxlm.cli.arguments import Parser
from jaxlm.cli.main import CONTINUED, VERBS, Verb, main
from jaxlm.core import config
from jaxlm.core.errors import CommandError, DataError, InputMissing, NotWritable, cannot_write
from jaxlm.core.sections import show
from jaxlm.recipes.config import Run


@pytest.fixture
def verb(monkeypatch):
    """A verb `probe` whose run is that of the test."""
    module = types.ModuleType("probe_verb", "Probes.")
    module.add_arguments = lambda parser: (
        parser.add_argument("--max_tokens", type=int, default=1),
        parser.add_argument("--mode", choices=("fast", "exact")),
        parser.add_argument("rest", nargs="*"),
    )
    module.run = lambda args, out: 0
    monkeypatch.setitem(sys.modules, "probe_verb", module)
    monkeypatch.setitem(front.VERBS, "probe", Verb("probe_verb", "probes"))
    return module


def seen(verb) -> dict:
    values: dict = {}
    verb.run = lambda args, out: values.update(vars(args)) or 0
    return values


def test_help_names_every_verb_and_imports_nothing_heavy():
    program = (
        "import sys; from jaxlm.cli.main import main; code = main(['--help']);"
        "heavy = {'jax', 'flax', 'numpy', 'ml_collections', 'absl', 'rich'} & sys.modules.keys();"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    before = os.times()  # the processor's time: other tests may use it too
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert sum(after[2:4]) - sum(before[2:4]) < 0.5
    for name, known in VERBS.items():
        assert f"{name} " in done.stdout
        assert known.help in done.stdout


@pytest.mark.parametrize("name", ["runs", ""])
def test_help_before_a_verb_is_the_help_of_that_verb(name, capsys):
    texts = []
    for words in (["help", name], [name, "--help"]):
        assert main([word for word in words if word]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert name in texts[0]


def test_every_module_of_the_room_is_a_verb():
    modules = {f"jaxlm.cli.{each.name}" for each in pkgutil.iter_modules(jaxlm.cli.__path__)}
    shared = {f"jaxlm.cli.{name}" for name in ("main", "output", "arguments", "bars", "init_from")}
    assert modules - shared == {verb.module for verb in VERBS.values()}


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_examples_that_it_takes(name):
    module = importlib.import_module(VERBS[name].module)
    lines = re.findall(rf"^jaxlm {name}\b.*$", module.__doc__, re.MULTILINE)
    assert lines
    for line in lines:
        command = re.split(r" {2,}| [<>\[] ?", line)[0]
        words = shlex.split(command)[1:]
        parser = arguments.Parser(prog=f"jaxlm {name}", description=module.__doc__)
        module.add_arguments(parser)
        parser.add_shared()
        shared, rest = arguments.extract(words[1:])
        args, left = parser.read(rest, words)
        assert not left, command
        arguments.check_taken(command, getattr(args, "withheld", {}), shared, rest)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("merge --workdir=run", "jaxlm merge --workdir=run --out=runs/merged"),
        ("quantize run", "jaxlm quantize run --scheme=int8 --out=runs/a-int8"),
        ("tokenizer train a.txt", "jaxlm tokenizer train a.txt --out=my.model"),
        ("data run", "jaxlm data run --help"),
    ],
)
def test_a_line_that_lacks_flags_gets_those_of_an_example(words, fix, capsys):
    assert main(words.split()) == CommandError.code
    assert capsys.readouterr().err.endswith(f"  fix    {fix}\n")


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_explains_itself(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: jaxlm {name}" in text
    assert "--workdir" in text
    assert "--json" in text
    assert importlib.import_module(VERBS[name].module).__doc__.splitlines()[0] in text


def test_the_help_of_an_action_has_its_command_lines_and_the_flags_of_every_verb(capsys):
    assert main(["data", "run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "\njaxlm data run --config=RECIPE --out=DIR " in text
    assert "--config FILE|NAME[:ARG]" in text
    assert "`jaxlm config explain recipe`" in text
    assert "jaxlm data mix" not in text
    assert main(["data", "check", "--help"]) == 0
    assert "--config " not in capsys.readouterr().out


def test_no_verb_shows_the_usage_and_is_an_error(capsys):
    assert main([]) == 2
    assert "usage: jaxlm VERB" in capsys.readouterr().out


def test_shared_flags_are_found_wherever_they_stand(verb):
    values = seen(verb)
    words = (
        "probe --config.a.b=1 one --json --config c.py:x two --config.c.d -2 --workdir=w "
        "--config.s=a=b --max_tokens=3"
    )
    assert main(words.split()) == 0
    assert values["overrides"] == [("a.b", "1"), ("c.d", "-2"), ("s", "a=b")]
    assert (values["config"], values["workdir"], values["json"], values["quiet"]) == (
        "c.py:x",
        "w",
        True,
        False,
    )
    assert (values["max_tokens"], values["rest"]) == (3, ["one", "two"])


@pytest.mark.parametrize("words", [["merge", "--workdir=a"], ["collect"], ["export"]])
def test_an_empty_path_is_no_path(capsys, words):
    assert main([*words, "--out="]) == 2
    assert capsys.readouterr().err.startswith("command error: --out: the path is empty\n")


def test_a_run_that_is_named_as_a_config_is_its_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run/config.json").write_text("{}")
    assert main(["serve", "--port=1", "--config=my run"]) == 2
    assert capsys.readouterr().err.endswith("fix    jaxlm serve '--workdir=my run' --port=1\n")
    assert main(["serve", "--port=1", "--config=other"]) == 2
    assert capsys.readouterr().err.endswith("fix    jaxlm serve --port=1\n")


def test_a_flag_is_left_out_with_its_value():
    words = ["eval", "--samples=2", "--limit=10", "--samples", "3", "--tasks=a"]
    assert arguments.without_flag(words, "--samples") == ["eval", "--limit=10", "--tasks=a"]


def test_words_after_two_dashes_are_left_alone(verb):
    values = seen(verb)
    assert main(["probe", "--quiet", "--", "--config=a", "--json"]) == 0
    assert values["rest"] == ["--config=a", "--json"]
    assert (values["quiet"], values["json"], values["config"]) == (True, False, None)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("prob", ["no verb 'prob'", "fix    jaxlm probe"]),
        ("zzzzzz", ["no verb 'zzzzzz'", "fix    jaxlm --help"]),
        ("--json", ["before a verb"]),
        ("probe --max-tokens=5", ["unknown flag --max-tokens", "fix    --max_tokens=5"]),
        ("probe --wrkdir=x", ["unknown flag --wrkdir", "fix    --workdir=x"]),
        ("probe --max_token=5", ["fix    --max_tokens=5"]),
        ("probe --qqqqqqqqqq", ["the flags are", "--max_tokens"]),
        ("probe --max_tokens=many", ["--max_tokens", "invalid int value", "jaxlm probe --help"]),
        ("probe --mode=fats", ["fix    --mode=fast"]),
        ("probe --config", ["--config needs a value", "fix    --config=configs/quickstart.py"]),
        ("probe --config.a.b --json", ["--config.a.b needs a value"]),
        ("probe --json=yes", ["--json takes no value"]),
    ],
)
def test_a_wrong_command_line_says_what_and_how_to_mend_it(verb, capsys, words, parts):
    assert main(words.split()) == 2
    text = capsys.readouterr().err
    assert text.startswith("command error: ")
    assert len(text.splitlines()) <= 8
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("words", "least"),
    [
        ("train --config=quickstart --workdir=r --stop_at=0", 1),
        ("train --config=quickstart --workdir=r --cpu_devices=-1", 1),
        ("eval --workdir=r --sequence=0", 1),
        ("eval --workdir=r --batch=-1", 1),
        ("eval --workdir=r --limit=0", 1),
        ("eval --workdir=r --shots=-1", 0),
        ("data peek --config=quickstart --rows=0", 1),
        ("data peek --config=quickstart --step=-1", 0),
        ("quantize --workdir=r --out=q --scheme=int8 --calibration_tokens=0", 1),
        ("reward try number --prompts=p.jsonl --tokens=0", 1),
        ("serve --workdir=r --context=1", 2),
        ("serve --workdir=r --drain_seconds=nan", 0),
    ],
)
def test_a_number_below_the_least_is_refused_before_anything_is_read(words, least, capsys):
    flag, _, value = words.split()[-1].partition("=")
    assert main(words.split()) == CommandError.code
    text = capsys.readouterr().err
    assert f"{flag}={value} is below {least}" in text
    assert f"why    {flag} must be at least {least}" in text


def test_several_steps_for_a_command_of_one_are_not_taken_for_a_number(capsys):
    """100,200 was read as 100200, as 1,000 is elsewhere."""
    assert main(["eval", "--workdir=run", "--step=100,200", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fix"] == "--step=100\n--step=200"


# The words of each verb and action, as short as they may be, that `--config.bogus=1` is added to.
LEAST = [
    "average --out=O",
    "quantize --scheme=int8 --out=O",
    "bench",
    "check",
    "checkpoint diff --step=1",
    "checkpoint inspect",
    "checkpoint list",
    "checkpoint verify",
    "collect --out=O",
    "compare",
    "completion",
    "config diff configs/quickstart.py configs/quickstart.py",
    "config explain seed",
    "config plot",
    "config show",
    "config validate",
    "data check D",
    "data clusters D",
    "data mix --out=O",
    "data peek",
    "data run --out=O",
    "data stats",
    "data tokenize --out=O",
    "data train-classifier --out=O",
    "docs",
    "doctor",
    "eval",
    "export --out=O",
    "generate",
    "import --from=D",
    "init",
    "launch --processes=2",
    "lr-find",
    "merge --out=O",
    "plan",
    "prune --out=O --keep=0",
    "rate",
    "replay --step=1",
    "report",
    "reward try --prompts=F",
    "runs",
    "scale --budget=1e20",
    "serve",
    "sweep",
    "teach --out=O",
    "tokenizer compare bytes",
    "tokenizer show F",
    "tokenizer train --out=O",
    "train",
]


def test_the_table_of_least_words_has_every_verb_and_action():
    known = set()
    for name, verb in VERBS.items():
        parser = Parser(prog=name)
        importlib.import_module(verb.module).add_arguments(parser)
        inner = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        known |= {f"{name} {action}" for choices in inner for action in choices} or {name}
    assert known == {" ".join(words.split(" -")[0].split()[:2]).split(" -")[0] for words in LEAST}


# The others resolve settings over those of a run or of a model, which is not there.
@pytest.mark.parametrize("words", [w for w in LEAST if w.split()[0] not in ("replay", "import")])
def test_a_misspelt_setting_is_refused_by_every_verb(words, capsys, tmp_path):
    needing = {
        "data run": ["--config=configs/data/clean_stdlib.py"],
        "train": ["--config=configs/quickstart.py", f"--workdir={tmp_path}/run"],
    }
    for verb in ("check", "lr-find", "plan", "teach"):
        needing[verb] = ["--config=configs/quickstart.py"]
    more = needing.get(
        " ".join(itertools.takewhile(lambda word: word[0] != "-", words.split())), []
    )
    code = main([*words.split(), *more, "--config.bogus=1"])
    errors = capsys.readouterr().err
    assert code == 2, errors
    assert "bogus" in errors
    for part in ("where", "why", "fix"):
        assert f"\n  {part:<6} " in errors


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("eval --workdir=run --config.a=1 --batch=2", "jaxlm eval --workdir=run --batch=2"),
        ("generate --config=c.py --prompt 'a b' --json", "jaxlm generate --json --prompt 'a b'"),
        ("data check D --config.a=1", "jaxlm data check D"),
        (
            "launch --config.a=1 --processes=2 -- train --workdir=r",
            "jaxlm launch --processes=2 -- train --workdir=r --config.a=1",
        ),
    ],
)
def test_a_setting_that_a_verb_leaves_out_is_refused_with_the_line_that_works(words, fix, capsys):
    assert main(shlex.split(words)) == 2
    assert f"  fix    {fix}\n" in capsys.readouterr().err


def raising(error):
    def run(args, out):
        raise error

    return run


def test_an_error_has_its_own_code_and_no_traceback_unless_asked(verb, capsys):
    verb.run = raising(
        DataError("bad \x1b[31mrecord", where="a.txt:3", why="it is torn", fix="--skip")
    )
    assert main(["probe"]) == 65
    shown = capsys.readouterr()
    assert (
        shown.err == "data error: bad \\x1b[31mrecord\n  where  a.txt:3\n  why    it is torn\n"
        "  fix    --skip\n"
    )
    assert shown.out == ""
    assert main(["probe", "--trace"]) == 65
    assert "Traceback" in capsys.readouterr().err


def test_under_json_an_error_is_one_object_on_stdout_and_text_on_stderr(verb, capsys):
    verb.run = raising(DataError("bad", where="a:1", why="torn", fix="--skip"))
    assert main(["probe", "--json"]) == 65
    shown = capsys.readouterr()
    parts = {
        "what": "bad",
        "where": "a:1",
        "why": "torn",
        "fix": "--skip",
        "kind": "data error",
        "code": 65,
    }
    assert json.loads(shown.out) == {"error": parts}
    assert "data error: bad" in shown.err


def test_a_bug_of_ours_is_70_with_a_traceback_and_says_so(verb, capsys):
    verb.run = raising(ZeroDivisionError("oops"))
    assert main(["probe"]) == 70
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "internal error: ZeroDivisionError: oops" in text
    assert "bug in jaxlm" in text


@pytest.mark.parametrize(
    "words",
    [
        "train --config=quickstart --workdir=X",
        "generate --workdir=X",
        "eval --workdir=X",
        "import --from=hf X --workdir=run",
        "data check X",
        "config diff X quickstart",
    ],
)
def test_a_name_that_is_too_long_for_a_path_is_66(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.replace("X", "x" * 300).split()) == InputMissing.code
    assert "File name too long" in capsys.readouterr().err


def test_a_folder_without_permission_is_66_and_the_fix_lists_it(verb, tmp_path, capsys):
    """The processes of this test may have all permissions, so the error is that of the system."""
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{tmp_path}/closed/r/x.json")
    verb.run = raising(error)
    assert main(["probe"]) == InputMissing.code
    assert f"fix    ls -ld {tmp_path}/closed/r/x.json" in capsys.readouterr().err
    verb.run = raising(OSError(errno.EIO, os.strerror(errno.EIO), "x"))
    assert main(["probe"]) == 70


@pytest.mark.parametrize("words", [["probe"], ["probe", "--out=x"], ["probe", "--out", "x"]])
def test_a_fix_names_the_flag_of_the_directory_that_the_command_writes(words, verb, capsys):
    """With --workdir it would read another run."""
    verb.add_arguments = lambda parser: parser.add_argument("--out")
    verb.run = raising(cannot_write("the run directory", "x", OSError(errno.EFBIG, "too large")))
    assert main(words) == NotWritable.code
    flag = "--out" if words[1:] else "--workdir"
    assert f"fix    {flag}=runs/another" in capsys.readouterr().err


def test_an_interrupt_is_130(verb, capsys, monkeypatch):
    verb.run = raising(KeyboardInterrupt())
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr("jaxlm.cli.data._clean", raising(KeyboardInterrupt()))
    assert main(["data", "run", "--out=clean"]) == 130
    assert capsys.readouterr().err == "interrupted: the same command continues\n"


def test_the_commands_that_continue_exist():
    for words in map(str.split, CONTINUED):
        parser = arguments.Parser(prog=f"jaxlm {words[0]}")
        importlib.import_module(VERBS[words[0]].module).add_arguments(parser)
        assert set(words[1:]) <= set(parser.actions)


def test_the_code_that_a_verb_returns_is_the_exit_code(verb):
    verb.run = lambda args, out: 1
    assert main(["probe"]) == 1


def test_the_answer_is_on_stdout_and_remarks_move_out_of_its_way(verb, capsys):
    def run(args, out):
        out.log("working")
        out.result({"loss": float("nan"), "ids": (1, 2)}, "loss is nan")
        return 0

    verb.run = run
    main(["probe"])
    assert capsys.readouterr().out == "working\nloss is nan\n"
    main(["probe", "--quiet"])
    assert capsys.readouterr().out == "loss is nan\n"
    main(["probe", "--json"])
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"loss": None, "ids": [1, 2]}
    assert shown.err == "working\n"


def test_a_reader_that_goes_away_does_not_stop_a_verb(verb, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    done = []

    def run(args, out):
        for _ in range(3):
            out.log("row")
        done.append(True)
        return 0

    verb.run = run
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["probe"]) == 0
        monkeypatch.undo()
    assert done


def test_python_dash_m_is_the_same_door():
    done = subprocess.run([sys.executable, "-m", "jaxlm", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("command error: there is no verb 'trian'")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config=configs/quickstart.py", "--workdir=gs://bucket/x"],
        ["eval", "--workdir=s3://bucket/x"],
        ["export", "--workdir=runs/a", "--out=gs://bucket/x"],
        ["data", "run", "--config=configs/data/clean_stdlib.py", "--out=file:///tmp/x"],
    ],
    ids=lambda words: words[0],
)
def test_a_place_that_is_no_path_is_refused_and_no_folder_gets_its_name(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 73
    output = capsys.readouterr().err
    assert output.startswith("output not writable: ")
    flag, _, url = words[-1].partition("=")
    assert f"where  {flag}={url}\n" in output
    assert f"fix    {flag}={url.partition('://')[2].strip('/')}\n" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["gs://bucket/x", Path("gs://bucket/x")])
def test_nor_does_the_function_train_in_a_folder_of_that_name(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotWritable):
        jaxlm.train("configs/quickstart.py", workdir=place)
    assert not list(tmp_path.iterdir())


def test_the_help_of_train_has_the_defaults_of_the_settings_that_are_changed_most(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^  ([a-z_.]+) +(\S+)  +\S", text.partition("changed most")[2], re.MULTILINE)
    defaults = config.flatten(Run())
    assert {name: value for name, value in rows if name in defaults} == {
        name: show(defaults[name]) for name, _ in rows if name in defaults
    }
    assert len([name for name, _ in rows if name in defaults]) == 12


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("import run --workdir=new", "jaxlm import --from=run --workdir=new"),
        ("import own/tiny --json", "jaxlm import --from=hf:own/tiny --json"),
        ("eval run --json", "jaxlm eval --workdir=run --json"),
        ("train quickstart", "jaxlm train --config=quickstart"),
        ("quickstart", "jaxlm train --config=quickstart --workdir=runs/quickstart"),
        ("train config=c.py workdir=runs/z", "jaxlm train --config=c.py --workdir=runs/z"),
        (
            "train quickstart workdir=z config.train.steps=5 --quiet",
            "jaxlm train --config=quickstart --workdir=z --config.train.steps=5 --quiet",
        ),
        ("checkpoint list workdir=run step=5", "jaxlm checkpoint list --workdir=run step=5"),
        ("eval config=c.py", "jaxlm eval --help"),
        ("train file=c.py", "jaxlm train --help"),
        ("eval none", "jaxlm eval --help"),
        ("eval --workdir=run a.txt", "jaxlm eval --workdir=run --text=a.txt"),
        ("init a.txt --minutes=5", "jaxlm init --data=a.txt --minutes=5"),
        ("train a.txt", "jaxlm init --data=a.txt"),
        (
            "train --config=quickstart a.txt --workdir=z",
            "jaxlm train --config=quickstart --config.data.train=a.txt --workdir=z",
        ),
        ("train none.txt", "jaxlm train --help"),
        ("config print --config=quickstart", "jaxlm config show --config=quickstart"),
        ("checkpoint ls --workdir=run", "jaxlm checkpoint list --workdir=run"),
    ],
)
def test_a_word_without_its_flag_gets_it_in_the_fix(words, fix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    assert main(words.split()) == CommandError.code
    printed = capsys.readouterr()
    assert f"fix    {fix}\n" in printed.err or fix in printed.out
