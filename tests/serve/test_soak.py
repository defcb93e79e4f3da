"""The soak of the server in its shortest form: `bash scripts/soak --serve` is the long one."""

import pytest

from tests.serve import soak

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_v33_random_clients_and_deaths_change_no_answer_and_leave_nothing(capsys, record_property):
    assert soak.soak(minutes=1, seed=0) == 0
    record_property("table", f"V33: {capsys.readouterr().out.splitlines()[-1]}")
