"""A wrong config is refused at once, in full and with the right word; a run can be repeated."""

import gc
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time

import jax
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.core.sections import by_name, join, settings, show, tag
from jaxlm.recipes.config import Run
from tests import machine
from tests.faults import harness
from tests.faults.conftest import ONE_DEVICE, ROOT


def every_setting():
    """Dotted path -> (setting, the overrides that make it one), for every arm of every union."""
    sections = {path: (known, []) for path, known in settings(Run, {}).items()}
    for section, union in settings(Run, {}, every_arm=True).items():
        label = tag(union.arms[0]) if union.arms else None
        for name in by_name(union.arms) if label else ():
            for path, known in settings(Run, {section: {label: name}}).items():
                sections.setdefault(path, (known, [(join(section, label), name)]))
    return {path: each for path, each in sections.items() if not each[0].arms}


SETTINGS = every_setting()
SECTIONS = ["", *(path for path, known in settings(Run, {}).items() if known.arms)]


def slips(word):
    """Each kind of slip at edit distance 1, in the middle of a word and at its end."""
    at = len(word) // 2
    letter = "q" if word[at] != "q" else "z"
    edits = [
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + letter + word[at + 1 :],
        word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
        word + "s",
    ]
    return [slip for slip in dict.fromkeys(edits) if slip and slip != word]


def misspelt():
    """Yield (wrong path, right paths, a value, overrides) for each slip of each setting.

    A slip that is a setting itself is left out.
    """
    return [
        (wrong, {path}, known.default, arms)
        for path, (known, arms) in SETTINGS.items()
        for wrong in (join(path.rpartition(".")[0], slip) for slip in slips(path.split(".")[-1]))
        if wrong not in SETTINGS
    ]


def misplaced():
    """The same for each setting in a section without it; any setting of that name is right."""
    leaf = {path: path.rpartition(".")[2] for path in SETTINGS}
    cases = []
    for number, (path, (known, arms)) in enumerate(SETTINGS.items()):
        places = [join(section, leaf[path]) for section in SECTIONS]
        places = [place for place in places if place not in SETTINGS and place not in SECTIONS]
        right = {other for other in leaf if leaf[other] == leaf[path]}
        cases.append((places[number % len(places)], right, known.default, arms))
    return cases


def on_the_command_line(folder, wrong, value, arms):
    config.load(Run, None, [*arms, (wrong, show(value))])


def in_a_config_json(folder, wrong, value, arms):
    raw = {}
    for path, each in (
        *arms,
        (wrong, config.Span.plain(value) if isinstance(value, config.Span) else value),
    ):
        *sections, name = path.split(".")
        inner = raw
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = each
    (folder / "config.json").write_text(json.dumps(raw))
    config.load(Run, str(folder / "config.json"))


def in_a_config_file(folder, wrong, value, arms):
    draft = config.new(Run)
    for path, each in (*arms, (wrong, value)):
        *sections, name = path.split(".")
        inner = draft
        for section in sections:
            inner = getattr(inner, section)
        setattr(inner, name, each)


@pytest.mark.parametrize(
    ("way", "part"),
    [
        (on_the_command_line, 4),
        pytest.param(in_a_config_json, 4, marks=pytest.mark.slow),
        pytest.param(in_a_config_file, 4, marks=pytest.mark.slow),
        pytest.param(on_the_command_line, 1, marks=pytest.mark.slow),
    ],
)
def test_f1_every_setting_misspelt_or_in_the_wrong_section_is_refused_and_the_right_one_named(
    way, part, tmp_path, record_property
):
    """Every fourth slip, one of each setting; the slow set has each slip on the command line."""
    named = 0
    slowest = 0.0
    mistakes = [*misspelt()[::part], *misplaced()]
    # Collecting garbage among all that a worker holds takes a second, and is no part of an error.
    gc.freeze()
    for wrong, right, value, arms in mistakes:
        begun = time.process_time()
        with pytest.raises(ConfigError) as caught:
            way(tmp_path, wrong, value, arms)
        slowest = max(slowest, time.process_time() - begun)
        assert caught.value.code == 2
        # A whole section may belong to another arm.
        section = wrong.rpartition(".")[0]
        named_there = (wrong, f"{section} is not a setting here")
        assert any(text in str(caught.value) for text in named_there)
        meant = re.search(r"the nearest is ([\w.]+)", caught.value.why)
        named += bool(meant) and meant[1] in right
    gc.unfreeze()
    assert len(mistakes) > 1.9 * len(SETTINGS) > 100
    figures = (
        f"{way.__name__.replace('_', ' ')}: the nearest is right in {named} of {len(mistakes)}"
    )
    record_property("F1", figures)
    assert named / len(mistakes) >= 0.95, figures
    machine.require_processor(slowest, 1)


@pytest.mark.parametrize("place", ["file", "command line"])
def test_f1_a_misspelt_setting_ends_train_with_2_within_two_seconds_and_without_jax(
    place, tmp_path, record_property
):
    line = "c.optim.lrr = 1e-3" if place == "file" else "pass"
    (tmp_path / "x.py").write_text(
        "from jaxlm.core import config\nfrom jaxlm.recipes.config import Run\n"
        f"def get_config():\n    c = config.new(Run)\n    {line}\n    return c\n"
    )
    program = (
        "import sys; from jaxlm.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit('imported JAX' if {'jax', 'jaxlib', 'flax'} & sys.modules.keys() else code)"
    )
    words = ["train", f"--config={tmp_path}/x.py", f"--workdir={tmp_path}/run"]
    words += ["--config.optim.lrr=1e-3"] if place == "command line" else []
    with harness.timing() as took:
        done = started([sys.executable, "-c", program, *words])
    assert done.returncode == 2, done.stderr
    assert "nearest is optim.lr" in done.stderr
    assert (f"{tmp_path}/x.py:5" if place == "file" else "--config.optim.lrr=1e-3") in done.stderr
    assert not (tmp_path / "run").exists()
    record_property("F1", f"{place} {took}")
    took.require(2)


def started(command, **options):
    """A finished process."""
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)


WRONG_FILE = """\
from jaxlm.core import config
from jaxlm.recipes.config import Run

def get_config():
    c = config.new(Run)
    c.model.family = "gpt2"
    c.model.max_positions = 64
    c.train.batch = "many"
    c.model.dropout = 1.5
    c.optim.b1 = 1.0
    return c
"""


def test_f2_everything_that_is_wrong_is_in_one_message_with_file_and_line(tmp_path, capsys):
    """A wrong type, two values out of range, contradictions within a section and between two."""
    (tmp_path / "x.py").write_text(
        WRONG_FILE.replace("    return", "    c.model.heads = 7\n    return")
    )
    words = [
        f"--config={tmp_path}/x.py",
        "--config.data.sequence=128",
    ]
    assert main(["config", "validate", *words]) == 2
    output = capsys.readouterr().err
    lines = output.splitlines()
    assert len(lines) <= 8
    expected = {
        f"{tmp_path}/x.py:8: train.batch": "must be int",
        f"{tmp_path}/x.py:9: model.dropout": "< 1",
        f"{tmp_path}/x.py:10: optim.b1": "< 1",
        f"{tmp_path}/x.py:11: model.heads": "does not divide by heads",
        "--config.data.sequence=128: data.sequence": "the model has 64",
    }
    assert "5 settings are wrong" in lines[0]
    assert lines[1] == f"  where  {tmp_path}/x.py, command line"
    assert lines[2].startswith("  why    ")
    for culprit, why in expected.items():
        assert any(culprit in line and why in line for line in lines), culprit


def test_f2_a_contradiction_between_sections_is_told_beside_a_wrong_value_elsewhere(tmp_path):
    (tmp_path / "x.py").write_text(WRONG_FILE)
    with pytest.raises(ConfigError) as caught:
        config.load(Run, f"{tmp_path}/x.py", [("data.sequence", "128")])
    parts = [
        part for part in ("train.batch", "optim.b1", "data.sequence") if part in caught.value.why
    ]
    assert parts == ["train.batch", "optim.b1", "data.sequence"]


def test_f2_values_that_mean_nothing_allowed_are_not_replaced_but_explained(tmp_path):
    (tmp_path / "x.py").write_text(WRONG_FILE)
    with pytest.raises(ConfigError) as caught:
        config.load(Run, f"{tmp_path}/x.py", [("data.sequence", "128")])
    explained = "jaxlm config explain model.dropout optim.b1 train.batch"
    assert sorted(caught.value.fix.split()) == sorted(explained.split())
    assert main(caught.value.fix.split()[1:]) == 0


def test_f2_the_fix_mends_all_of_it(tmp_path):
    output = WRONG_FILE.replace('"many"', '"2k"').replace("1.5", '"15%"').replace("1.0", '"9e-1"')
    (tmp_path / "x.py").write_text(
        output.replace("    return", "    c.model.heads = 7\n    return")
    )
    with pytest.raises(ConfigError) as caught:
        config.load(Run, f"{tmp_path}/x.py", [("data.sequence", "128")])
    flags = [
        word.removeprefix("--config.").partition("=")[::2] for word in caught.value.fix.split()
    ]
    assert {path for path, _ in flags} == {
        *("train.batch", "model.dropout", "optim.b1", "model.heads", "model.max_positions")
    }
    run = config.load(Run, f"{tmp_path}/x.py", [("data.sequence", "128"), *flags]).value
    assert (run.train.batch, run.model.dropout, run.optim.b1) == (2000, 0.15, 0.9)


UNFIT = {
    "batch": (["--config.train.batch=9"], "batch = 9 does not divide by 8"),
    "mesh": (
        ["--config.mesh.tensor=3", "--config.model.kv_heads=4"],
        "the run does not fit 8 devices",
    ),
    "heads": (["--config.mesh.data=1", "--config.mesh.tensor=8"], "does not divide by 8"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_f4_what_does_not_fit_the_devices_is_refused_with_the_nearest_that_does(
    case, tiny_run, tmp_path, capsys
):
    flags, output = UNFIT[case]
    words = ["train", f"--config={tiny_run.config}", f"--workdir={tmp_path}/run", *flags]
    assert jax.device_count() == 8
    assert main(words) == 2
    error = capsys.readouterr().err
    assert output in error
    fixes = [
        dict(re.findall(r"--config\.([\w.]+)=(\S+)", line))
        for line in error.partition("  fix ")[2].splitlines()
    ]
    assert fixes
    assert all(fixes)
    works = 0
    for fix in fixes:
        fixed = config.load(
            Run,
            str(tiny_run.config),
            [*(flag.removeprefix("--config.").split("=") for flag in flags), *fix.items()],
        ).value
        sizes = fixed.mesh.sizes(8)
        assert fixed.train.batch % (sizes["data"] * sizes["fsdp"]) == 0
        works += fixed.model.kv_heads % sizes["tensor"] == 0
    assert works >= 1
    assert [path.name for path in (tmp_path / "run").glob("*.json*")] == ["exit.json"]


def test_f4_it_takes_less_than_five_seconds(tiny_run, tmp_path, record_property):
    command = [sys.executable, "-m", "jaxlm", "train", f"--config={tiny_run.config}"]
    with harness.timing() as took:
        done = started([*command, f"--workdir={tmp_path}/run", "--config.train.batch=9"])
    assert done.returncode == 2, done.stderr
    assert "--config.train.batch=8" in done.stderr
    record_property("F4", str(took))
    took.require(5)


def losses(workdir):
    """Each logged loss with every digit, by split and step."""
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {(r["split"], r["step"]): float(r["loss_nats"]).hex() for r in records}


@pytest.mark.slow
def test_f5_a_run_is_repeated_from_its_directory_alone_bit_for_bit(
    tiny_run, tmp_path, record_property
):
    """In another process, with an empty cache."""
    shutil.copytree(tiny_run.workdir, tmp_path / "copy")
    words = ["train", f"--config={tmp_path}/copy/config.json", f"--workdir={tmp_path}/again"]
    done = started(
        [sys.executable, "-m", "jaxlm", *words, "--quiet"],
        env=os.environ | ONE_DEVICE | {"JAXLM_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "again") == losses(tiny_run.workdir)
    assert len(losses(tmp_path / "again")) == 6
    record_property("F5", "6 of 6 losses the same")
    for name in ("config.json", "tokenizer", "samples.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny_run.workdir / name).read_bytes()


def test_f5_the_run_directory_holds_the_versions_the_flags_and_the_state_of_git(tiny_run):
    facts = json.loads((tiny_run.workdir / "environment.json").read_text())
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    assert {name: facts["packages"][name] for name in packages} == {
        name: importlib.metadata.version(name) for name in packages
    }
    assert facts["variables"]["XLA_FLAGS"] == ONE_DEVICE["XLA_FLAGS"]
    resolved = json.loads((tiny_run.workdir / "config.json").read_text())
    assert config.flatten(config.from_json(Run, resolved)).keys() == json.loads(
        (tiny_run.workdir / "provenance.json").read_text()
    ).keys()  # fmt: skip
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}", facts["git"]["commit"])
        assert isinstance(facts["git"]["changed"], list)
    line = (tiny_run.workdir / "command.sh").read_text().splitlines()[-1]
    assert line == f"jaxlm train --config={tiny_run.config} --workdir={tiny_run.workdir}"
