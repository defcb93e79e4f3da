"""`jaxlm config`: show, explain, diff, validate, on the settings of a real run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

import jaxlm
from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.models.families import union
from jaxlm.models.families.llama import Llama
from jaxlm.recipes.config import Run

FILE = """\
from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(size=""):
    c = config.new(Run)
    c.train.steps = 77
    c.optim.lr = 0.00123
    if size == "big":
        c.train.batch = 4096
    return c
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with a config of our own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(FILE)


def answer(capsys, *words: str, code: int = 0) -> dict:
    assert main(["config", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_show_gives_every_value_and_who_set_it(capsys):
    shown = answer(capsys, "show", "--config=x.py:big", "--config.seed=5")
    assert shown["config"]["train"]["steps"] == 77
    assert shown["provenance"]["train.steps"] == "x.py:7"
    assert shown["provenance"]["train.batch"] == "x.py:10"
    assert shown["provenance"]["seed"] == "--config.seed=5"
    assert shown["provenance"]["train.microbatches"] == "default"
    assert config.from_json(Run, shown["config"]).train.batch == 4096


def test_show_prints_a_tree_with_a_line_for_each_setting(capsys):
    assert main(["config", "show", "--config=x.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train" in lines
    (row,) = [line.split() for line in lines if line.startswith("  steps ") and "77" in line]
    assert row == ["steps", "77", "x.py:7"]
    assert len([line for line in lines if line.split()[1:]]) == len(config.flatten(Run()))


def test_explain_says_what_a_setting_is_and_who_set_it(capsys):
    assert main(["config", "explain", "optim.lr", "--config=x.py"]) == 0
    text = capsys.readouterr().out
    for part in ("optim.lr", "learning rate", "float", "0.00123", "x.py:8", "default", "range"):
        assert part in text


@pytest.mark.parametrize("path", config.flatten(Run()))
def test_every_setting_is_explained(path):
    explanation = config.explain(Run, None, path)
    assert explanation.doc
    assert explanation.type
    assert explanation.value == explanation.default, "the default has two places"


def test_explain_without_a_path_lists_the_sections_and_of_a_section_its_settings(capsys):
    assert {"seed", "model", "optim", "train"} <= set(answer(capsys, "explain")["settings"])
    assert "train.steps" in answer(capsys, "explain", "train")["settings"]
    assert answer(capsys, "explain", "optim", "--config=x.py")["value"] == Run().optim.name


def test_a_config_that_lacks_its_data_is_shown_explained_and_compared(capsys):
    explained = answer(capsys, "explain", "tune.rank", "--config=finetune/lora")
    assert explained["value"] == 16
    assert "finetune/lora.py:" in explained["origin"]
    shown = answer(capsys, "show", "--config=finetune/lora")
    assert shown["config"]["tune"]["rank"] == 16
    assert main(["config", "show", "--config=finetune/lora", "--config.tune.rank=5"]) == 0
    output = capsys.readouterr().out
    assert "caution: a run would be refused: data.train = ('stdlib:train',) does not fit" in output
    assert "5  " in next(line for line in output.splitlines() if line.startswith("  rank "))
    changes = {
        each["path"] for each in answer(capsys, "diff", "finetune/lora", "finetune/sft")["changes"]
    }
    assert "tune.name" in changes
    assert main(["config", "show", "--config=finetune/lora", "--config.tune.rank=x"]) == 2
    assert main(["config", "explain", "tune.rank", "--config.tune.rank=x"]) == 2


def test_a_recipe_is_shown_compared_and_validated_like_the_config_of_a_run(capsys):
    flag = "--config=data/clean_stdlib"
    assert main(["config", "show", flag, "--config.length.least=7"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  least +7 +--config.length.least=7$", text, re.MULTILINE)
    assert main(["config", "diff", "data/clean_stdlib", "data/clean_text"]) == 0
    assert re.search(
        r"^stages +normalize,length,code,pii -> ", capsys.readouterr().out, re.MULTILINE
    )
    assert main(["config", "validate", flag]) == 0
    assert capsys.readouterr().out.startswith("valid: ")
    assert main(["config", "validate", flag, "--config.stages=lengths"]) == ConfigError.code
    assert main(["config", "diff", "quickstart", "data/clean_text"]) == ConfigError.code


def test_explain_of_a_misspelt_setting_names_the_nearest(capsys):
    assert main(["config", "explain", "optim.lrr"]) == 2
    assert "optim.lr" in capsys.readouterr().err


def test_diff_compares_files_run_directories_and_overrides(capsys, tmp_path):
    assert answer(capsys, "diff", "x.py", "x.py") == {"changes": []}
    (change,) = answer(capsys, "diff", "x.py", "x.py:big")["changes"]
    assert change == {"path": "train.batch", "old": Run().train.batch, "new": 4096}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config.to_json(config.load(Run, "x.py").value)))
    assert answer(capsys, "diff", "x.py", "run") == {"changes": []}
    (change,) = answer(capsys, "diff", "run", "x.py", "--config.seed=9")["changes"]
    assert change == {"path": "seed", "old": Run().seed, "new": 9}
    assert main(["config", "diff", "x.py", "x.py:big"]) == 0
    assert "train.batch" in capsys.readouterr().out


def test_validate_is_0_or_2_and_a_file_that_is_not_there_is_66(capsys):
    assert answer(capsys, "validate", "--config=x.py")["valid"] is True
    wrong = answer(
        capsys,
        "validate",
        "--config=x.py",
        "--config.train.steps=0",
        "--config.optim.batch=3",
        code=2,
    )
    assert "2 settings are wrong" in wrong["error"]["what"]
    assert answer(capsys, "validate", "--config=y.py", code=66)["error"]["fix"] == "--config=x.py"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("schedule.end=770",), "ends at step 770 and the run at 77, whose last update has 98%"),
        (("schedule.name=wsd", "schedule.end=100"), "has 100% of the peak"),
        (("schedule.name=linear", "schedule.end=1e6tok"), "ends at step 123 and the run at 77"),
        (("average.name=swa", "average.begin=70", "average.every=9"), "averaged, at update 79"),
    ],
)
def test_validate_names_what_the_run_does_not_reach_and_how_it_would(capsys, settings, reason):
    words = ["validate", "--config=x.py", *(f"--config.{each}" for each in settings)]
    (caution,) = answer(capsys, *words)["cautions"]
    assert reason in caution["why"]
    assert main(["config", *words]) == 0
    assert caution["fix"] in capsys.readouterr().out
    assert answer(capsys, *words, caution["fix"])["cautions"] == []


def test_plot_draws_the_rate_of_every_update_and_says_where(capsys, tmp_path):
    words = ["--config=x.py", "--config.schedule.name=step", "--config.schedule.warmup=7"]
    drawn = answer(capsys, "plot", *words, "--config.schedule.every=40")
    assert [point["step"] for point in drawn["points"]] == list(range(1, 78))
    rates = [point["learning_rate"] for point in drawn["points"]]
    assert rates[0] == pytest.approx(0.00123 / 8)
    assert rates[7:47] == pytest.approx([0.00123] * 40)
    assert rates[47:] == pytest.approx([0.000123] * 30)
    first = (tmp_path / drawn["plot"]).read_bytes()
    assert matplotlib.image.imread(tmp_path / drawn["plot"])[..., :3].std() > 0.01
    assert main(["config", "plot", *words, "--config.train.steps=90000", "--out=a/b.png"]) == 0
    output = capsys.readouterr().out
    assert "0.00123 at most" in output
    assert output.splitlines()[-1].endswith("a/b.png")
    assert (tmp_path / "a/b.png").read_bytes() != first


def test_plot_has_the_last_of_many_steps(capsys):
    points = answer(capsys, "plot", "--config=x.py", "--config.train.steps=123456")["points"]
    assert len(points) == 1000
    assert (points[0]["step"], points[-1]["step"]) == (1, 123456)


def test_plot_is_73_where_nothing_can_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    refused = answer(capsys, "plot", "--config=x.py", "--out=file/rate.png", code=73)
    assert "file" in refused["error"]["where"]


def test_a_misspelt_setting_is_refused_in_two_seconds_without_jax():
    program = (
        "import sys; from jaxlm.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit('imported JAX' if {'jax', 'flax'} & sys.modules.keys() else code)"
    )
    words = ["config", "validate", "--config=x.py", "--config.optim.learning_rate=1e-3"]
    before = os.times()  # the processor's time: other tests may use it too
    root = Path(jaxlm.__path__[0]).parent
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    after = os.times()
    assert sum(after[2:4]) - sum(before[2:4]) < 2
    assert done.returncode == 2, done.stderr
    assert "fix    --config.optim.lr=0.001" in done.stderr


def test_the_fix_of_contradictions_mends_them_all():
    pairs = [
        ("model.family", "llama"),
        ("model.heads", "7"),
        ("train.microbatches", "5"),
        ("optim.learning_rate", "1"),
    ]
    with pytest.raises(ConfigError) as caught:
        config.load(Run, None, pairs)
    words = [
        word.removeprefix("--config.").partition("=")[::2] for word in caught.value.fix.split()
    ]
    assert config.load(Run, None, [pairs[0], *words]).value.optim.lr == 1.0


def test_a_contradiction_with_a_default_names_who_set_the_other_side():
    with pytest.raises(ConfigError) as caught:
        config.load(
            Run, None, [("model.family", "llama"), ("model.heads", "4"), ("model.kv_heads", "8")]
        )
    assert caught.value.where == "--config.model.kv_heads=8"
    kv_heads = Llama().kv_heads
    with pytest.raises(ConfigError) as caught:
        config.load(
            Run,
            None,
            [
                ("model.family", "gpt2"),
                ("model.family", "llama"),
                ("model.heads", str(kv_heads // 2)),
            ],
        )
    assert caught.value.where == f"default, with --config.model.heads={kv_heads // 2}"
    assert caught.value.fix == f"--config.model.kv_heads={kv_heads // 2}"


def test_a_setting_in_the_wrong_section_names_the_right_one():
    known = config.flatten(Run())
    names = [path.rpartition(".")[2] for path in known]
    lonely = [path for path in known if names.count(path.rpartition(".")[2]) == 1 and "." in path]
    missed = []
    for path in lonely:
        section, _, name = path.rpartition(".")
        other = "train" if section != "train" else "optim"
        with pytest.raises(ConfigError) as caught:
            config.load(Run, None, [(f"{other}.{name}", "1")])
        if path not in caught.value.why:
            missed.append(path)
    # `train.step` may as well be a slip for `train.steps` as `watch.step` in the wrong section.
    assert missed == ["watch.step"]


def shown(capsys, *words):
    values = answer(capsys, "show", *words)
    return values["config"]["model"], values["provenance"]


def test_a_published_size_is_one_word_and_what_is_said_beside_it_counts_in_any_order(capsys):
    published, depth = "--config.model=qwen3-0.6b", "--config.model.depth=4"
    model, origins = shown(capsys, published, depth)
    assert (model, origins) == shown(capsys, depth, published)
    expected = config.to_json(union.SIZES["qwen3-0.6b"])
    assert model == expected | {"depth": 4}
    assert expected["depth"] == 28
    assert (origins["model.width"], origins["model.depth"]) == (published, depth)
    assert shown(capsys, "--config=x.py", published)[0] == expected, (
        "nothing of the file's model stays"
    )


def test_a_published_size_in_a_config_file(capsys):
    Path("sized.py").write_text(
        "from jaxlm.core import config\nfrom jaxlm.recipes.config import Run\n\n\n"
        "def get_config():\n    c = config.new(Run)\n    c.model = 'llama3.2-1b'\n"
        "    c.model.max_positions = 4096\n    return c\n"
    )
    model, origins = shown(capsys, "--config=sized.py")
    expected = config.to_json(union.SIZES["llama3.2-1b"])
    assert model == expected | {"max_positions": 4096}
    assert (origins["model.width"], origins["model.max_positions"]) == ("sized.py:7", "sized.py:8")


def test_published_sizes_are_listed_and_one_that_is_misspelt_names_the_nearest(capsys):
    named = answer(capsys, "explain", "model")["named"]
    assert sorted(name for names in named.values() for name in names) == sorted(union.SIZES)
    assert "llama3-8b" in named["llama"]
    assert main(["config", "explain", "model"]) == 0
    assert "qwen3-0.6b" in capsys.readouterr().out
    for typed, fix in (("lama3-8b", "--config.model=llama3-8b"), ("gpt", "--config.model=gpt2")):
        assert main(["config", "validate", f"--config.model={typed}"]) == 2
        assert fix in capsys.readouterr().err
        assert main(["config", "validate", fix, "--config.data.sequence=256", "--quiet"]) == 0
