"""Lines H1 and V32: a test catches each bug that is seeded here; else the bar has a hole."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.training import rundir

ROOT = Path(rundir.__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Bug:
    """One change of one place, and the test that must fail because of it."""

    file: str
    right: str
    wrong: str
    test: str


CHECKPOINT, GUARD, RESUME = (f"tests/faults/test_{n}.py" for n in ("checkpoint", "guard", "resume"))

BUGS = {
    "the cursor is one batch ahead": Bug(
        "recipes/train/trainer.py",
        "self.programs.batches(self.start, skips",
        "self.programs.batches(self.start + bool(self.start), skips",
        f"{CHECKPOINT}::test_b1_b4_the_run_falls_back_and_ends_bit_identical",
    ),
    "random numbers begin again in each process": Bug(
        "recipes/train/programs.py",
        'key=random.stream(jax.random.key(run.seed), "train")',
        'key=random.stream(jax.random.key(__import__("os").getpid()), "train")',
        f"{RESUME}::test_a3_a_kill_at_a_point_of_saving_costs_at_most_one_interval",
    ),
    "moments lose bits on their way back": Bug(
        "recipes/train/checkpointing.py",
        "state = store.restore(step, stored)",
        "state = store.restore(step, stored); state = state._replace(opt_state=jax.tree.map("
        "lambda x: x.astype(jnp.bfloat16).astype(x.dtype), state.opt_state))",
        f"{CHECKPOINT}::test_b1_b4_the_run_falls_back_and_ends_bit_identical",
    ),
    "digests are not verified": Bug(
        "checkpoint/record.py",
        "        if digest != expected[path][1]:",
        "        if False:",
        f"{CHECKPOINT}::test_b1_one_flipped_bit_in_any_file_is_found_before_any_state_is_used",
    ),
    "the lock is gone": Bug(
        "training/lock.py",
        "self._flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        f"{CHECKPOINT}::test_b9_a_second_run_on_the_same_directory_is_turned_away",
    ),
    "a bad update is multiplied with zero": Bug(
        "training/guard.py",
        "jnp.where(is_good, a, b)",
        "(b + (a - b) * is_good).astype(b.dtype)",
        "tests/training/"
        "test_step.py::test_c1_one_bad_element_of_a_gradient_changes_no_byte"
        "_and_the_next_step_is_applied",
    ),
    "a rewind leaves the later steps": Bug(
        "recipes/train/checkpointing.py",
        "if step > self.made[-1].to and known < len(self.made):",
        "if False:",
        f"{GUARD}::test_c7_a_kill_straight_after_a_rewind_does_not_bring_the_given_up_future_back",
    ),
    "an error of a save is swallowed": Bug(
        "checkpoint/store.py",
        "            raise self._failed(error) from error",
        "            return",
        f"{CHECKPOINT}::test_b6_a_full_disk_is_an_error_at_the_next_step_with_the_good_step_left",
    ),
    "hosts take every n-th row": Bug(
        "data/loader.py",
        "return self._stack(self.keys(first + rows.start, first + rows.stop))",
        "of = rows.stop - rows.start\n"
        "        every = range(rows.start // max(of, 1), rows.stop * 8, 8)[:of]\n"
        "        return self._stack([self.keys(first + n, first + n + 1)[0] for n in every])",
        "tests/faults/test_data.py::test_e1_any_number_of_hosts_reads_the_same_batches_row_by_row",
    ),
    "with all steps damaged the run begins again": Bug(
        "checkpoint/store.py",
        "        if damaged_steps:\n            raise DataError(",
        "        if False:\n            raise DataError(",
        f"{CHECKPOINT}::test_b3_with_all_steps_damaged_the_run_says_so_and_never_starts_again",
    ),
    "no limit watches an evaluation": Bug(
        "recipes/train/trainer.py",
        'self._clock.pause("eval"), self.context.processes.watch.phase("eval")',
        'self._clock.pause("eval"), self.context.processes.watch.phase("start")',
        "tests/faults/test_stalls.py::test_e9_d4_what_hangs_is_named_and_ends_with_76[evaluation]",
    ),
    "the signal's handler is not there": Bug(
        "training/signals.py",
        "self._before[number] = signal.signal(number, self._take)",
        "self._before[number] = signal.getsignal(number)",
        f"{RESUME}::test_a7_a_sigterm_in_any_phase_saves_and_says_75",
    ),
}

ENGINE, SERVE = "tests/generate/test_engine.py", "tests/serve/test_serve.py"
PAIRED = "tests/evals/test_statistics.py"
SERVING_BUGS = {
    "a canceled request does not end": Bug(
        "generate/engine.py",
        "self._tickets[slot] = None\n                ticket.end(early)",
        "self._tickets[slot] = None",
        f"{ENGINE}::test_v22_a_canceled_request_frees_its_slot_within_one_tick",
    ),
    "a kept prompt is not named after all its ids": Bug(
        "generate/prefix.py",
        "hashlib.sha256(name + whole[start : start + chunk].tobytes())",
        "hashlib.sha256(whole[start : start + chunk].tobytes())",
        f"{ENGINE}::test_a_prompt_that_begins_as_an_earlier_one_has_the_same_bits_and_is_read_from_"
        "there",
    ),
    "a prompt is read from one chunk too far": Bug(
        "generate/engine.py",
        "            inputs = np.int32(slot), np.int32(ticket.read), block",
        "            inputs = np.int32(slot), np.int32(ticket.read + self.chunk), block",
        f"{ENGINE}::test_a_prompt_that_begins_as_an_earlier_one_has_the_same_bits_and_is_read_from_"
        "there",
    ),
    "usage counts the end token": Bug(
        "generate/requests.py",
        '        if token in request.ends:\n            self.end("eos_token")',
        "        if token in request.ends:\n            self.ids.append(token)\n"
        "            self._waiting.append((token, score, self._bytes))\n"
        '            self.end("eos_token")',
        f"{SERVE}::test_usage_has_no_end_token",
    ),
    "all choices have one seed": Bug(
        "serve/api.py",
        "seed=(seed + copy) % 2**32",
        "seed=seed % 2**32",
        f"{SERVE}::test_choices_have_seeds_of_their_own_and_a_stop_ends_a_text",
    ),
    "a grammar at its limit looks whole": Bug(
        "generate/grammar.py",
        "return not self._state.is_error() and self._state.consume_token(token)",
        "return self._state.consume_token(token)",
        "tests/generate/test_grammar.py::test_a_grammar_at_its_limit_does_not_look_whole",
    ),
    "runs are not compared item by item": Bug(
        "evals/statistics.py",
        "_checked(second_n - first_n, weights",
        "_checked(second_n - first_n[::-1], weights",
        f"{PAIRED}::test_tests_equal_those_of_scipy",
    ),
    "scores of a prompt are off by one": Bug(
        "generate/engine.py",
        "after[:count] = request.ids[start + 1 : start + 1 + count]",
        "after[:count] = request.ids[start : start + count]",
        f"{SERVE}::test_echo_has_the_scores_of_the_prompt_and_they_do_not_depend_on_the_cut",
    ),
}


def copy(folder: Path) -> Path:
    for name in ("jaxlm", "tests", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def outcome(folder: Path, test: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", test]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def require_caught(bug: Bug, folder: Path) -> None:
    place = copy(folder) / "jaxlm" / bug.file
    text = place.read_text()
    assert bug.right in text, "the place has changed: seed the bug again"
    place.write_text(text.replace(bug.right, bug.wrong))
    done = outcome(folder, bug.test)
    assert done.returncode == 1, done.stdout[-3000:]
    assert len(re.findall(r"^1 failed", done.stdout, re.MULTILINE)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_h1_a_seeded_bug_is_caught(name, tmp_path, record_property):
    require_caught(BUGS[name], tmp_path)
    record_property("table", f"H1: {name}: caught by {BUGS[name].test.partition('::')[2]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVING_BUGS)
def test_v32_a_seeded_bug_of_serving_is_caught(name, tmp_path, record_property):
    require_caught(SERVING_BUGS[name], tmp_path)
    record_property("table", f"V32: {name}: caught by {SERVING_BUGS[name].test.partition('::')[2]}")


def test_h1_v32_there_are_twenty_bugs_and_each_has_its_place():
    assert (len(BUGS), len(SERVING_BUGS)) == (12, 8)
    for bug in (BUGS | SERVING_BUGS).values():
        assert bug.right in (ROOT / "jaxlm" / bug.file).read_text(), bug.file
        file, _, test = bug.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), bug.test


@pytest.mark.slow
def test_h1_without_a_bug_these_tests_pass(tmp_path):
    """Else the bugs above would be caught by any other failure."""
    folder = copy(tmp_path)
    tests = {bug.test for bug in (BUGS | SERVING_BUGS).values()}
    passed = 0
    for test in sorted(tests):
        done = outcome(folder, test)
        assert done.returncode == 0, done.stdout[-3000:]
        passed += int(re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)[0])
    assert passed >= len(tests) >= 10
