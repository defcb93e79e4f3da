"""Folders of quantized weights, packed number by number, and the numbers that they stand for."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.cli.test_exchange import write

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZE = 8  # inputs of a group


def words(columns, bits, order):
    """Pack a row of codes into words; number i of a word is the code at order[i]."""
    per_word = 32 // bits
    packed = []
    for first in range(0, len(columns), per_word):
        word = 0
        for place in range(per_word):
            word |= int(columns[first + order[place]]) << (bits * place)
        packed.append(word)
    return np.array(packed, np.uint32).view(np.int32)


def rows(matrix, bits, order=tuple(range(8))):
    """Pack the columns of each row."""
    return np.stack([words(row, bits, order) for row in matrix])


def quantized(folder, method, **options):
    """Write a folder of the method; returns the numbers of its matrices, as `pack` does."""
    write(folder)
    return pack(folder, method, **options)


def pack(folder, method, *, bits=4, version="gptq", is_ordered=False, size=SIZE):
    """Give a folder codes for its matrices; returns their numbers in float64, [O, I].

    Args:
      folder: the folder.
      method: gptq or awq.
      bits: of a code.
      version: of GPTQ.
      is_ordered: if the groups of GPTQ's inputs are in a random order.
      size: inputs of a group.
    """
    stored, numbers = load_file(folder / "model.safetensors"), {}
    draw = np.random.default_rng(7)
    for name in [name for name in stored if name.split(".")[-2] in PROJECTIONS]:
        outs, inputs = stored.pop(name).shape
        count, stem = inputs // size, name.removesuffix(".weight")
        codes = draw.integers(0, 2**bits, (inputs, outs))
        zeros = draw.integers(1, 2**bits, (count, outs))
        scales = draw.uniform(0.005, 0.02, (count, outs)).astype(np.float16)
        groups = np.arange(inputs) // size
        if is_ordered:
            groups = draw.permutation(groups)
        numbers[name] = ((codes - zeros[groups]) * scales[groups].astype(np.float64)).T
        stored[f"{stem}.scales"] = scales
        if method == "awq":
            stored[f"{stem}.qweight"] = rows(codes, 4, AWQ)
            stored[f"{stem}.qzeros"] = rows(zeros, 4, AWQ)
            continue
        stored[f"{stem}.qweight"] = np.ascontiguousarray(rows(codes.T, bits).T)
        stored[f"{stem}.qzeros"] = rows(zeros - (version == "gptq"), bits)
        stored[f"{stem}.g_idx"] = groups.astype(np.int32)
    save_file(stored, folder / "model.safetensors")
    settings = {"quant_method": method, "bits": bits, "group_size": size}
    if method == "awq":
        settings |= {"version": "gemm", "zero_point": True}
    else:
        settings |= {"checkpoint_format": version, "desc_act": is_ordered, "sym": False}
    change(folder, settings)
    return numbers


def change(folder, settings):
    """Change settings of a folder's quantization."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | settings
    file.write_text(json.dumps(config))


def change_tensor(folder, end, function):
    """Change the first tensor whose name has an end; without a result it is removed."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    name = min(name for name in stored if name.endswith(end))
    array = function(stored.pop(name))
    save_file(stored if array is None else stored | {name: array}, file)
    return name
