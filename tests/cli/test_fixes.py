"""A fix never changes the request: the same value, or the command that lists the values."""

import decimal
import json
import re
import shlex
import typing

import pytest

from jaxlm.cli.arguments import train_next
from jaxlm.cli.main import main
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import ANOTHER, CommandError, ConfigError
from jaxlm.core.nearest import SYNONYMS, distance
from jaxlm.core.sections import choices, read, settings, show
from jaxlm.core.span import Span
from jaxlm.corpus.config import Recipe
from jaxlm.objectives.config import Causal
from jaxlm.recipes.config import Run
from jaxlm.tune.config import Full

SCHEMAS = {"run": Run, "recipe": Recipe}
PLAIN = {
    (name, path): known
    for name, schema in SCHEMAS.items()
    for path, known in settings(schema, {}).items()
    if not known.arms
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a user: texts of two kinds, and no configs."""
    (tmp_path / "mine/more").mkdir(parents=True)
    for number in range(3):
        (tmp_path / f"mine/{number}.txt").write_text(f"text {number} of the user. " * 40)
    (tmp_path / "mine/more/a.jsonl").write_text('{"text": "a record of the user"}\n' * 3)
    (tmp_path / "mine/picture.png").write_bytes(b"\x89PNG\0\xff")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *words):
    """Return the error of a command line."""
    capsys.readouterr()
    assert main([*words, "--json"]) != 0
    return json.loads(capsys.readouterr().out)["error"]


def test_a_folder_of_several_token_shards_is_fixed_to_each_of_them(folder, capsys):
    for name in "ab":
        (folder / f"shards/{name}").mkdir(parents=True)
        (folder / f"shards/{name}/manifest.json").write_text("{}")
    error = refused(capsys, "data", "stats", "--config.data.train=shards")
    assert error["what"] == "shards is a folder of several data sets"
    assert error["fix"] == "--config.data.train=shards/a,shards/b"


def test_a_misspelt_folder_is_fixed_to_the_near_one_and_other_sources_stay(folder, capsys):
    train = "a=mien/*.txt,b=mine/**/*.jsonl"
    error = refused(capsys, "data", "stats", f"--config.data.train={train}")
    assert shlex.split(error["fix"]) == [f"--config.data.train={train.replace('mien', 'mine')}"]


@pytest.mark.parametrize("pattern", ["mine/*.md", "nowhere/*.txt", "mine/empty"])
def test_a_glob_without_files_lists_the_folder_and_names_no_other_text(folder, capsys, pattern):
    error = refused(capsys, "data", "stats", f"--config.data.train={pattern}")
    assert error["fix"] in ("ls mine", "ls .")
    assert ("0.txt" if "mine" in pattern else "mine") in error["why"]


@pytest.mark.parametrize("words", [["--lr=0.1"], ["--lr", "0.1"], ["--learning-rate=0.1"]])
def test_a_setting_given_as_a_flag_is_fixed_to_the_setting_with_its_value(words, capsys):
    for verb in ("train", "plan", "check"):
        assert refused(capsys, verb, *words)["fix"] == "--config.optim.lr=0.1"


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--batch_size=64", "--config.train.batch=64"),
        ("--max-steps=2k", "--config.train.steps=2000"),
        ("--seq_len=4096", "--config.data.sequence=4096"),
        ("--gradient_accumulation_steps=8", "--config.train.microbatches=8"),
        ("--data.train=a.txt", "--config.data.train=a.txt"),
        ("--depth=12", "--config.model.depth=12"),
        ("--steps=100", "--config.train.steps=100"),
        ("--steps=2k", "--config.train.steps=2000"),
        ("--data=mine/*.txt", "jaxlm train --help"),
        ("--epochs=3", "--config.train.epochs=3.0"),
        ("--heads=3", "--config.model.heads=3"),
        ("--batch_size=many", "jaxlm config explain train.batch"),
        ("--num_train_epochs=3", "jaxlm train --help"),
        ("--every=3", "jaxlm train --help"),
        ("--stop-at=3", "--stop_at=3"),
        ("--stop_att=3", "--stop_at=3"),
        ("--forec=3", "jaxlm train --help"),
        ("--forec", "--force"),
    ],
)
def test_an_unknown_flag_keeps_its_value_or_lists_the_flags(flag, fix, capsys):
    assert refused(capsys, "train", "--workdir=r", flag)["fix"] == fix


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("lr", "optim.lr"),
        ("steps", "train.steps"),
        ("batch", "train.batch"),
        ("batch_size", "train.batch"),
        ("seq-len", "data.sequence"),
        ("layers", "model.depth"),
        ("keep", "checkpoint.keep_last"),
    ],
)
def test_the_name_of_a_setting_is_explained_as_the_setting_of_a_flag(name, path, capsys):
    """`lr` was near `rl`, and `batch` near `watch`."""
    assert refused(capsys, "config", "explain", name)["fix"] == f"jaxlm config explain {path}"
    flag = refused(capsys, "train", f"--{name}=1")["fix"]
    assert flag.startswith(f"--config.{path}=1")


def test_a_setting_of_a_recipe_given_as_a_flag_is_fixed_to_the_setting(capsys):
    for word in ("--source=a.txt", "--length.least=5"):
        fix = refused(capsys, "data", "run", "--out=out", word)["fix"]
        assert fix == f"--config.{word.removeprefix('--')}"


def test_names_of_other_trainers_are_settings_that_exist():
    known = settings(Run, {})
    for name, path in Run.ALIASES.items():
        assert path in known or path.rpartition(".")[0] in known, name
        # `--layers=6` is the depth in every other trainer, and log.layers takes no number.
        assert name == "layers" or name not in {each.rpartition(".")[2] for each in known}, name


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("model.layers=6", "--config.model.depth=6"),  # log.layers has the same last part
        ("log.layer=norms", "--config.log.layers=norms"),
        ("model.max_position_embeddings=512", "--config.model.max_positions=512"),
        ("optim.clip=0.5", "--config.optim.clip_norm=0.5"),
        ("data.max_length=64", "--config.data.sequence=64"),
        ("mesh.dp=1", "--config.mesh.data=1"),
        ("rl.num_generations=4", "--config.rl.samples=4"),
        ("train.report_to=wandb", "--config.log.sinks=wandb"),
        ("lora.rank=8", "--config.tune.name=lora --config.tune.rank=8"),
    ],
)
def test_the_name_of_another_trainer_in_a_section_is_fixed_to_the_setting(override, fix, capsys):
    assert refused(capsys, "config", "validate", f"--config.{override}")["fix"] == fix


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("precision.compute=fp16", "--config.precision.compute=float16"),
        ("precision.compute=bf16", "--config.precision.compute=bfloat16"),
        ("precision.compute=half", "--config.precision.compute=float16"),
        ("precision.params=fp16", "jaxlm config explain precision.params"),
        ("precision.compute=float8", "jaxlm config explain precision.compute"),
        ("train.steps=2k", "--config.train.steps=2000"),
        ("train.steps=1M", "--config.train.steps=1000000"),
        ("train.steps=2.5", "jaxlm config explain train.steps"),
        ("train.batch=0", "jaxlm config explain train.batch"),
        ("optim.name=adamv", "--config.optim.name=adamw"),
        ("optim.name=prodigy", "jaxlm config explain optim.name"),
        ("optim=prodigy", "jaxlm config explain optim"),
        ("model=llama3-7b", "jaxlm config explain model"),
        ("train.memory_gib=24GB", "jaxlm config explain train.memory_gib"),
    ],
)
def test_a_wrong_value_is_fixed_to_the_same_value_or_explained(override, fix, capsys):
    assert refused(capsys, "config", "validate", f"--config.{override}")["fix"] == fix


@pytest.mark.parametrize(
    ("path", "method"),
    [
        *(("objective.name", method) for method in Causal.METHODS),
        *(("tune.name", method) for method in Full.METHODS),
    ],
)
def test_a_method_that_is_settings_of_an_arm_is_fixed_to_them(path, method, capsys):
    """`dpo` was fixed to `ppo`, its nearest word."""
    fix = refused(capsys, "config", "validate", f"--config.{path}={method}")["fix"]
    flags = [word.removeprefix("--config.").partition("=")[::2] for word in fix.split()]
    chosen = config.flatten(config.load(Run, None, flags).value)
    if method == "sft":
        assert (chosen["objective.name"], chosen["data.kind"]) == ("causal", "chat")
    else:
        names = {"rslora": ("tune.scale", "root"), "pissa": ("tune.init", "pissa")}
        loss = "objective.loss" if "objective.loss" in chosen else "objective.algorithm"
        setting, value = names.get(method, (loss, method))
        assert chosen[setting] == value


def test_numbers_that_are_taken_need_no_fix():
    for text, number in (("1e6", 10**6), ("2_000", 2000)):
        assert config.load(Run, None, [("train.steps", text)]).value.train.steps == number


def wrong(schema, *overrides):
    """Return the error of some settings, or None."""
    try:
        config.load(schema, None, overrides)
    except ConfigError as error:
        return error
    return None


def wrong_values(known):
    """Return texts that are near to allowed values of a setting, or beyond its range."""
    texts = ["zzz", "nan", "2k", "1.5M", "3 %", "2,000", "-7", "1e99", "0", "1.5", "' 3 '"]
    for word in choices(known.kind):
        texts += [word.upper(), f" {word}", word[:-1], f"{word}x", word.replace("_", "-")]
        texts += [re.sub(r"\d", lambda digit: str(9 - int(digit[0])), word)]
    texts += SYNONYMS if choices(known.kind) else ()
    limits = [n for n in (known.low, known.above, known.high, known.below) if n is not None]
    return [*texts, *(show(limit + step) for limit in limits for step in (-1, 0, 1))]


def number(text):
    """Return the number that a text stands for, read without the code under test, or None."""
    bare = text.strip(" '").replace(",", "")
    if value := re.fullmatch(r"(.*\d)(tok|[smh])", bare):
        return number(value[1])
    scale = {"k": 10**3, "M": 10**6, "%": decimal.Decimal("0.01")}.get(bare[-1:], 1)
    try:
        return decimal.Decimal(bare.rstrip("kM% ")) * scale
    except decimal.InvalidOperation:
        return None


def means_the_same(known, text, value):
    if isinstance(value, Span):
        return number(text) in (number(value.text.rstrip("%")), number(value.text))
    if isinstance(value, bool):
        return text.lower() in ("yes", "on") if value else text.lower() in ("no", "off")
    if isinstance(value, int | float):
        return abs(number(text) - decimal.Decimal(str(value))) <= abs(number(text)) / 10**9
    if isinstance(value, tuple):
        return all(map(lambda a, b: means_the_same(known, a, b), text.split(","), value))
    folded = text.strip(" '").lower().replace("-", "_")
    letters = [re.sub(r"\d", "", word) for word in (folded, str(value))]
    same_numbers = re.findall(r"\d+", folded) in ([], re.findall(r"\d+", str(value)))
    is_slip = same_numbers and distance(*letters) <= max(1, len(str(value)) // 3)
    return SYNONYMS.get(folded) == value or is_slip


@pytest.mark.few(1)
@pytest.mark.parametrize("schema", ["recipe", "run"])
def test_of_every_setting_a_wrong_value_gets_the_same_value_or_an_explanation(schema):
    suggested = explained = 0
    for (name, path), known in PLAIN.items():
        for text in wrong_values(known) if name == schema else ():
            output = wrong(SCHEMAS[schema], (path, text))
            if output is None or "is not allowed" not in output.what:
                continue  # a value that is right by itself, and contradicts another setting
            if output.fix == f"jaxlm config explain {path}":
                explained += 1
                continue
            flags = [word.removeprefix("--config.") for word in shlex.split(output.fix)]
            pairs = dict(f.partition("=")[::2] for f in flags)
            is_arm = (
                typing.get_origin(known.kind) is typing.Literal and len(choices(known.kind)) == 1
            )
            value = pairs[path] if is_arm else read(known.kind, pairs[path])
            assert means_the_same(known, text, value), (path, text, output.fix)
            left = wrong(SCHEMAS[schema], *pairs.items())
            assert left is None or "is not allowed" not in str(left), (path, text, output.fix)
            suggested += 1
    assert suggested > 60
    assert explained > 300


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_an_explanation_is_promised_of_is_explained(name, capsys):
    paths = [path for schema, path in PLAIN if schema == name]
    assert main(["config", "explain", *paths]) == 0
    output = capsys.readouterr().out
    for path in paths:
        assert f"{path}\n" in output


@pytest.mark.parametrize("source", [[], ["--config.source=mine/*.txt"]])
def test_a_recipe_run_without_a_config_names_recipes_that_run_here(folder, source, capsys):
    words = ["data", "run", "--out=out", *source]
    lines = refused(capsys, *words)["fix"].splitlines()
    assert len(lines) == (2 if source else 1)
    for number, line in enumerate(lines):
        assert "--config=data/clean_" in line
        assert main([*words, line, "--sample=1%", f"--out=out{number}", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["config", "validate", "--config"], "quickstart"),
        (["plan", "--config.train.steps=2"], "quickstart"),
        (["data", "run", "--out=out", "--config.source=mine/*.txt"], "data/clean_text"),
    ],
)
def test_outside_of_a_checkout_the_fix_names_shipped_configs(words, first, folder, capsys):
    fix = refused(capsys, *words)["fix"].splitlines()
    assert f"--config={first}" in fix
    words = [word for word in words if word != "--config"]
    for line in fix:
        assert main([*words, line, "--quiet", *(["--sample=1%"] if "run" in words else [])]) == 0
        words = [word.replace("--out=out", "--out=out2") for word in words]


def test_outside_of_a_checkout_the_next_line_names_a_shipped_config(folder):
    line = train_next("out", {"data.validation": ""}).removeprefix("next: ")
    assert shlex.split(line)[:3] == ["jaxlm", "train", "--config=quickstart"]
    assert main(["config", "validate", *shlex.split(line)[2:]]) == 0


@pytest.mark.parametrize("words", [["config", "diff", "a.py"], ["data", "tokenze", "--out=x"]])
def test_a_line_that_is_fixed_keeps_its_other_words(words, capsys):
    fix = refused(capsys, *words)["fix"]
    expected = (
        "jaxlm data tokenize --out=x --json" if "tokenze" in words else "jaxlm config diff --help"
    )
    assert fix == expected


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            "train --config.data.train=mine/0.txt mine/1.txt mine/2.txt --workdir=x",
            "train --config.data.train=mine/0.txt,mine/1.txt,mine/2.txt --workdir=x --json",
        ),
        (
            "train --config=quickstart mine/1.txt mine/2.txt --workdir=x",
            "train --config=quickstart --config.data.train=mine/1.txt,mine/2.txt --workdir=x "
            "--json",
        ),
        (
            "average --workdir=runs/a runs/b --out=x",
            "average --workdir=runs/a --with=runs/b --out=x --json",
        ),
        ("eval --workdir=runs/a runs/b", "eval --help"),
        ("export --workdir=runs/a hf", "export --workdir=runs/a --out=hf --json"),
    ],
)
def test_a_word_after_the_value_of_its_flag_replaces_no_other(words, fix, folder, capsys):
    for name in "ab":
        (folder / f"runs/{name}").mkdir(parents=True)
        (folder / f"runs/{name}/config.json").write_text("{}")
    assert refused(capsys, *words.split())["fix"] == f"jaxlm {fix}"


def test_a_fix_that_begins_another_run_names_a_directory_that_does_not_exist(folder, capsys):
    out = Output(as_json=True)
    for name in ("runs/another", "runs/another-2", "runs/another-3"):
        out.error(CommandError("x", where="y", why="z", fix=f"{ANOTHER} --config.seed=1"))
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["fix"] == f"--workdir={name} --config.seed=1"
        (folder / name).mkdir(parents=True)


def test_types_of_settings_are_those_that_the_property_knows():
    kinds = {typing.get_origin(known.kind) or known.kind for known in PLAIN.values()}
    assert len(kinds) < 12
