import pytest

from jaxlm.training.config import TrainConfig


@pytest.mark.parametrize(
    "remat",
    ["none", "dots", "full", "save:mlp_out", "save:attention_out,mlp_out", "full/none/none"],
)
def test_the_remat_policies_there_are_pass(remat):
    assert not list(TrainConfig(remat=remat).problems())


@pytest.mark.parametrize("remat", ["some", "save", "save:", "save:everything", "dots:x", ""])
def test_another_is_a_problem_that_is_explained(remat):
    ((field, why, fix),) = TrainConfig(remat=remat).problems()
    assert field == "remat"
    assert repr(remat) in why
    assert fix == "jaxlm config explain train.remat"


def test_of_several_policies_the_one_that_does_not_exist_is_named():
    ((_, why, _),) = TrainConfig(remat="full/some/none").problems()
    assert "'some'" in why


def test_micro_batches_that_do_not_divide_are_a_problem_with_the_nearest_that_do():
    ((field, _, fix),) = TrainConfig(batch=12, microbatches=5).problems()
    assert field == "microbatches"
    assert fix.splitlines() == [f"--config.train.microbatches={size}" for size in (4, 6)]


@pytest.mark.parametrize(
    ("setting", "platform", "devices", "layers", "expected"),
    [
        ("auto", "cpu", 1, 1, "unroll"),
        ("auto", "cpu", 4, 24, "unroll"),
        ("auto", "cpu", 1, 25, "scan"),
        ("auto", "gpu", 1, 24, "unroll"),
        ("auto", "gpu", 1, 25, "scan"),
        ("auto", "gpu", 2, 24, "scan"),
        ("auto", "tpu", 1, 1, "scan"),
        ("scan", "cpu", 1, 1, "scan"),
        ("unroll", "tpu", 8, 99, "unroll"),
    ],
)
def test_auto_unrolls_few_layers_on_cpus_and_on_one_gpu(
    setting, platform, devices, layers, expected
):
    assert TrainConfig(stack=setting).stack_on(platform, devices, layers) == expected
