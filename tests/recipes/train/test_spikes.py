"""Lines and records of steps that were not applied."""

from jaxlm.recipes.train.spikes import skip_notice


def test_of_many_steps_that_were_not_applied_only_some_are_printed():
    values = {"loss_nats": 2.5, "grad_norm": 8.25}
    lines = [
        skip_notice(step, "gradient spike", values | {"skipped_total": step})
        for step in range(1, 101)
    ]
    printed = [step for step, line in enumerate(lines, start=1) if line]
    assert printed == [*range(1, 11), *range(20, 101, 10)]
    first = "step 1 was not applied: gradient spike (loss 2.5, gradient 8.25); 1 skipped so far"
    assert lines[0].startswith(first)
    assert "each 10th is printed" in lines[9]
