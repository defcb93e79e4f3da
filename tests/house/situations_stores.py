"""Situations of checkpoints, processes and devices, whose fixes `test_fix_lines` pastes."""

import fcntl
import os
import shlex
import sys
from pathlib import Path

import fsspec
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath
from huggingface_hub import HfApi
from huggingface_hub.hf_api import ModelInfo

from jaxlm.checkpoint import gguf_writer
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import importance
from jaxlm.training.lock import Lock
from tests.house.situation import CONFIG, ROOT, RUN, Situation

PYTHON = shlex.quote(sys.executable)
FLIP = "printf x >>"  # one byte more is damage too
ONE = "$(find runs/a/checkpoints/1 -type f ! -name digests.json | sort | head -1)"
TWO = ONE.replace("/1", "/2")
HUB = "import --from=hf:me/tiny --workdir=new"
GGUF = (
    "from pathlib import Path; from tests.checkpoint import ggufs; from "
    "tests.cli.test_import_gguf import LLAMA; ggufs.write(Path('tiny.gguf'), LLAMA)"
)
TINY_GGUF = (
    f'PYTHONPATH={ROOT} {PYTHON} -c "{GGUF}"; '
    f"{PYTHON} -m jaxlm import --from=tiny.gguf --workdir=runs/tiny --quiet >&2"
)
CLIP = "--config.regularization.qk_clip=50"


def overflows(patch: pytest.MonkeyPatch) -> None:
    """Make the inputs of layers infinite."""
    patch.setattr(importance, "squares", lambda rows: (rows.sum(0) / 0,))


def refuses_removal(patch: pytest.MonkeyPatch) -> None:
    """Refuse the removal of old checkpoints, as a file system that is read-only in part does."""
    rmtree = type(epath.Path()).rmtree

    def guarded(self, *args, **kwargs):
        if self.name.endswith(".retired") and not self.name.startswith("probe"):
            raise PermissionError(1, os.strerror(1))
        return rmtree(self, *args, **kwargs)

    patch.setattr(type(epath.Path()), "rmtree", guarded)


def refuses_objects(patch: pytest.MonkeyPatch) -> None:
    """The object store refuses every write."""

    def refused(*args, **kwargs):
        raise PermissionError("Access Denied")

    patch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", refused)


def is_taken_over(patch: pytest.MonkeyPatch) -> None:
    """Another process takes the lock of the run over before its first commit."""
    patch.setattr(Lock, "is_owner", lambda self: False)


def is_slow_to_commit(patch: pytest.MonkeyPatch) -> None:
    """Orbax gives up on a save after its limit."""

    def late(self):
        raise TimeoutError("Timed out after 1 seconds waiting for the commit")

    patch.setattr(ocp.AsyncCheckpointer, "wait_until_finished", late)


def cannot_quantize(patch: pytest.MonkeyPatch) -> None:
    """A weight is not finite."""

    def refused(rows, storage):
        raise ValueError("it has numbers that are not finite")

    patch.setattr(gguf_writer, "quantized", refused)


def fills_the_disk(patch: pytest.MonkeyPatch) -> None:
    def full(*args, **kwargs):
        raise OSError(28, os.strerror(28))

    patch.setattr(safetensors.numpy, "save_file", full)


def has_no(package: str):
    return lambda patch: patch.setitem(sys.modules, package, None)


def has_little_memory(patch: pytest.MonkeyPatch) -> None:
    def start(*args, **kwargs):
        raise MemoryError("cannot allocate 64 GiB")

    patch.setattr(setup, "start", start)


def sets(**variables: str):
    """Variables of a cluster, which this process does not run in when a fix is pasted."""

    def prepare(patch: pytest.MonkeyPatch) -> None:
        for name, value in variables.items():
            patch.setenv(name, value)

    return prepare


def publishes(*names: str):
    """The hub has a model of these files."""

    def prepare(patch: pytest.MonkeyPatch) -> None:
        files = [{"rfilename": name, "size": 10} for name in names]
        info = ModelInfo(id="me/tiny", sha="0" * 40, siblings=files, tags=[], private=False)
        patch.setattr(HfApi, "model_info", lambda *args, **kwargs: info)

    return prepare


def cannot_reach_the_hub(patch: pytest.MonkeyPatch) -> None:
    def lost(*args, **kwargs):
        raise ConnectionError("no route to the host")

    patch.setattr(HfApi, "model_info", lost)


def is_in_use(patch: pytest.MonkeyPatch) -> None:
    """Hold the lock of the run as another process would.

    A second open file of this process is the same to flock.
    """
    file = os.open("runs/a/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, b"pid 1 on another since yesterday\n")


def has_no_cache_folder(patch: pytest.MonkeyPatch) -> None:
    """A file is in the place of the folder; the tests keep compiled programs in another one."""
    patch.setattr(setup.cache, "folder", lambda *args, **kwargs: Path("c.py").absolute())
    patch.setattr(setup, "start", lambda _: setup.compile_cache())


SITUATIONS: dict[str, Situation] = {
    # checkpoints
    "an old checkpoint that stays": Situation(
        f"train --config=c.py {RUN} --config.train.steps=7 --allow_change=train.steps "
        "--config.checkpoint.keep_last=1 --config.guard.rewind_steps=1",
        prepare=refuses_removal,
    ),
    "a checkpoint that takes too long": Situation(
        f"train {CONFIG} --config.watch.save=1s", prepare=is_slow_to_commit
    ),
    "a checkpoint of another shape": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --config.model.width=64 "
        "--allow_change=model,train.steps"
    ),
    "a change of a setting that is none": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --allow_change=train.step"
    ),
    "a tokenizer of other text": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --config.data.tokenizer=characters "
        "--allow_change=data,train.steps"
    ),
    "all checkpoints damaged": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --allow_change=train.steps",
        f"{FLIP} {ONE}; {FLIP} {TWO}",
    ),
    "a damaged checkpoint to look at": Situation(
        f"checkpoint inspect {RUN} --step=1", f"{FLIP} {ONE}"
    ),
    "a damaged record": Situation(
        f"checkpoint inspect {RUN} --step=1", f"{FLIP} runs/a/checkpoints/1/digests.json"
    ),
    "start_at a damaged step": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --allow_change=train.steps "
        "--start_at=1 --force",
        f"{FLIP} {ONE}",
    ),
    "a run taken over": Situation(f"train {CONFIG}", prepare=is_taken_over),
    "a run in use": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --allow_change=train.steps",
        prepare=is_in_use,
    ),
    "eval of a step and of the best one": Situation(f"eval {RUN} --best --step=1"),
    "eval of a run without checkpoints": Situation(f"eval {RUN}", "rm -r runs/a/checkpoints/*"),
    "inspection of a run without checkpoints": Situation(
        f"checkpoint inspect {RUN}", "rm -r runs/a/checkpoints/*"
    ),
    "another optimizer in the workdir": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --config.optim.name=lion "
        "--config.optim.lr=1e-4"
    ),
    "parameters of another dtype in the workdir": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --config.precision.params=bfloat16"
    ),
    "an average of one": Situation(f"average {RUN} --steps=1 --out=averaged"),
    "init_from text of another tokenizer": Situation(
        f"train {CONFIG} --init_from=runs/a --config.data.tokenizer=characters"
    ),
    # models of others
    "no such GGUF": Situation("import --from=none.gguf --workdir=new"),
    "a GGUF of no model": Situation(
        "import --from=odd.gguf --workdir=new",
        f"{PYTHON} -c \"import gguf, numpy as np; w = gguf.GGUFWriter('odd.gguf', 'llama'); "
        "w.add_tensor('a', np.zeros(32, np.float32)); w.write_header_to_file(); "
        'w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()"',
    ),
    "an import of a run": Situation("import --from=runs/a --workdir=new"),
    "a folder of no model": Situation("import --from=texts --workdir=new"),
    "a model that was damaged": Situation(
        "import --from=exported --workdir=new", "echo >> exported/config.json"
    ),
    "a full disk under an export": Situation(f"export {RUN} --out=out", prepare=fills_the_disk),
    "a scheme of a folder": Situation(
        "export --workdir=runs/tiny --out=m --to=hf --scheme=q8_0", TINY_GGUF
    ),
    "a calibration text without a scheme": Situation(
        "export --workdir=runs/tiny --out=m --to=hf --calibration=texts/*.txt "
        "--calibration_tokens=256",
        TINY_GGUF,
    ),
    "a calibration text that no scale is searched by": Situation(
        "export --workdir=runs/tiny --out=m.gguf --scheme=q8_0 --calibration=train", TINY_GGUF
    ),
    "a calibration text that overflows": Situation(
        "export --workdir=runs/tiny --out=m.gguf --scheme=q4_0 --calibration=texts/*.txt "
        "--calibration_tokens=256",
        TINY_GGUF,
        prepare=overflows,
    ),
    "weights that no scheme holds": Situation(
        "export --workdir=runs/tiny --out=m.gguf --scheme=q8_0", TINY_GGUF, prepare=cannot_quantize
    ),
    "a model of the hub without its library": Situation(HUB, prepare=has_no("huggingface_hub")),
    "a model of the hub as GGUF": Situation(
        HUB,
        f'PYTHONPATH={ROOT} {PYTHON} -c "{GGUF}"',
        prepare=publishes("config.json", "tiny.gguf"),
    ),
    "a hub that cannot be reached": Situation(HUB, prepare=cannot_reach_the_hub),
    # object stores
    "checkpoints in a folder elsewhere": Situation(
        "config validate --config=c.py --config.checkpoint.directory=/mnt/disk"
    ),
    "checkpoints at another place": Situation(
        f"train --config=c.py {RUN} --config.checkpoint.directory=memory://bucket/run"
    ),
    "a store that refuses": Situation(
        f"train {CONFIG} --config.checkpoint.directory=memory://bucket/run", prepare=refuses_objects
    ),
    # processes
    "half of a cluster": Situation(f"train {CONFIG}", prepare=sets(PMI_SIZE="2")),
    "a cluster of letters": Situation(
        f"train {CONFIG}", prepare=sets(PMI_SIZE="two", PMI_RANK="0")
    ),
    "a process beyond the last": Situation(
        f"train {CONFIG} --coordinator=127.0.0.1:4321 --num_processes=2 --process_id=2"
    ),
    # devices
    "too little memory": Situation(f"train {CONFIG}", prepare=has_little_memory),
    "too little memory to evaluate": Situation(f"eval {RUN}", prepare=has_little_memory),
    "no folder for compiled programs": Situation(f"train {CONFIG}", prepare=has_no_cache_folder),
    "a bench of no size": Situation("bench --sizes=0.8m --seconds=0.01"),
    "a bench of a size like none": Situation("bench --sizes=huge"),
    # attention and QK-clip
    "qk_clip of frozen heads": Situation(f"train {CONFIG} {CLIP} --config.optim.freeze=*/query/*"),
    "qk_clip of normed heads": Situation(
        f"train {CONFIG} {CLIP} --config.model.family=qwen3 --config.model.head_dim=8"
    ),
    "a plan for more devices than there are": Situation("plan --config=c.py --config.mesh.fsdp=2"),
    "dropout and keys in a ring": Situation(
        "plan --config=c.py --on=cpu --devices=2 --config.mesh.context=2 "
        "--config.mesh.context_keys=ring --config.regularization.attention_dropout=0.1"
    ),
    "splash of split rows": Situation(
        "plan --config=c.py --on=v5e-4 --config.mesh.context=4 --config.train.attention=splash"
    ),
    "splash on a processor": Situation(
        "plan --config=c.py --on=cpu --config.train.attention=splash"
    ),
    "splash of a warm-up": Situation(
        "plan --config=c.py --on=v5e-4 --config.train.attention=splash "
        "--config.data.sequence=1024 --config.data.sequence_warmup=64@50% "
        "--config.model.max_positions=1024 --config.train.steps=4"
    ),
}


DEVICES = "tests/house/test_fix_lines_of_devices.py::test"

# Of these, the ones that take long.
SLOW = {
    "a cluster of letters",
    "a bench of no size",
    "a run in use",
    "inspection of a run without checkpoints",
    "no folder for compiled programs",
    "eval of a run without checkpoints",
    "parameters of another dtype in the workdir",
    "another optimizer in the workdir",
    "a checkpoint of another shape",
    "a checkpoint that takes too long",
    "a model of the hub as GGUF",
    "a scheme of a folder",
    "a calibration text without a scheme",
    "a calibration text that no scale is searched by",
    "a calibration text that overflows",
    "weights that no scheme holds",
    "a run taken over",
    "all checkpoints damaged",
    "an old checkpoint that stays",
    "init_from text of another tokenizer",
    "qk_clip of frozen heads",
    "qk_clip of normed heads",
    "too little memory",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE = {
    # Its fix, pasted, reads the Hugging Face Hub.
    "recipes/train/init_from.py:as_run:3": "tests/cli/test_import_hub.py::"
    "test_a_name_of_the_hub_without_its_prefix_gets_it_in_the_fix",
    "recipes/train/init_from.py:as_run:2": "tests/recipes/train/"
    "test_init_from.py::test_one_of_several_processes_imports_no_model",
    # In a thread, which is not watched: by the situation of a GGUF that cannot be quantized.
    "checkpoint/gguf_writer.py:_numbers:1": "tests/house/"
    "test_fix_lines.py::test_each_line_that_is_printed_works_when_it_is_pasted",
    "recipes/exchange/importance.py:of_text:1": "tests/recipes/exchange/"
    "test_importance.py::test_inputs_that_are_not_finite_and_a_full_disk_are_named",
    "checkpoint/store.py:_compare:2": "tests/faults/"
    "test_going_on.py::test_moments_in_blocks_of_another_size_are_refused_and_may_begin_anew",
    # In a thread, which is not watched: by the situation "a run taken over".
    "checkpoint/store.py:_refuse_if_lost:1": "tests/house/"
    "test_fix_lines.py::test_each_line_that_is_printed_works_when_it_is_pasted",
    "parallel/host.py:check_rows:1": f"{DEVICES}_a_replay_on_too_many_devices_is_mended_by_fewer"
    "_and_not_by_another_batch",
    # JAX mostly ends a process without its coordinator before this is raised.
    # `test_a_run_that_lost_a_process_goes_on_by_the_same_command` tests that the same command
    # resumes.
    "parallel/peers.py:_lost:1": "tests/parallel/"
    "test_peers.py::test_a_rank_that_loses_the_coordinator_is_told_to_run_the_same_command",
    "parallel/rendezvous.py:split:1": f"{DEVICES}_an_address_without_a_port"
    "_gets_one_for_the_same_host",
    "recipes/plan/attention_kernels.py:check_length:1": f"{DEVICES}_a_length_that_does_not_divide"
    "_over_devices_is_mended_by_its_neighbors",
    # Cautions of schedules and averages, which `config validate` prints and ends with 0.
    "recipes/config.py:cautions:1": "tests/cli/"
    "test_config.py::test_validate_names_what_the_run_does_not_reach_and_how_it_would",
    "recipes/config.py:cautions:2": "tests/cli/"
    "test_config.py::test_validate_names_what_the_run_does_not_reach_and_how_it_would",
    "training/shutdown.py:exit_failed:1": f"{DEVICES}_a_run_that_lost_a_process"
    "_goes_on_by_the_same_command",
    "training/shutdown.py:exit_stalled:1": f"{DEVICES}_a_run_that_hangs_shows_its_limits"
    "_and_goes_on_by_the_same_command",
}

# Places that no test reaches yet.
NOT_YET: set[str] = set()
