"""Folders of quantized weights: exports of compressed-tensors, and imports of three methods."""

import json
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.checkpoint.quantized_folder import QuantizedFolder
from jaxlm.cli.main import main
from jaxlm.core.errors import DataError
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import InitSource
from tests.checkpoint.quantized import change, change_tensor, quantized
from tests.cli.test_exchange import call, write
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")
WHOLE = (slice(None), slice(None))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (folder / "text.txt").write_text("a text of some length, and then more.\n" * 60)
    words = ["import", f"--from={write(folder / 'source')}", f"--workdir={folder / 'run'}"]
    assert main([*words, "--quiet"]) == 0
    return folder


def bits_of(words, bits, count):
    """Unpack each row of words, number by number."""
    words, each = words.view(np.uint32).astype(np.uint64), 32 // bits
    columns = [(words[:, n // each] >> (bits * (n % each))) & (2**bits - 1) for n in range(count)]
    return np.stack(columns, 1).astype(np.int64)


def raw(file, name, dtype):
    """Return a tensor by the bytes of the file."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + size])[name]
    first, end = (8 + size + offset for offset in entry["data_offsets"])
    return np.frombuffer(content[first:end], dtype).reshape(entry["shape"])


def float32_of(file, name):
    """Return a tensor of float32 as float64."""
    return raw(file, name, np.float32).astype(np.float64)


def float8_of(file, name):
    """Return a tensor of e4m3 as float64: a sign, 4 bits of an exponent and 3 of a fraction."""
    bits = raw(file, name, np.uint8).astype(np.int64)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    size = np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7)
    )
    return np.where(bits >> 7, -size, size)


def file_numbers(folder, stem):
    """Return a matrix of a folder of compressed-tensors as float64, by the specification."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    file = folder / "model.safetensors"
    if config["format"] == "float-quantized":
        return float8_of(file, f"{stem}.weight") * float32_of(file, f"{stem}.weight_scale")
    tensors = load_file(file)
    scale = tensors[f"{stem}.weight_scale"].astype(np.float64)
    if config["format"] == "int-quantized":
        return tensors[f"{stem}.weight"] * scale
    outs, inputs = tensors[f"{stem}.weight_shape"]
    bits = weights["num_bits"]
    codes = bits_of(tensors[f"{stem}.weight_packed"], bits, inputs)
    zero = np.full(scale.shape, 2 ** (bits - 1))
    if not weights["symmetric"]:
        zero = bits_of(tensors[f"{stem}.weight_zero_point"].T, bits, outs).T
    size = weights["group_size"] or inputs
    return (codes - np.repeat(zero, size, 1)) * np.repeat(scale, size, 1)


def stored_numbers(run, path, row):
    """Return a matrix of a quantized run as float64, [O, I]."""
    leaves = {
        name: harness.store(run).arrays(0)[f"params/{path}_{name}"][row]
        for name in ("codes", "scales", "zeros")
        if f"params/{path}_{name}" in harness.store(run).arrays(0)
    }
    codes, scales = (leaves[name].reshape(len(leaves[name]), -1) for name in ("codes", "scales"))
    tune = json.loads((run / "config.json").read_text())["tune"]

    def of_inputs(values):  # the last block may have fewer inputs
        size = len(codes) if tune["block"] == "all" else tune["block"]
        return np.repeat(values, size, 0)[: len(codes)]

    if tune["base"].startswith(("int4", "w4a8")):
        pairs = np.stack([codes & 15, codes >> 4], 1)
        codes = pairs.reshape(2 * len(codes), -1).astype(np.int64)
        zero = leaves["zeros"].reshape(scales.shape) if "zeros" in leaves else 8 + 0 * scales
        codes = codes - of_inputs(zero)
    return (codes.astype(np.float64) * of_inputs(scales)).T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "format"),
    [
        ("int4_zero --block=8", "pack-quantized"),
        ("int4 --block=16", "pack-quantized"),
        ("int8", "pack-quantized"),
        ("w8a8", "int-quantized"),
        ("w4a8", "int-quantized"),
        ("fp8", "float-quantized"),
    ],
)
def test_a_quantized_run_is_exported_and_imported_with_the_same_bits(
    plain, scheme, format, tmp_path, capsys
):
    run, out, back, other = (tmp_path / name for name in ("run", "out", "back", "second"))
    words = f"quantize --workdir={plain}/run --out={run} --text={plain}/text.txt --scheme={scheme}"
    assert main([*words.split(), "--allow=loss:100%", "--quiet"]) == 0
    capsys.readouterr()
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert (code, answer["parity"]["is_bit_identical"]) == (0, True)
    assert answer["parity"]["largest_difference"] == 0.0
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors"
    assert (settings["format"], settings["ignore"]) == (format, ["lm_head"])
    for stem, path in (
        ("self_attn.q_proj", "attention/query/weight"),
        ("self_attn.o_proj", "attention/out/weight"),
        ("mlp.down_proj", "mlp/down/weight"),
    ):
        (full,) = {
            name.removeprefix("params/").removesuffix("_codes")
            for name in harness.store(run).arrays(0)
            if name.endswith(f"{path}_codes")
        }
        numbers = file_numbers(out, f"model.layers.1.{stem}")
        np.testing.assert_array_equal(numbers, stored_numbers(run, full, 1))
    code, _, log = call(capsys, "import", f"--from={out}", f"--workdir={back}")
    assert code == 0
    assert "21 matrices of compressed-tensors: the same codes" in log
    first, second = harness.store(run).arrays(0), harness.store(back).arrays(0)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        np.testing.assert_array_equal(array.view(np.uint8), second[name].view(np.uint8))
    assert call(capsys, "export", f"--workdir={back}", f"--out={other}")[0] == 0
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


FOLDERS = {
    "gptq": {"method": "gptq"},
    "gptq, version 2": {"method": "gptq", "version": "gptq_v2"},
    "gptq, in another order": {"method": "gptq", "is_ordered": True},
    "gptq, 8 bits": {"method": "gptq", "bits": 8},
    "awq": {"method": "awq"},
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_each_number_is_that_of_the_specification(kind, tmp_path):
    numbers = quantized(tmp_path / "folder", **FOLDERS[kind])
    folder = QuantizedFolder(Folder(tmp_path / "folder"))
    assert folder.matrices.keys() == numbers.keys()
    with folder.opened() as fetch:
        for name, expected in numbers.items():
            np.testing.assert_array_equal(fetch(name, WHOLE), expected.astype(np.float32))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["awq", "gptq, in another order", "gptq"])
def test_an_import_keeps_codes_that_have_a_stored_form(kind, tmp_path, capsys):
    numbers = quantized(tmp_path / "folder", **FOLDERS[kind])
    run = tmp_path / "run"
    code, _, log = call(capsys, "import", f"--from={tmp_path}/folder", f"--workdir={run}")
    assert code == 0
    arrays = harness.store(run).arrays(0)
    expected = numbers["model.layers.2.self_attn.o_proj.weight"].astype(np.float32)
    if "order" in kind:
        assert "dequantized, as no stored format of jaxlm has its numbers" in log
        (path,) = (name for name in arrays if name.endswith("attention/out/weight"))
        np.testing.assert_array_equal(arrays[path][2].reshape(expected.T.shape).T, expected)
        return
    assert "the same codes" in log
    (path,) = (name for name in arrays if name.endswith("attention/out/weight_codes"))
    path = path.removeprefix("params/").removesuffix("_codes")
    np.testing.assert_array_equal(stored_numbers(run, path, 2).astype(np.float32), expected)
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={tmp_path}/out")
    assert (code, answer["parity"]["is_bit_identical"]) == (0, True)
    store = harness.store(run)
    source = InitSource(load.read_config(run), store, 0)
    assert "the model that folder was quantized from" in load.plain_fix(source)
    code, answer, _ = call(capsys, "prune", f"--workdir={run}", "--keep=0", f"--out={tmp_path}/p")
    assert "was made of" not in answer["error"]["why"]  # a run that does not exist
    for name, values in numbers.items():
        written = file_numbers(tmp_path / "out", name.removesuffix(".weight"))
        np.testing.assert_array_equal(written.astype(np.float32), values.astype(np.float32))


def removed(array):
    """Remove a tensor."""
    return


def with_nan(array):
    """Return the scales with one that is not a number."""
    return np.where(np.arange(array.size).reshape(array.shape) == 3, np.nan, array)


def with_huge(array):
    """Return the scales with one that no weight has."""
    places = np.arange(array.size).reshape(array.shape)
    return np.where(places == 3, np.float32(-1e36), array.astype(np.float32))


REFUSED = {
    "bits": ("gptq", {"bits": 3}, None, "bits = 3 is not supported"),
    "bits as text": ("gptq", {"bits": "4"}, None, "bits = '4' is not supported"),
    "method": ("gptq", {"quant_method": "aqlm"}, None, "quant_method = 'aqlm'"),
    "version": ("gptq", {"checkpoint_format": "marlin"}, None, "checkpoint_format = 'marlin'"),
    "modules": ("gptq", {"dynamic": {"-:q": {}}}, None, "dynamic ="),
    "group": ("gptq", {"group_size": 0}, None, "group_size = 0"),
    "other group": ("gptq", {"group_size": 16}, None, "and must be [3, 32]"),
    "order": ("gptq", {}, ("g_idx", removed), "names each input's group"),
    "order beyond": (
        "gptq",
        {},
        ("g_idx", lambda array: array + 1),
        "groups 1 to 6, and there are 6",
    ),
    "no scales": ("gptq", {}, ("scales", removed), "the tensor is missing"),
    "scales": ("gptq", {}, ("scales", with_nan), "1 of its scales are not finite"),
    "huge scales": ("awq", {}, ("scales", with_huge), "not finite, or 1e+30 and more"),
    "fewer scales": ("gptq", {}, ("scales", lambda array: array[1:]), "its shape is"),
    "codes": ("gptq", {}, ("qweight", lambda array: array.view(np.float32)), "must be I32"),
    "no zeros": ("awq", {}, ("qzeros", removed), "the tensor is missing"),
    "8 bits of awq": ("awq", {"bits": 8}, None, "bits = 8"),
    "gemv": ("awq", {"version": "gemv"}, None, "version = 'gemv'"),
    "no zero points": ("awq", {"zero_point": False}, None, "zero_point = False"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_is_not_as_specified_is_refused(kind, tmp_path, capsys):
    method, settings, tensor, text = REFUSED[kind]
    folder = tmp_path / "folder"
    quantized(folder, method)
    change(folder, settings)
    name = change_tensor(folder, *tensor) if tensor else "config.json"
    code, answer, _ = call(capsys, "import", f"--from={folder}", f"--workdir={tmp_path}/run")
    error = answer["error"]
    assert code == 65
    assert text in f"{error['what']} {error['why']}"
    assert name in error["where"] or kind == "other group"
    assert error["fix"]
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_changed_bytes_of_codes_and_scales_are_read_or_refused_and_nothing_else(method, tmp_path):
    quantized(tmp_path / "folder", method)
    file = tmp_path / "folder" / "model.safetensors"
    whole, draw, codes = file.read_bytes(), np.random.default_rng(0), Counter()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    start = 8 + int.from_bytes(whole[:8], "little")
    ends = ("scales", "qzeros", "qweight", "g_idx")
    spans = [each["data_offsets"] for name, each in header.items() if name.endswith(ends)]
    for _ in range(60):
        content = bytearray(whole)
        first, last = spans[draw.integers(len(spans))]
        for place in draw.integers(start + first, start + last, 3):
            content[place] = draw.choice([0, 127, 128, 255, draw.integers(256)])
        file.write_bytes(content)
        try:
            folder = QuantizedFolder(Folder(tmp_path / "folder"))
            with folder.opened() as fetch:
                assert all(np.isfinite(fetch(name, WHOLE)).all() for name in folder.matrices)
            codes[0] += 1
        except DataError:
            codes[65] += 1
    assert min(codes[0], codes[65]) > 3, codes


COMPRESSED = {
    "format": ({"format": "marlin-24"}, "format = 'marlin-24'"),
    "status": ({"quantization_status": "frozen"}, "quantization_status = 'frozen'"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "transforms": ({"transform_config": {"a": 1}}, "transform_config"),
    "groups": ({"config_groups": {}}, "must have groups"),
    "a list": ({"config_groups": []}, "must be of type dict"),
    "a group": ({"config_groups": {"a": 1}}, "must have groups"),
    "3 bits": (
        {"config_groups": {"a": {"weights": {"num_bits": 3, "strategy": "channel"}}}},
        "num_bits = 3",
    ),
    "blocks": (
        {"config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "block"}}}},
        "strategy = 'block'",
    ),
}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_settings_of_compressed_tensors_that_are_not_known_are_refused(kind, tmp_path, capsys):
    settings, text = COMPRESSED[kind]
    folder = write(tmp_path / "folder")
    group = {"weights": {"num_bits": 8, "strategy": "channel"}}
    change(
        folder,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
        }
        | settings,
    )
    code, answer, _ = call(capsys, "import", f"--from={folder}", f"--workdir={tmp_path}/run")
    assert code == 65
    assert text in f"{answer['error']['what']} {answer['error']['why']}"


def test_a_quantized_folder_of_pickles_is_refused_by_name(tmp_path, capsys):
    quantized(tmp_path / "folder", "gptq")
    (tmp_path / "folder" / "model.safetensors").rename(tmp_path / "folder" / "pytorch_model.bin")
    words = ("import", f"--from={tmp_path}/folder", f"--workdir={tmp_path}/run")
    code, answer, _ = call(capsys, *words)
    assert code == 66
    assert "pytorch_model.bin" in answer["error"]["why"]


@pytest.mark.slow
def test_formats_without_such_a_form_are_refused_with_the_command_of_the_base(
    plain, tmp_path, monkeypatch
):
    from jaxlm.core.errors import ConfigError
    from jaxlm.recipes.exchange.export_model import export_model
    from jaxlm.recipes.use import calibration_text

    run, q = plain / "run", tmp_path / "q"
    words = f"quantize --workdir={run} --out={q} --text={plain}/text.txt --scheme=nf4"
    assert main([*words.split(), "--allow=loss:100%", "--quiet"]) == 0
    with pytest.raises(ConfigError) as error:
        export_model(q, tmp_path / "out")
    assert "no format of compressed-tensors has nf4" in error.value.why
    nearest, plain_export = error.value.fix.splitlines()
    assert plain_export == f"jaxlm export --workdir={run} --step=0 --out={tmp_path}/out --to=hf"
    words = f"jaxlm quantize --workdir={run} --step=0 --scheme=int4 --block=16 --out={q}-int4-16"
    assert nearest.startswith(words)
    q = tmp_path / "odd"
    words = f"quantize --workdir={run} --out={q} --text={plain}/text.txt --scheme=int4 --method=awq"
    words += f" --calibration={plain}/text.txt --calibration_tokens=64 --allow=loss:100% --quiet"
    monkeypatch.setattr(calibration_text, "MOST_SHARED", 1.1)
    assert main(words.split()) == 0
    with pytest.raises(ConfigError, match="do not divide") as error:
        export_model(q, tmp_path / "out")
    nearest = error.value.fix.splitlines()[0]
    assert f"--method=awq --calibration={plain}/text.txt --out={q}-16" in nearest


def test_codes_of_four_bits_in_bytes_are_read_and_refused_beyond_them(tmp_path):
    folder = write(tmp_path / "folder")
    stored = load_file(folder / "model.safetensors")
    draw = np.random.default_rng(3)
    name = next(name for name in stored if name.endswith("q_proj.weight"))
    codes = draw.integers(-8, 8, stored[name].shape).astype(np.int8)
    scales = draw.uniform(0.01, 0.02, (len(codes), 1)).astype(np.float32)
    dynamic = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {"weights": {"num_bits": 4, "strategy": "channel"}, "input_activations": dynamic}
    for values in (codes, codes + np.int8(1)):
        save_file(stored | {name: values, f"{name}_scale": scales}, folder / "model.safetensors")
        change(
            folder,
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
            },
        )
        read = QuantizedFolder(Folder(folder))
        assert (read.matrices[name].base, read.matrices[name].block) == ("w4a8", "all")
        with read.opened() as fetch:
            if values is codes:
                np.testing.assert_array_equal(fetch(name, WHOLE), codes * scales)
            else:
                with pytest.raises(DataError, match="-7 to 8"):
                    fetch(name, WHOLE)
