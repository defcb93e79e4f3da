"""The notebooks of colab/, executed from top to bottom on small models."""

import ast
import importlib.util
import json
import os
import re
import shlex
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jaxlm.cli.main import main
from tests.cli.test_exchange import write

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "colab/quickstart.ipynb"
OWN_TEXT = ROOT / "colab/own_text.ipynb"
CONTINUED = ROOT / "colab/import_and_continue.ipynb"
FINETUNED = ROOT / "colab/finetune.ipynb"
INSIDE = ROOT / "colab/inside_the_model.ipynb"
PREPARED = ROOT / "colab/prepare_data.ipynb"
TASKS = ROOT / "colab/tasks.ipynb"
SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts/docs/notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)
NOTEBOOKS = [NOTEBOOK, OWN_TEXT, CONTINUED, FINETUNED, INSIDE, PREPARED, TASKS]
LARGEST_BYTES = 700_000  # of a stored notebook
TINY = {
    "train.steps": 2,
    "train.batch": 8,
    "data.train": [str(ROOT / "jaxlm/core/*.py")],
    "data.validation": [str(ROOT / "jaxlm/training/*.py")],
    "data.tokenizer": "bytes",
    "data.sequence": 64,
    "model.depth": 1,
    "sample.every": 2,
    "model.width": 64,
    "sample.max_tokens": 8,
}


def outputs(cell):
    """All text and the kinds of pictures that a cell gave."""
    texts = [
        out.get("text", "") + str(out.get("data", {}).get("text/plain", "")) for out in cell.outputs
    ]
    return "".join(texts), {kind for out in cell.outputs for kind in out.get("data", {})}


def execute(path, tmp_path, monkeypatch, **environment):
    """Execute a notebook on one device, with runs under `tmp_path`; return code cells and text."""
    environment = {"RUNS": str(tmp_path / "runs"), **environment}
    for name, value in environment.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        monkeypatch.setenv(f"JAXLM_NOTEBOOK_{name}", text)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    return cells, "".join(outputs(cell)[0] for cell in cells)


def pictures(cells):
    """Return the number of cells that drew a picture."""
    return sum("image/png" in outputs(cell)[1] for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    cells, printed = execute(NOTEBOOK, tmp_path, monkeypatch, SETTINGS=TINY)
    assert pictures(cells) == 2
    assert re.search(r"\d\.\d{3} bits per byte, perplexity", printed)
    assert "model.width" in printed  # of the comparison
    for run in ("first", "narrow"):
        assert (tmp_path / "runs" / run / "report.html").stat().st_size > 10_000
        assert os.listdir(tmp_path / "runs" / run / "checkpoints")
    assert (tmp_path / "runs/compare.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_model_of_own_text_is_sized_trained_and_exported(tmp_path, monkeypatch):
    texts = tmp_path / "runs/texts"
    texts.mkdir(parents=True)
    for path in (ROOT / "jaxlm/core").glob("*.py"):
        (texts / f"{path.stem}.txt").write_text(path.read_text())
    tiny = {"train.steps": 4, "data.tokenizer": "bytes", "model.depth": 1, "model.width": 32}
    tiny |= {"model.heads": 2, "model.kv_heads": 1, "train.batch": 4}
    cells, printed = execute(OWN_TEXT, tmp_path, monkeypatch, SETTINGS=tiny)
    assert pictures(cells) == 1
    assert "c.model.width = " in printed  # the config that `jaxlm init` wrote
    assert re.search(r"\d\.\d{3} bits per byte of held-out text", printed)
    assert any("text/html" in outputs(cell)[1] for cell in cells)
    assert (tmp_path / "runs/exported/model.safetensors").stat().st_size > 1000


@pytest.mark.slow
def test_a_model_is_imported_trained_further_and_exported(tmp_path, monkeypatch):
    model = str(write(tmp_path / "model"))
    tiny = {"train.steps": 3, "train.batch": 8, "data.sequence": 64}
    _, printed = execute(CONTINUED, tmp_path, monkeypatch, MODEL=model, SETTINGS=tiny)
    for name in ("new", "old"):
        assert re.search(rf"{name}: \d\.\d+ nats before, \d\.\d+ after, [+-]\d\.\d+", printed)
    assert "nats before" in (tmp_path / "runs/continued/report.html").read_text()
    assert "<|note|>" in (tmp_path / "runs/exported/tokenizer.json").read_text()


@pytest.mark.slow
def test_a_model_is_tuned_on_conversations_asked_and_exported(tmp_path, monkeypatch):
    chat = {"train.steps": 3, "train.batch": 4}
    _, printed = execute(FINETUNED, tmp_path, monkeypatch, BASE=TINY, CHAT=chat)
    assert "\u00abImport os: os." in printed
    assert "exact match" in printed
    assert (tmp_path / "runs/adapter/adapter_model.safetensors").stat().st_size > 1000
    assert os.listdir(tmp_path / "runs/merged/checkpoints")


@pytest.mark.slow
def test_a_model_is_looked_into(tmp_path, monkeypatch):
    cells, printed = execute(INSIDE, tmp_path, monkeypatch, SETTINGS=TINY)
    assert re.search(r"\d+\.\d\d nats, \d+\.\d\d bits per byte", printed)
    assert re.search(r"layer \d, head \d: \d+% of its attention", printed)
    assert "layer 1" in printed
    assert pictures(cells) == 3


@pytest.mark.slow
def test_runs_are_scored_on_tasks_and_compared(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    cells, printed = execute(TASKS, tmp_path, monkeypatch, SETTINGS=TINY)
    assert pictures(cells) == 1
    assert re.search(r"modules +accuracy +\d\.\d{4}", printed)
    assert "made-brackets" in printed
    assert "json.loads: " in printed
    assert len(list((tmp_path / "runs").glob("*/evals/*/results.json"))) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_badge_opens_the_notebook_in_colab_from_the_address_of_the_repository(path):
    source = nbformat.read(path, as_version=4).cells[0].source
    assert source == notebooks.with_badge(source, path.name, notebooks.repository())
    badged = notebooks.with_badge(source, path.name, "https://github.com/some/where")
    title, badge, *rest = badged.split("\n")
    assert badge.endswith(
        f"(https://colab.research.google.com/github/some/where/blob/main/colab/{path.name})"
    )
    assert notebooks.with_badge(badged, path.name, "") == "\n".join([title, *rest])


def test_on_a_t4_both_first_notebooks_fit_and_take_at_most_15_minutes(tmp_path, capsys):
    """The commands of the cells, for a GPU that Colab lends; compiling is not in the plan."""
    quickstart, own_text = (
        "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        for path in (NOTEBOOK, OWN_TEXT)
    )
    (command,) = re.findall(r"-m jaxlm (plan .* --on=t4)", quickstart)
    assert main([*shlex.split(command), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["hours"][1] < 0.25
    (minutes,) = re.findall(r'= \("t4", (\d+)\) if shutil.which\("nvidia-smi"\)', own_text)
    (command,) = re.findall(r"-m jaxlm (init .*) --out", own_text)
    (tmp_path / "a.txt").write_text((ROOT / "README.md").read_text() * 60)
    words = command.format(data=tmp_path, machine="t4", minutes=minutes)
    assert main([*shlex.split(words), f"--out={tmp_path}/mine.py", "--json"]) == 0
    low, high = json.loads(capsys.readouterr().out)["minutes"]
    assert 0 < low < high <= int(minutes) == 15


def test_on_a_t4_the_notebook_of_fine_tuning_trains_both_models_in_15_minutes(capsys):
    """With the settings of its cells, for the sizes of the quickstart."""
    cells = "\n".join(cell.source for cell in nbformat.read(FINETUNED, as_version=4).cells)
    settings = {
        name: json.loads(text) for name, text in re.findall(r"_(BASE|CHAT)\", '(.*)'", cells)
    }
    chat = {"tune.name": "lora", "train.batch": 16, "data.sequence": 128}
    hours = 0.0
    for each in (settings["BASE"], settings["CHAT"] | chat):
        flags = [f"--config.{name}={value}" for name, value in each.items()]
        assert main(["plan", "--config=quickstart", *flags, "--on=t4", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["fits"]
        hours += plan["hours"][1]
    assert 0 < hours < 0.25


def test_every_notebook_begins_by_installing_what_its_runtime_needs():
    firsts = []
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = next(cell.source for cell in cells if cell.cell_type == "code")
        assert all(f'"{extra}"' in code for extra in ("cuda12", "tpu"))
        firsts.append(re.sub(r"needed = .*|None, \(device, .*", "", code))
    assert len(set(firsts)) == 1


SHELL = re.compile(r"^(\s*)[!%].*", re.MULTILINE)  # lines that are no Python


def form(text):
    """Return a pattern of the output of an f-string: its words, and numbers of its precision."""
    parts = []
    for part in text.values:
        if isinstance(part, ast.Constant):
            parts.append(re.escape(part.value))
            continue
        spec = part.format_spec.values[0].value if part.format_spec else ""
        digits = re.fullmatch(r"\+?\.(\d)f", spec)
        parts.append(rf"[+-]?\d+\.\d{{{digits[1]}}}" if digits else r"[\s\S]*?")
    return "".join(parts)


def expected_outputs(source):
    """Return patterns of the text that a cell prints, and the kinds of output that it has."""
    tree = ast.parse(SHELL.sub(r"\1pass", source))
    prints = [node for node in ast.walk(tree) if getattr(node, "func", None)]
    prints = [node for node in prints if getattr(node.func, "id", "") == "print"]
    patterns = [form(arg) for node in prints for arg in node.args if isinstance(arg, ast.JoinedStr)]
    kinds = {"stream"} if prints or SHELL.search(source) else set()
    last = tree.body[-1]
    is_value = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
    if is_value and last.value not in prints:
        kinds.add("execute_result")
    if "plt." in source:
        kinds.add("display_data")
    return patterns, kinds


def test_the_outputs_that_a_cell_has_to_have_are_read_from_its_source():
    source = 'x = 1\nfor a in "ab":\n    print(f"{a}: {x:+.2f} (nats)", x)\nx'
    patterns, kinds = expected_outputs(source)
    assert kinds == {"stream", "execute_result"}
    assert re.fullmatch(patterns[0], "a: -0.25 (nats)")
    assert not re.search(patterns[0], "a: 0.251 (nats)")
    assert expected_outputs("!ls\nplt.legend();")[1] == {"stream", "display_data"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS), ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_its_cells(path):
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    repeat = f"python scripts/docs/notebooks.py {path.stem}"
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], repeat
    for cell in code:
        patterns, kinds = expected_outputs(cell.source)
        present = {output.output_type for output in cell.outputs}
        assert kinds <= present, (cell.source, present)
        assert "error" not in present
        for pattern in patterns:
            assert re.search(pattern, outputs(cell)[0]), (pattern, cell.outputs)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS), ids=lambda path: path.stem)
def test_what_a_notebook_printed_is_of_its_present_cells(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)
    repeat = f"python scripts/docs/notebooks.py {path.stem}"
    assert notebook.metadata.get("executed") == notebooks.digest(notebook), repeat
    text = path.read_text()
    assert len(text) < LARGEST_BYTES
    assert not re.search(r"/(root|home|tmp)/", text)
