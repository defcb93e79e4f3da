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


def test_auto_unrolls_few_layers_on_a_cpu_alone():
    auto = TrainConfig(stack="auto")
    assert [auto.stack_on("cpu", layers) for layers in (1, 24, 25)] == ["unroll", "unroll", "scan"]
    assert [auto.stack_on(platform, 2) for platform in ("gpu", "tpu")] == ["scan", "scan"]
    assert [TrainConfig(stack=name).stack_on("cpu", 2) for name in ("scan", "unroll")] == [
        "scan",
        "unroll",
    ]
