"""Laws of sections: round trips, resolution, provenance, explanation."""

import copy
import dataclasses
import json
import shlex
import textwrap
from collections.abc import Iterator
from typing import ClassVar, Literal

import pytest

from jaxlm.core import config, problems
from jaxlm.core.config import Span, setting
from jaxlm.core.errors import ConfigError, InputMissing


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"
    lr: float = setting(3e-4, "peak learning rate", above=0.0)
    beta1: float = setting(0.9, "decay of the first moment", low=0.0, below=1.0)
    decay: float = setting(0.1, "weight decay", low=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion:
    """Sign momentum."""

    name: Literal["lion"] = "lion"
    lr: float = setting(1e-4, "peak learning rate", above=0.0)
    momentum: float = setting(0.99, "decay of the momentum", low=0.0, below=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The loop."""

    steps: int = setting(1000, "updates in the whole run", unit="steps", low=1)
    batch: int = setting(32, "rows of the global batch", unit="rows", low=1)
    microbatches: int = setting(1, "parts of a batch", low=1)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        if self.batch % self.microbatches:
            yield (
                "microbatches",
                f"batch = {self.batch} does not divide by it",
                "--config.train.microbatches=1",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The text."""

    train: tuple[str, ...] = setting(("a*.txt",), "globs of training text")
    key: str | None = setting(None, "field of a record that holds the text")
    vocab: int | Literal["auto"] = setting("auto", "rows of the embedding", low=2)
    shuffle: bool = setting(True, "whether rows are mixed")
    packing: Literal["concat", "first_fit"] = setting("concat", "how rows are filled")
    every: Span = setting(Span.parse("5%"), "how often")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run."""

    ALIASES: ClassVar[dict[str, str]] = {"learning_rate": "optim.lr"}

    seed: int = setting(0, "seed of everything")
    optim: AdamW | Lion = AdamW()
    train: Train = Train()
    data: Data = Data()

    def problems(self) -> Iterator[tuple[str, str, str]]:
        if self.optim.lr > 1 and self.train.steps > 10:
            yield "optim.lr", "that many steps diverge", "--config.optim.lr=1e-3"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a config file; the lines of its get_config start at line 5."""
    monkeypatch.chdir(tmp_path)

    def write(body: str, name: str = "x.py", signature: str = "") -> str:
        head = (
            "import schema_of_test\nfrom jaxlm.core import config\n\n"
            f"def get_config({signature}):\n"
        )
        (tmp_path / name).write_text(
            head + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
        )
        return name

    import sys
    import types

    module = types.ModuleType("schema_of_test")
    module.Run = Run
    monkeypatch.setitem(sys.modules, "schema_of_test", module)
    return write


def a_config(lines: str = "") -> str:
    return f"c = config.new(schema_of_test.Run)\n{textwrap.dedent(lines).strip()}\nreturn c"


def load(file: str | None = None, *overrides: tuple[str, str]) -> config.Loaded:
    return config.load(Run, file, overrides)


def failure(file: str | None = None, *overrides: tuple[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(file, *overrides)
    assert len(str(caught.value).splitlines()) <= 8
    return caught.value


def test_json_gives_the_same_section_back_to_the_last_bit():
    run = Run(
        optim=Lion(lr=0.1 + 0.2, momentum=5e-324),
        data=Data(train=("a", "b,c"), vocab=7, key="None", every=Span.parse("1e6tok")),
    )
    text = json.dumps(config.to_json(run))
    assert config.from_json(Run, json.loads(text)) == run
    steps = Run(data=Data(every=Span.parse(500)))
    assert config.to_json(steps)["data"]["every"] == 500
    assert config.from_json(Run, config.to_json(steps)) == steps


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", True),
        ("seed", 1.0),
        ("seed", "1"),
        ("optim.lr", "1e-3"),
        ("optim.lr", None),
        ("optim.lr", float("nan")),
        ("data.shuffle", 1),
        ("data.train", "a"),
        ("data.train", [1]),
        ("data.packing", "best"),
        ("data.every", "often"),
        ("data.vocab", 1),
        ("optim.name", "sgd"),
        ("optim.name", None),
        ("optim.rate", 1.0),
        ("train", 3),
        ("extra", {"a": 1}),
    ],
)
def test_json_of_another_type_or_name_is_refused(path, value):
    raw = config.to_json(Run())
    section, _, name = path.rpartition(".")
    (raw[section] if section else raw)[name] = value
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        config.from_json(Run, raw)


def test_an_int_is_taken_for_a_float_and_stored_as_one():
    raw = config.to_json(Run())
    raw["optim"]["lr"] = 1
    lr = config.from_json(Run, raw).optim.lr
    assert lr == 1.0
    assert type(lr) is float


def test_a_setting_newer_than_the_file_takes_its_default():
    raw = config.to_json(Run(seed=7))
    del raw["train"]["batch"], raw["data"]
    assert config.from_json(Run, raw) == Run(seed=7)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("seed", "1e6", 1_000_000),
        ("seed", "-3", -3),
        ("seed", "12345678901234567890", 12345678901234567890),
        ("optim.lr", "1e-3", 1e-3),
        ("optim.lr", "1", 1.0),
        ("data.shuffle", "false", False),
        ("data.shuffle", "True", True),
        ("data.key", "None", None),
        ("data.key", "text", "text"),
        ("data.vocab", "auto", "auto"),
        ("data.vocab", "8e3", 8000),
        ("data.train", "a,b", ("a", "b")),
        ("data.train", '["a,b", "c"]', ("a,b", "c")),
        ("data.train", "('a', 'b')", ("a", "b")),
        ("data.train", "[ab]*.txt", ("[ab]*.txt",)),
        ("data.every", "500", Span.parse(500)),
        ("data.every", "10m", Span.parse("10m")),
    ],
)
def test_text_of_the_command_line_is_read_by_type(path, text, value):
    loaded = config.flatten(load(None, (path, text)).value)[path]
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("seed", "1.5"),
        ("seed", "true"),
        ("seed", "1e999999999"),
        ("optim.lr", "fast"),
        ("optim.lr", "inf"),
        ("data.every", "1e999"),
        ("data.vocab", "0"),
        ("train.steps", "0"),
        ("optim.beta1", "1.0"),
    ],
)
def test_text_that_means_no_allowed_value_is_refused_and_no_other_value_is_suggested(path, text):
    error = failure(None, (path, text))
    assert f"--config.{path}={text}" in error.where
    assert error.fix == f"jaxlm config explain {path}"


@pytest.mark.parametrize(
    ("path", "text", "same"),
    [
        ("seed", "2k", 2000),
        ("seed", "'7'", 7),
        ("seed", "1,000", 1000),
        ("train.steps", "1.5M", 1_500_000),
        ("train.steps", "2Ki", 2048),
        ("optim.lr", "1%", 0.01),
        ("data.shuffle", "yes", True),
        ("data.shuffle", "OFF", False),
        ("data.packing", "firstfit", "first_fit"),
        ("data.packing", "First-Fit", "first_fit"),
        ("data.every", "10 minutes", Span.parse("10m")),
        ("data.every", "2k", Span.parse(2000)),
    ],
)
def test_a_value_in_another_notation_is_refused_and_the_fix_says_the_same(path, text, same):
    error = failure(None, (path, text))
    (word,) = shlex.split(error.fix)
    fixed, _, value = word.removeprefix("--config.").partition("=")
    assert fixed == path
    assert config.flatten(load(None, (fixed, value)).value)[path] == same


def test_the_fix_of_a_misspelt_choice_is_the_nearest_choice():
    assert failure(None, ("data.packing", "firstfit")).fix == "--config.data.packing=first_fit"
    assert failure(None, ("optim.name", "loin")).fix == "--config.optim.name=lion"
    assert failure(None, ("optim", "lion")).fix == "--config.optim.name=lion"


def test_the_order_of_overrides_does_not_matter():
    pairs = [("optim.momentum", "0.5"), ("optim.name", "lion"), ("optim.lr", "0.01")]
    expected = Run(optim=Lion(lr=0.01, momentum=0.5))
    assert load(None, *pairs).value == load(None, *reversed(pairs)).value == expected


def test_an_arm_named_on_the_command_line_drops_what_the_file_said_of_the_other(write):
    file = write(a_config("c.optim.lr = 0.5\nc.optim.beta1 = 0.8"))
    swapped = load(file, ("optim.name", "lion"))
    assert swapped.value.optim == Lion()
    assert str(swapped.provenance["optim.lr"]) == "default"
    assert load(file, ("optim.name", "adamw")).value.optim == AdamW(lr=0.5, beta1=0.8)


def test_a_config_file_swaps_arms_and_each_value_knows_its_line(write):
    file = write(a_config('c.optim.name = "lion"\nc.optim.momentum = 0.5\nc.data.every = 500'))
    loaded = load(file, ("train.steps", "7"))
    assert loaded.value == Run(
        optim=Lion(momentum=0.5), train=Train(steps=7), data=Data(every=Span.parse(500))
    )
    where = {path: str(origin) for path, origin in loaded.provenance.items()}
    assert where["optim.name"] == "x.py:6"
    assert where["optim.momentum"] == "x.py:7"
    assert where["optim.lr"] == "default"
    assert where["train.steps"] == "--config.train.steps=7"
    assert where.keys() == config.flatten(loaded.value).keys()


def test_whole_sections_can_be_assigned_and_updated(write):
    file = write(
        a_config(
            'c.optim = dict(momentum=0.5, name="lion")\n'
            'c.update({"train": {"steps": 5}, "seed": 3})'
        )
    )
    assert load(file).value == Run(seed=3, optim=Lion(momentum=0.5), train=Train(steps=5))


def test_references_and_copies_of_a_config_hold(write):
    c = config.new(Run)
    c.train.batch = c.train.get_ref("steps")
    c.train.steps = 64
    assert c.train.batch == 64
    twin = copy.deepcopy(c)
    twin.optim.name = "lion"
    assert (c.optim.name, twin.optim.name) == ("adamw", "lion")
    with pytest.raises(ConfigError, match=r"optim\.moment"):
        twin.optim.moment = 1.0


def test_a_config_in_the_making_is_a_locked_mapping_with_every_field():
    import ml_collections

    c = config.new(Run)
    assert isinstance(c, ml_collections.ConfigDict)
    assert c.is_locked
    assert list(c) == ["seed", "optim", "train", "data"]
    assert "lr" in c.optim
    assert not hasattr(c.optim, "momentum")
    assert c.optim.get("momentum", 1) == 1


def test_an_unknown_setting_in_a_file_is_named_with_its_line_and_a_line_to_paste(write):
    error = failure(write(a_config("c.optim.learning_rate = 1e-3")))
    assert error.what == "unknown setting optim.learning_rate"
    assert error.where == "x.py:6"
    assert "optim.lr" in error.why
    assert "peak learning rate" in error.why
    assert "0.0003" in error.why
    assert error.fix == "c.optim.lr = 1e-3"


def test_a_misspelt_section_in_a_file_is_named_with_its_line():
    c = config.new(Run)
    with pytest.raises(ConfigError, match="nearest is optim"):
        c.optm.lr = 1.0


def test_a_plain_configdict_is_as_good_and_may_be_partial(write):
    file = write(
        "import ml_collections\nreturn ml_collections.ConfigDict({'optim': {'name': 'lion', "
        "'lr': 1}})"
    )
    loaded = load(file)
    assert loaded.value == Run(optim=Lion(lr=1.0))
    assert str(loaded.provenance["optim.lr"]) == "x.py"
    assert str(loaded.provenance["seed"]) == "default"


def test_a_file_takes_an_argument(write):
    file = write(a_config("c.train.steps = 5 if arg == 'a:b' else 6"), signature="arg=''")
    assert load(f"{file}:a:b").value.train.steps == 5
    assert load(file).value.train.steps == 6
    assert "no argument" in failure(f"{write(a_config(), 'y.py')}:a").what
    error = failure(write(a_config(), "z.py", signature="arg"))
    assert error.fix == "add a colon and the value of arg to --config=z.py"


def test_all_problems_come_in_one_error_with_their_places(write):
    file = write(a_config('c.optim.lr = -1.0\nc.train.steps = "many"'))
    error = failure(file, ("data.shuffel", "true"), ("seed", "x"))
    text = str(error)
    assert "4 settings are wrong" in error.what
    for part in (
        "x.py:6: optim.lr = -1.0",
        "x.py:7: train.steps = 'many'",
        "--config.data.shuffel=true",
        "data.shuffle",
        "--config.seed=x",
    ):
        assert part in text
    assert error.fix == "jaxlm config explain seed optim.lr train.steps"


def test_the_nearest_setting_is_named_under_a_long_path(tmp_path):
    folder = tmp_path / "/".join(f"{number:060}" for number in range(3))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"train": {"stpes": 3}, "optim": {"lr": -1}}')
    assert "the nearest is train.steps: " in failure(str(folder / "config.json")).why


def test_a_long_line_of_a_problem_ends_with_a_word():
    line = problems.Problem("it is wrong", "because " * 60, problems.DEFAULT).line
    assert len(line) < 200
    assert line.endswith(" because ...")


def test_problems_with_values_in_other_notations_are_fixed_together(write):
    file = write(a_config('c.optim.lr = "1%"\nc.train.steps = "2k"'))
    error = failure(file, ("data.shuffel", "true"), ("seed", "10k"))
    pairs = [flag.removeprefix("--config.").partition("=")[::2] for flag in error.fix.split()]
    loaded = load(file, *pairs).value
    assert (loaded.optim.lr, loaded.train.steps, loaded.seed) == (0.01, 2000, 10_000)


def test_more_problems_than_lines_are_counted(write):
    names = [f"c{letter}" for letter in "abcdefghijkl"]
    error = failure(None, *[(f"optim.{name}", "1") for name in names])
    assert "12 settings are wrong" in error.what
    assert "and 8 more" in str(error)
    assert len(str(error).splitlines()) == 8


def test_contradictions_are_found_inside_a_section_and_across_sections():
    inside = failure(None, ("train.microbatches", "5"))
    assert "batch = 32" in inside.why
    assert inside.fix == "--config.train.microbatches=1"
    across = failure(None, ("optim.lr", "2"))
    assert across.what.startswith("optim.lr")
    assert across.where == "--config.optim.lr=2"


def test_a_long_value_is_quoted_in_part():
    assert len(str(failure(None, ("seed", "x" * 100_000)).what)) < 100


def test_a_setting_of_the_wrong_section_is_found_in_the_right_one():
    error = failure(None, ("optim.batch", "64"))
    assert "train.batch" in error.why
    assert error.fix == "--config.train.batch=64"


def test_a_setting_of_another_arm_says_so():
    assert "it is a setting of another optim" in failure(None, ("optim.momentum", "0.9")).why


def test_a_file_that_does_not_exist_is_missing_input(write):
    write(a_config(), "quickstart.py")
    with pytest.raises(InputMissing) as caught:
        load("quikstart.py:long")
    assert caught.value.code == 66
    assert caught.value.fix == "--config=quickstart.py:long"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("x = 1\nraise RuntimeError('boom')", 6),
        ("return 1 +", 5),
        ("import nowhere_to_be_found", 5),
        ("raise SystemExit(3)", 5),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(write, body, line):
    assert failure(write(body)).where == f"x.py:{line}"


def test_a_file_without_get_config_or_with_another_result_is_refused(write, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "get_config" in failure("empty.py").what
    assert "int" in failure(write("return 3")).what


def test_a_changed_file_is_read_again_and_leaves_no_byte_code(write, tmp_path):
    for steps in (5, 6):
        assert load(write(a_config(f"c.train.steps = {steps}"))).value.train.steps == steps
    assert not (tmp_path / "__pycache__").exists()


def test_a_resolved_config_is_read_from_its_file_or_its_directory_but_never_run(write, tmp_path):
    run = Run(seed=9, optim=Lion())
    (tmp_path / "config.json").write_text(json.dumps(config.to_json(run)))
    (tmp_path / "get_config.py").write_text("raise SystemExit('ran')")
    for name in ("config.json", str(tmp_path)):
        assert load(name).value == run
    assert load("config.json", ("optim.name", "adamw")).value.optim == AdamW()
    assert str(load("config.json").provenance["seed"]) == "config.json"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"seed": 1, "seed": 2}', '{"optim": {"lr": NaN}}', "[" * 100_000, '{"seed": "1"}'],
)
def test_a_damaged_resolved_config_is_refused(write, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in str(failure("config.json"))


def test_diff_names_what_changed_and_what_only_one_arm_has():
    changes = config.diff(Run(), Run(seed=1, optim=Lion(lr=3e-4)))
    assert {change.path: (change.old, change.new) for change in changes} == {
        "seed": (0, 1),
        "optim.name": ("adamw", "lion"),
        "optim.beta1": (0.9, config.ABSENT),
        "optim.decay": (0.1, config.ABSENT),
        "optim.momentum": (config.ABSENT, 0.99),
    }
    assert config.diff(Run(), Run()) == []


def test_explain_says_all_there_is_to_know(write):
    explanation = config.explain(Run, load(write(a_config("c.optim.beta1 = 0.8"))), "optim.beta1")
    assert (explanation.doc, explanation.type, explanation.range) == (
        "decay of the first moment",
        "float",
        ">= 0 and < 1",
    )
    assert (explanation.default, explanation.value, str(explanation.origin)) == (0.9, 0.8, "x.py:6")
    assert config.explain(Run, None, "train.steps").unit == "steps"
    assert config.explain(Run, None, "optim.momentum").value is config.ABSENT
    assert config.explain(Run, None, "optim.name").type == "one of adamw, lion"
    assert config.explain(Run, None, "optim").settings == (
        "optim.name",
        "optim.lr",
        "optim.beta1",
        "optim.decay",
    )
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config.explain(Run, None, "optim.lrr")


def test_a_section_with_a_setting_named_like_a_method_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Bad:
        items: int = setting(1, "hides a method")

    with pytest.raises(TypeError, match="items"):
        config.new(Bad)
