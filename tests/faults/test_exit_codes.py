"""Every exit code is documented, and is seen by a test."""

import ast
import json
import re
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core import errors

ROOT = Path(__file__).parents[2]
CONTRACT = {0, 1, 2, 65, 66, 69, 70, 71, 73, 74, 75, 76, 77, 79, 130}
ENDS = re.compile(r"\b_exit\b|\bexit\(|def main\b")  # of the sources that end a process
LEFT = re.compile(r"returncode|\bcode\b|\b(main|train|run)\(")  # what is compared with an exit code


def produced() -> set[int]:
    """Exit codes in the sources: of errors, of `os._exit`, and of the command line."""
    codes = {0} | {
        value.code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.JaxlmError)
    }
    for path in (ROOT / "jaxlm").rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if ENDS.search(source) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os._exit", "sys.exit"):
                codes |= constants(node)
            elif isinstance(node, ast.FunctionDef) and node.name == "main":
                codes |= {
                    code
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Return)
                    for code in constants(inner)
                }
    return codes


def constants(node: ast.AST) -> set[int]:
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and type(each.value) is int
    }


def constants_of(side: ast.AST) -> list[int]:
    """Return the number that one side of a comparison is, if it is one."""
    is_number = isinstance(side, ast.Constant) and type(side.value) is int
    return [side.value] if is_number else []


def expected(source: str) -> dict[int, set[str]]:
    """Exit code -> the tests of a file that compare an exit code with it."""
    codes: dict[int, set[str]] = {}
    for test in ast.walk(ast.parse(source)):
        if not isinstance(test, ast.FunctionDef) or not test.name.startswith("test_"):
            continue
        for node in ast.walk(test):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                sides = [node.left, *node.comparators]
                numbers = [code for side in sides for code in constants_of(side)]
                if numbers and any(LEFT.search(ast.unparse(side)) for side in sides):
                    for code in numbers:
                        codes.setdefault(code, set()).add(test.name)
    return codes


def documented() -> set[int]:
    table = (ROOT / "jaxlm/docs/exit_codes.md").read_text()
    return {int(code) for code in re.findall(r"\| (\d+) \|", table)}


def test_h8_every_exit_code_that_there_is_is_of_the_contract_documented_and_seen_by_a_test():
    codes = produced()
    assert codes >= {0, 2, 65, 66, 70, 71, 73, 74, 75, 77, 79, 130}
    assert codes - CONTRACT == set()
    assert codes - documented() == set()
    unseen = set(codes)
    paths = (ROOT / "tests").rglob("test_*.py")
    for path in sorted(paths, key=lambda path: path.parent.name != "faults"):  # most are there
        if not unseen:
            break
        unseen -= expected(path.read_text()).keys()
    assert unseen == set()


def test_h8_an_expectation_is_found_and_another_number_is_not():
    source = (
        "def test_a():\n    assert done.returncode == 79\n    assert len(x) == 76\n"
        "    assert main(words) == 2\n"
    )
    assert expected(source) == {79: {"test_a"}, 2: {"test_a"}}


@pytest.mark.usefixtures("one_device")
def test_h8_a_model_that_does_not_fit_the_memory_ends_with_71(tiny_run, tmp_path, capsys):
    """Its weights would fill more than the addresses that a process has."""
    flags = (
        "--config.model.width=32768",
        "--config.model.hidden=2000000000",
        "--config.checkpoint.space=ignore",
    )
    words = ["train", f"--config={tiny_run.config}", f"--workdir={tmp_path}/run", *flags, "--quiet"]
    assert main(words) == 71
    output = capsys.readouterr().err
    assert output.startswith("out of memory: ")
    assert "Traceback" not in output
    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == 71


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: 3 GiB")])
def test_h8_what_ran_out_of_memory_is_told_from_a_bug(error):
    assert errors.as_jaxlm_error(error).code == 71
    assert errors.as_jaxlm_error(RuntimeError("INTERNAL: x")) is None
