"""The scripts of completion, in the shells that this machine has."""

import shlex
import shutil
import subprocess

import pytest

from jaxlm.cli import completion
from tests.faults.conftest import ROOT

ASK = """\
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE}
    _jaxlm jaxlm
    (IFS=,; echo "${COMPREPLY[*]}")
done
"""
LINES = {  # line: completions, of the word after its last = or :
    "jaxlm tra": "train ",
    "X=1 /usr/bin/jaxlm data ru": "run ",
    "jaxlm train --config.opt": "--config.optim.",
    "jaxlm train --config.optim.l": "--config.optim.layer_decay=,--config.optim.lr=,--"
    "config.optim.lr_scale=",
    "jaxlm train --config.optim.name=adamw": "adamw ,adamw8bit ",
    "jaxlm train --config.model=llama3-8": "llama3-8b ",
    "jaxlm train --config.precision.compute f": "float16 ,float32 ",
    "jaxlm train --config=quick": "quickstart ",
    "jaxlm train --config=tests/cli/test_comp": "tests/cli/test_completion.py ",
    "jaxlm eval --weights ": "ema ,raw ,swa ",
    "jaxlm eval --json --be": "--best ",
    "jaxlm plan --on=h20": "h20 ,h200 ",
    "jaxlm init --on=v5e-1": "v5e-128 ,v5e-16 ",
    "jaxlm data run --config.dedup=s": "spans ,substrings ",
    "jaxlm data run --config.optim.l": "",
    "jaxlm compare jaxlm/mon": "jaxlm/monitor/",
    "jaxlm completion f": "fish ",
    "jaxlm nothing ": "",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in completion.SHELLS:
        (folder / f"jaxlm.{shell}").write_text(completion.script(shell))
    return folder


def test_bash_completes_verbs_flags_settings_values_and_files(scripts):
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source {scripts}/jaxlm.bash\n{ASK}"],
        input="".join(f"{line}\n" for line in LINES),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    answers = [",".join(sorted(line.split(","))) for line in done.stdout.splitlines()]
    assert dict(zip(LINES, answers, strict=True)) == LINES


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes_the_same_words(scripts):
    for line, answer in LINES.items():
        if line.startswith("X=") or line == "jaxlm compare jaxlm/mon":
            continue
        program = f"source {scripts}/jaxlm.fish; complete -C {shlex.quote(line)}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        words = [each.split("\t")[0] for each in done.stdout.splitlines()]
        flag = line.split()[-1].partition("=")[0] + "=" if "=" in line.split()[-1] else ""
        expected = [flag + each.strip() for each in answer.split(",") if each]
        assert sorted(words) == sorted(expected), line


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_reads_its_script(scripts):
    subprocess.run(["zsh", "-n", f"{scripts}/jaxlm.zsh"], check=True)
