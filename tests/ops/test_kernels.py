"""Choice of a kernel, its reason, and the limits of each kernel."""

import dataclasses

import pytest

from jaxlm.ops import kernels
from jaxlm.ops.kernels import AttentionWork, Target

CPU, TPU, H100, A100 = Target("cpu"), Target("tpu"), Target("gpu", 9.0), Target("gpu", 8.0)
LONG = AttentionWork(rows=2, length=4096, head_dim=64, compute="bfloat16")


def of(**changed):
    return dataclasses.replace(LONG, **changed)


def why(kernel, target, work):
    return "; ".join(misfit.why for misfit in kernels.misfits(kernel, target, work))


def test_on_a_cpu_the_kernel_is_chosen_by_length_and_dropout():
    assert kernels.choose("auto", CPU, of(length=512)).kernel == "blockwise"
    assert kernels.choose("auto", CPU, of(length=511)).kernel == "reference"
    assert kernels.choose("auto", CPU, of(dropout=0.1)) == (
        "reference",
        "no other kernel has attention dropout",
    )


@pytest.mark.parametrize("name", ["reference", "blockwise", "splash"])
def test_a_kernel_that_is_named_is_taken(name):
    assert kernels.choose(name, CPU, LONG) == (name, "set by train.attention")


@pytest.mark.parametrize(
    ("target", "work", "kernel", "reason"),
    [
        (TPU, LONG, "splash", "the kernel for a tpu"),
        (TPU, of(length=128, softcap=30.0, compute="float32"), "splash", "the kernel for a tpu"),
        (TPU, of(length=1000), "blockwise", "splash not: rows of 1000 tokens are not a multiple "
                                            "of 128"),
        (TPU, of(dropout=0.1), "reference", "splash not: it has no attention dropout"),
        (TPU, of(both_ways=True), "blockwise", "splash not: its mask is the same for all rows"),
        (H100, of(both_ways=True), "cudnn", "the kernel for a gpu"),
        (TPU, of(leading=16), "blockwise", "splash not: it has no 16 keys that all segments"),
        (H100, of(leading=16), "blockwise", "cudnn not: it has no 16 keys that all segments"),
        (TPU, of(compute="float16"), "blockwise", "splash not: a TPU has no unit for float16"),
        (H100, LONG, "cudnn", "segments as a mask of 64 MiB a device"),
        (A100, of(compute="float16"), "cudnn", "the kernel for a gpu"),
        (H100, of(head_dim=256), "cudnn", "the kernel for a gpu"),
        (A100, of(head_dim=256), "blockwise", "heads of 256 are not a multiple of 8 up to 128"),
        (H100, of(head_dim=20), "blockwise", "heads of 20 are not a multiple of 8 up to 256"),
        (H100, of(compute="float32"), "blockwise", "cudnn not: it does not compute in float32"),
        (H100, of(softcap=30.0), "blockwise", "it has no softcap, and this model caps scores at "
                                              "30"),
        (H100, of(stages=2), "blockwise", "JAX 0.12 cannot map its mask over pipeline stages, "
                                          "and mesh.pipe = 2"),
        (TPU, of(stages=2), "splash", "the kernel for a tpu"),
        (H100, of(length=4095), "blockwise", "rows of 4095 tokens are odd"),
        (H100, of(dropout=0.1), "reference", "cudnn not: it has no attention dropout"),
        (H100, of(length=16384), "blockwise", "the mask of segments of one row would be 512 MiB, "
                                              "above 256 MiB"),
        (H100, of(length=8192, rows=8), "cudnn", "segments as a mask of 256 MiB a device, 2 of 8 "
                                                 "rows at a time"),
        (H100, of(length=8192, rows=7), "cudnn", "segments as a mask of 128 MiB a device, 1 of 7 "
                                                 "rows at a time"),
        (Target("gpu", 7.5), LONG, "blockwise", "compute capability 7.5 is below 8.0"),
        (Target("gpu"), LONG, "blockwise", "this GPU reports no compute capability"),
    ],
)  # fmt: skip
def test_on_an_accelerator_its_own_kernel_is_chosen_where_it_can(target, work, kernel, reason):
    chosen = kernels.choose("auto", target, work)
    assert chosen.kernel == kernel
    assert reason in chosen.reason


def test_kernels_of_other_platforms_and_what_they_cannot_do_are_told_together():
    assert why("splash", CPU, LONG) == "it is for a tpu, and this is a cpu"
    assert why("cudnn", TPU, LONG) == "it is for a gpu, and this is a tpu"
    assert why("splash", H100, of(length=100)).endswith(
        "rows of 100 tokens are not a multiple of 128"
    )
    assert why("blockwise", CPU, of(dropout=0.1)).startswith("it has no attention dropout")
    assert not why("reference", CPU, of(dropout=0.1))


def test_what_mends_a_misfit_does():
    for kernel, target, work in (
        ("splash", TPU, of(length=1000)),
        ("splash", TPU, of(length=5)),
        ("cudnn", H100, of(length=4095)),
        ("splash", TPU, of(compute="float16")),
        ("cudnn", H100, of(compute="float32")),
        ("blockwise", CPU, of(dropout=0.1)),
    ):
        (misfit,) = kernels.misfits(kernel, target, work)
        path, _, value = misfit.fix.partition("=")
        name = {"data.sequence": "length", "regularization.attention_dropout": "dropout"}.get(
            path, "compute"
        )
        mended = value if name == "compute" else type(getattr(work, name))(value)
        assert not list(kernels.misfits(kernel, target, of(**{name: mended})))
