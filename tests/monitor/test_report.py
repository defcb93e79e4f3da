import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.monitor import plots, report

ROOT = Path(__file__).parents[2]
VOID = {"meta", "img", "br", "link", "input", "hr"}


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def files(tmp_path):
    """A run directory without pictures."""
    train = [
        {
            "step": s,
            "time_unix": 1e9 + s,
            "split": "train",
            "loss_nats": 5 / s,
            "tokens": 100 * s,
            "tokens_per_second": 1e4,
            "mfu": None,
            "peak_bytes": 2**30,
            "layers/0/grad_norm": 1 / s,
            "layers/1/grad_norm": 2 / s,
        }
        for s in range(1, 9)
    ]
    val = {
        "step": 8,
        "time_unix": 1e9 + 9,
        "split": "val",
        "loss_nats": 0.75,
        "perplexity": 2.117,
        "bits_per_byte": 1.6,
    }
    jsonl(tmp_path / "metrics.jsonl", [*train, val])
    jsonl(
        tmp_path / "samples.jsonl",
        [{"step": s, "prompt": "a <b>", "text": f"<script>alert({s})</script>"} for s in (4, 8)],
    )
    warnings = {3: "2 documents & more were skipped", 5: "step 5 was not applied"}
    jsonl(tmp_path / "warnings.jsonl", [{"step": s, "text": t} for s, t in warnings.items()])
    for name, value in {
        "config.json": {"seed": 1, "optim": {"name": "adamw", "lr": 3e-4}},
        "provenance.json": {
            "optim.lr": "configs/x.py:14",
            "seed": "default",
        },
        "environment.json": {"packages": {"jax": "0.12"}},
        "exit.json": {"code": 0, "step": 8, "cause": "finished", "time_unix": 2e9},
        "baselines.json": {"gzip -9": 1.86, "xz -9e": 1.52},
    }.items():
        (tmp_path / name).write_text(json.dumps(value))
    return tmp_path


@pytest.fixture
def run(files):
    plots.draw(files)
    return files


class Page(HTMLParser):
    """Checks that tags close, and keeps texts and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def page(run):
    return Page(report.write(run).read_text(encoding="utf-8"))


def charts_of(page):
    figures = [json.loads(value) for _, name, value in page.attributes if name == "data-chart"]
    return {each["unit"]: each for each in figures}


def test_the_run_is_a_sentence_with_its_verdict(files):
    config = {"model": {"family": "llama"}, "data": {"train": ["a"]}, "train": {"steps": 9}}
    (files / "config.json").write_text(json.dumps(config))
    (files / "environment.json").write_text('{"devices": {"cpu": 2}}')
    page = Page(report.write(files).read_text())
    (lead,) = [text for text in page.texts if text.startswith("A llama")]
    assert lead == (
        "A llama model, trained on a on 2 x cpu for 8 of 9 steps. The best loss on val is 0.7500 "
        "nats, at step 8, 1.600 bits per byte: better than gzip -9, worse than xz -9e."
    )


def test_the_loss_has_all_sets_its_best_step_and_the_coders(page):
    chart = charts_of(page)["nats per token"]
    train, val = chart["series"]
    assert (train["name"], train["x"][:2]) == ("train", [[*range(1, 9)], [*range(100, 900, 100)]])
    assert (val["y"], val["marked"], chart["mark"]) == ([0.75], True, 1)
    assert chart["levels"] == [["gzip -9", 0.871875], ["xz -9e", 0.7125]]


def test_tokens_of_a_sample_are_colored_by_surprise(files):
    tokens = [["a", 0.25], ["b <", 3.0], ["rest that a stop cut", 9.0]]
    sample = {"step": 8, "prompt": "p", "text": "ab <", "tokens": tokens}
    jsonl(files / "samples.jsonl", [sample])
    page = Page(report.write(files).read_text())
    titles = [value for tag, name, value in page.attributes if (tag, name) == ("i", "title")]
    assert titles == ["0.25 nats", "3.00 nats"]
    assert "b <" in page.texts


def test_a_folder_that_cannot_be_listed_has_no_links(files, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(report.Path, "iterdir", refuse)
    assert "/report.html" not in report.render(files)


def test_runs_in_the_same_folder_are_linked(files):
    other = files / "b & c"
    other.mkdir()
    assert report.render(files / "a").count("/report.html") == 0
    (other / "report.html").touch()
    (other / "metrics.jsonl").touch()
    assert 'href="../b%20%26%20c/report.html">b &amp; c<' in report.render(files / "a")


def test_colors_have_the_contrast_of_aa_in_both_themes():
    def luminance(text):
        channels = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    blocks = report.STYLE.split("@media (prefers-color-scheme: dark)")
    for block in (blocks[0], blocks[1].partition("} }")[0]):
        texts = dict(re.findall(r"--(\w+): (#\w+)", block))
        colors = {k: luminance(f"#{v[1:] * 2}" if len(v) == 4 else v) for k, v in texts.items()}
        pairs = [(name, "bg") for name in colors if name not in ("bg", "line", "soft", "hot")]
        for text, ground in [*pairs, ("fg", "soft"), ("dim", "soft"), ("fg", "hot")]:
            low, high = sorted((colors[text], colors[ground]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground, texts)


CHROMIUM = shutil.which("chromium")
MEASURE = """<body><p id=w></p><iframe id=f style="border:0;width:{width}px;height:2000px"
src="file://{page}"></iframe><script>f.onload = () => {{ const d = f.contentDocument;
w.textContent = "measured " + d.documentElement.scrollWidth + " of " + f.clientWidth + ", charts " +
[...d.querySelectorAll("figure.chart svg path.cursor")].length;
const form = d.querySelector("form.controls"), svg = d.querySelector("figure.chart svg");
form.elements.axis.value = "tokens"; form.elements.smooth.value = ".5";
form.dispatchEvent(new f.contentWindow.Event("input"));
const right = svg.getBoundingClientRect().right;
svg.dispatchEvent(new f.contentWindow.PointerEvent("pointermove", {{clientX: right}}));
w.textContent += ", " + svg.parentNode.querySelector("output").textContent; }};</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_a_browser_draws_the_charts_and_scrolls_nothing_sideways(run, width, tmp_path):
    page = report.write(run)
    frame = tmp_path / "frame.html"
    frame.write_text(MEASURE.format(width=width, page=page))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += ["--allow-file-access-from-files"]
    words += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *words, f"file://{frame}"], capture_output=True, text=True)
    (measured,) = re.findall(r"measured (\d+) of (\d+), charts (\d+)", done.stdout)
    assert measured == (str(width), str(width), "2")
    assert re.search(r", step 8, 800 tokens: train 0\.\d+, val 0\.75<", done.stdout)


# Ratios of WCAG 2.2: of each text to what is painted below it, 4.5 (1.4.3); of parts of a picture,
# 3 (1.4.11). A map has to differ from the page by its frame and its strongest cells, and these from
# the faintest; two neighboring shades of a scale cannot.
CONTRAST = """<body><p id=out></p>{frames}<script>
const brush = document.createElement("canvas").getContext("2d", {{ willReadFrequently: true }});
function channels(color) {{
  brush.clearRect(0, 0, 1, 1); brush.fillStyle = "#0000"; brush.fillStyle = color;
  brush.fillRect(0, 0, 1, 1); const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255]; }}
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
function ground(element, view) {{
  if (!element || element.nodeType !== 1) return [255, 255, 255];
  const below = ground(element.parentNode, view);
  return over(channels(view.getComputedStyle(element).backgroundColor), below); }}
const luminance = color => color.slice(0, 3).map(c => c / 255)
  .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
function ratio(a, b) {{
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + .05) / (low + .05); }}
function measured(frame) {{
  const page = frame.contentDocument, view = frame.contentWindow, faults = [];
  page.querySelectorAll("details").forEach(each => each.open = true);
  const style = element => view.getComputedStyle(element);
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (texts.nextNode()) {{
    const text = texts.currentNode, element = text.parentElement, range = page.createRange();
    range.selectNodeContents(text);
    if (!text.data.trim() || !range.getBoundingClientRect().width) continue;
    const is_drawn = element.namespaceURI.endsWith("svg");
    const color = channels(is_drawn ? style(element).fill : style(element).color);
    const below = ground(element, view), found = ratio(over(color, below), below);
    count += 1;
    if (found < 4.5) faults.push([text.data.trim().slice(0, 30), found]); }}
  let cells = 0;
  for (const map of page.querySelectorAll("figure.map")) {{
    const below = ground(map, view), rects = [...map.querySelectorAll("rect")];
    const painted = rects.map(rect => {{
      const color = channels(style(rect).fill);
      return over([...color.slice(0, 3), +style(rect).fillOpacity], below); }});
    const ratios = painted.map(color => ratio(color, below));
    const strong = painted[ratios.indexOf(Math.max(...ratios))];
    const faint = painted[ratios.indexOf(Math.min(...ratios))];
    const frame_ = channels(style(map.querySelector("path.frame")).stroke);
    const pairs = {{ strongest: ratio(strong, below), range: ratio(strong, faint),
      frame: ratio(frame_, below) }};
    for (const [name, found] of Object.entries(pairs)) if (found < 3) faults.push([name, found]);
    cells += rects.length; }}
  return {{ width: page.documentElement.scrollWidth, ground: ground(page.body, view),
    count, cells, faults }}; }}
onload = () => {{
  out.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measured)); }};
</script></body>"""
WIDTHS = (390, 768, 1280)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_maps_have_the_contrast_of_aa_as_a_browser_draws_them(
    run, theme, tmp_path, monkeypatch
):
    tokens = [["a", 0.5], ["b", 1.5], ["c", 3.0], ["d", 5.0], ["e", 7.0]]
    jsonl(run / "samples.jsonl", [{"step": 8, "prompt": "p", "text": "abcde", "tokens": tokens}])
    monkeypatch.chdir(tmp_path)
    words = ["data", "run", "--config=data/clean_stdlib", "--out=cleaned", "--quiet"]
    words += [f"--config.source={ROOT}/jaxlm/core/*.py", "--config.stages=length"]
    assert main([*words, "--config.length.least=3000"]) == 0
    pages = [report.write(run), tmp_path / "cleaned/report.html"]
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:2000px" src="file://{page}"></iframe>'
        for page in pages
        for width in WIDTHS
    )
    whole = tmp_path / "whole.html"
    whole.write_text(CONTRAST.format(frames=frames))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path}/profile"]
    options += ["--virtual-time-budget=20000", "--dump-dom"]
    options += ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    done = subprocess.run([CHROMIUM, *options, f"file://{whole}"], capture_output=True, text=True)
    measured = json.loads(html.unescape(re.search(r"<p id=\"out\">(.*?)</p>", done.stdout)[1]))
    assert [each["faults"] for each in measured] == [[]] * len(frames.split("</iframe>")[1:])
    assert [each["width"] for each in measured] == [*WIDTHS] * 2
    assert {min(each["ground"]) > 128 for each in measured} == {theme == "light"}
    assert [each["cells"] for each in measured] == [16] * 3 + [0] * 3  # two layers, eight steps
    assert all(each["count"] > 20 for each in measured)


def test_it_needs_no_other_file(page, run):
    sources = [
        value for _, name, value in page.attributes if name in ("src", "href", "srcset", "data")
    ]
    inner = {value[1:] for value in sources if value.startswith("#")}
    assert inner == {value for _, name, value in page.attributes if name == "id"}
    others = [value for value in sources if not value.startswith("#")]
    assert all(re.fullmatch(r"\.\./[^/]*/report\.html", value) for value in others)
    text = (run / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\(", text)


def test_text_of_a_model_is_text(page):
    assert not any(tag == "script" for tag, *_ in page.attributes)
    assert "<script>alert(8)</script>" in page.texts


def test_the_run_stands_among_the_baselines_in_order(page):
    order = [text for text in page.texts if text in ("gzip -9", "this run, val", "xz -9e")]
    assert order[:3] == ["gzip -9", "this run, val", "xz -9e"]


def test_it_holds_results_warnings_settings_and_who_set_them(page):
    for text in ("0.7500", "2.1170", "optim.lr", "0.0003", "configs/x.py:14", "packages.jax"):
        assert text in page.texts
    texts = " ".join(page.texts)
    assert "step 3: 2 documents & more were skipped" in texts
    assert "step 5 was not applied" in texts
    assert "step 5: step 5" not in texts
    assert "ended with code 0: finished" in " ".join(page.texts)


def test_what_a_default_set_is_folded_away(page):
    assert page.texts.count("optim.lr") == 2
    assert page.texts.count("seed") == 1


def test_an_unknown_peak_is_said_and_not_guessed(page):
    assert "MFU unknown: no published peak" in " ".join(page.texts)


def test_it_is_a_pure_function_of_the_files(run):
    first = report.write(run).read_bytes()
    assert report.write(run).read_bytes() == first


def test_a_run_that_has_hardly_begun_has_a_report(tmp_path):
    Page(report.write(tmp_path).read_text())


DEEP = '{"a": ' * 900 + "1" + "}" * 900
MISSHAPEN = {
    "environment.json": ("[]", "7", '"text"', "null"),
    "config.json": ("[1]", "true"),
    "provenance.json": ("[]", "1"),
    "exit.json": ('"text"', "{}", '{"code": 0, "cause": 7, "time_unix": 1}', "[0]"),
    "baselines.json": ("[1.5]", '{"gzip": "small"}', '{"gzip": Infinity}'),
    "metrics.jsonl": (
        *("7", "null", "{}", '{"step": "one"}', '{"step": -1}', '{"step": 1, "split": {}}'),
        *('{"step": 1, "loss_nats": "low"}', '{"step": 1, "tokens": [1]}'),
        *('{"step": 1, "mfu": NaN}', f'{{"step": 1, "peak_bytes": 1{"0" * 400}}}'),
    ),
    "samples.jsonl": ("[]", '{"step": 1}', '{"step": 1, "prompt": 1, "text": "a"}'),
    "warnings.jsonl": ("1",),
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, text) for name, texts in MISSHAPEN.items() for text in texts]
)
def test_json_of_another_shape_is_said_in_four_parts(tmp_path, capsys, name, content):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with open(tmp_path / name, "a") as file:
        file.write(content + "\n")
    assert main(["report", f"--workdir={tmp_path}"]) == 65
    output = capsys.readouterr().err
    line = ":2" if name == "metrics.jsonl" else ":1" if name.endswith("jsonl") else ""
    assert f"  where  {tmp_path / name}{line}\n" in output
    assert "  why    " in output
    fix = re.search("  fix    (.*)", output)[1]
    assert len(output) < 2000
    subprocess.run(["bash", "-c", fix], check=True)
    assert main(["report", f"--workdir={tmp_path}"]) == 0, "the fix works"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1, "time_unix": 1e200, "split": null, "loss_nats": 1}'),
        ("metrics.jsonl", '{"step": 1, "split": "train", "tokens_per_second": true}'),
        ("warnings.jsonl", "{}"),
        ("environment.json", DEEP),
        ("config.json", "{}"),
        ("provenance.json", '{"seed": [1]}'),
        ("command.sh", ""),
    ],
)
def test_odd_values_of_the_right_shape_are_shown(files, name, content):
    (files / name).write_text(content + "\n")
    Page(report.write(files).read_text())


def records(scale, batch=1000, steps=3):
    return [
        {"step": n, "split": "train", "loss_nats": 1.0, "tokens": n * batch, "time_unix": 0.0}
        | {"noise_scale_tokens": scale}
        for n in range(1, steps + 1)
    ]


def test_a_batch_as_large_as_the_noise_takes_twice_the_fewest_steps_and_tokens():
    """At B = N both are 2; at 2 B steps are 1.5 and tokens 3, at B / 2 the other way round."""
    advice = report.batch_advice(records(1000.0))
    assert advice.startswith("1k tokens, and the noise scale of the gradient is 1k: ")
    assert "twice the batch would take 25% fewer steps and 50% more tokens" in advice
    assert "half of it 50% more steps and 25% fewer tokens" in advice


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (1e6, "twice the batch would take 50% fewer steps and 0% more tokens"),
        (1.0, "half of it 0% more steps and 50% fewer tokens"),
    ],
)
def test_far_from_the_noise_one_of_the_two_costs_nothing(scale, message):
    assert message in report.batch_advice(records(scale))


def test_nothing_is_advised_without_an_estimate_or_a_batch():
    assert report.batch_advice([]) is None
    assert report.batch_advice(records(1000.0, steps=1)) is None
    assert report.batch_advice(records(-3.0)) is None
    assert report.batch_advice([{**r, "noise_scale_tokens": None} for r in records(1.0)]) is None


def test_the_batch_is_that_of_the_last_steps():
    grown = [*records(1000.0, batch=10), {**records(1000.0)[0], "step": 5, "tokens": 2030}]
    assert "25% fewer steps" in report.batch_advice(grown)


def test_the_report_says_it(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in records(1000.0))
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert report.batch_advice(records(1000.0)) in report.render(tmp_path)


def task_result(run, step, mean, metric="accuracy", **more):
    """Write a result of a task as `jaxlm eval --tasks` does; return its file."""
    figures = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "chance": 0.5}
    result = {"task": "<b>", "step": step, "items": 40, "metrics": {metric: figures}} | more
    file = run / f"evals/{step}{metric}{len(more)}/results.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(result))
    return file


def test_tasks_have_a_table_of_the_newest_step_and_curves_with_intervals(files):
    task_result(files, 4, 0.6)
    task_result(files, 8, 0.7, shots=0)
    task_result(files, 8, 0.8, shots=5, form="letters")  # a single step has no curve
    for step, bits in ((4, 2.0), (8, 1.5)):
        task_result(files, step, bits, "bits_per_byte", task="texts")
    page = Page(report.write(files).read_text())
    at = page.texts.index("<b>, 5 shots, letters, 40 items")
    assert [page.texts[at + n] for n in range(6)] == [
        "<b>, 5 shots, letters, 40 items",
        "8",
        "accuracy",
        "0.8000",
        "0.7000 to 0.9000",
        "0.5000",
    ]
    assert "0.7000" in page.texts
    assert "0.6000" not in page.texts
    shares, losses = (charts_of(page)[unit] for unit in ("share", "bits or nats"))
    mean, low, high = shares["series"]
    assert (mean["name"], mean["y"], mean["x"][1]) == (
        "<b>, 40 items, accuracy",
        [0.6, 0.7],
        [400, 800],
    )
    assert (low["y"], high["y"], low["thin"]) == ([0.5, 0.6], [0.7, 0.8], True)
    assert shares["levels"] == [["chance of <b>", 0.5]]
    assert losses["series"][0]["y"] == [2.0, 1.5]


def test_a_damaged_result_of_a_task_is_named(files, capsys):
    file = task_result(files, 4, 0.6)
    file.write_text('{"task": "x", "step": 1, "items": 2, "metrics": {"accuracy": {}}}')
    assert main(["report", f"--workdir={files}"]) == 65
    assert str(file) in capsys.readouterr().err


def test_the_best_evaluation_is_that_of_as_many_batches_as_the_others():
    first = {"split": "val", "step": 4, "loss_nats": 1.0}
    last = {"split": "val", "step": 8, "loss_nats": 0.9}
    assert report.best_evaluation({}, [first, last]) == last
    assert report.best_evaluation({}, [first, last | {"ranking_loss_nats": 1.1}]) == first
    broken = last | {"loss_nats": None, "ranking_loss_nats": 0.5}
    assert report.best_evaluation({}, [first, broken]) == first
