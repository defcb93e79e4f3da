"""Situations of adapters, whose fixes `test_fix_lines` pastes."""

import sys

import safetensors.numpy

from jaxlm.recipes.use import calibrate, quantize
from tests.house.situation import CONFIG, RUN, Situation
from tests.house.situations_recipes import GPT2, SMALL, trained

LORA = "--config.tune.name=lora --config.tune.rank=2"
TUNED = trained("tuned", f"{LORA} --init_from=runs/a")
BOTH_WAYS = trained("both", f"{LORA} --config.objective.name=prefix --init_from=runs/a")
NECK = trained("neck", "--config.tune.name=bottleneck --config.tune.hidden=2 --init_from=runs/a")
PREFIX = "--config.tune.name=prefix --config.tune.length=2"
AHEAD = trained("ahead", f"{PREFIX} --init_from=runs/a")
TIED = "--config.model.tied=True"
WHOLE = f"{trained('tied', TIED)}; " + trained(
    "whole", f"{PREFIX} {TIED} --init_from=runs/tied --config.tune.also=embedding/table"
)
LATENT = (
    "--config.model.family=deepseek_v2 --config.model.experts=2 --config.model.top_k=1 "
    "--config.model.groups=1 --config.model.top_groups=1 --config.model.hidden=32 "
    "--config.model.dense_hidden=32"
)
LATENT_BASE = trained("latent", LATENT)
FACTORS = f"{GPT2}; " + trained(
    "factors",
    f"--config.model.family=gpt2 {SMALL} --config.tune.name=ia3 --init_from=runs/gpt2 "
    "'--config.tune.at=*/attention/query/*,*/attention/key/*' "
    "'--config.tune.inputs=*/attention/query/*'",
)
EXPERTS = trained(
    "experts",
    "--config.model.family=mixtral --config.model.experts=2 --config.model.top_k=1 "
    "--config.model.hidden=32",
)
CODES = (
    f"{sys.executable} -m jaxlm quantize --workdir=runs/a --scheme=int8 --out=runs/codes "
    f"--allow=loss:50% --quiet >&2"
)
INT4 = f"quantize {RUN} --scheme=int4 --block=16 --out=q"
ENCODER = trained("encoder", f"--config.model.family=bert {SMALL} --config.objective.name=masked")
PEFT = (
    f"{TUNED}; {sys.executable} -m jaxlm export --workdir=runs/tuned --to=peft --out=peft "
    "--quiet >&2"
)
FOLDER = f"{sys.executable} -m jaxlm export --workdir=runs/a --out=hf --quiet >&2"
MOVED = 'mv runs/a runs/base; sed -i \'s#"run": ".*"#"run": "gone"#\' runs/tuned/base.json'
EARLIER = 'sed -i \'s/"step": 2/"step": 1/\' runs/tuned/base.json'


def full_library(patch):
    """Make the library that writes tensors fail with an error of its own."""

    def save_file(*_, **__):
        raise safetensors.SafetensorError("no space left on device")

    patch.setattr(safetensors.numpy, "save_file", save_file)


def allows_nothing(patch):
    """Make every growth of the loss too much."""
    patch.setattr(quantize, "_allowed", lambda options: {"loss": -1.0})


def not_finite(patch):
    """Make a weight that is quantized infinite."""
    patch.setattr(quantize, "is_finite", lambda weight: False)


def overflows(patch):
    """Make the inputs of layers infinite."""
    patch.setattr(calibrate, "is_finite", lambda arrays: False)


SITUATIONS: dict[str, Situation] = {
    "a tied head that is trained whole": Situation(
        f"train {CONFIG} {LORA} {TIED} --init_from=runs/tied '--config.tune.also=unembedding/*'",
        trained("tied", TIED),
    ),
    "the data of a model that is no run": Situation(
        "data peek --config=c.py --init_from=hf", FOLDER
    ),
    "an imported model without text": Situation(
        "train --init_from=runs/a --workdir=new", "touch runs/a/imported.json", more="--stop_at=1"
    ),
    "QK-clip of an adapter": Situation(
        f"config validate --config=c.py {LORA} --config.regularization.qk_clip=100"
    ),
    "curvature of an adapter": Situation(
        f"config validate --config=c.py {LORA} --config.optim.name=sophia"
    ),
    "further heads of an adapter": Situation(
        f"config validate --config=c.py {LORA} --config.objective.name=mtp"
    ),
    "quantized weights that are quantized": Situation(
        "quantize --workdir=runs/codes --scheme=int4 --out=q", CODES
    ),
    "quantized weights that no folder has": Situation(
        "export --workdir=runs/codes --out=folder",
        CODES.replace("int8", "nf4"),
        more="--allow=loss:50%",
    ),
    "quantized weights that are averaged": Situation(
        "average --workdir=runs/codes --steps=0 --with=runs/a --out=mean", CODES
    ),
    "quantized weights to start from": Situation(f"train {CONFIG} --init_from=runs/codes", CODES),
    "quantized weights to plan": Situation("plan --config=runs/codes/config.json", CODES),
    "a limit that is no loss": Situation(f"quantize {RUN} --scheme=int8 --out=q --allow=1%"),
    "a loss beyond the limit": Situation(
        f"quantize {RUN} --scheme=int4 --block=16 --out=q", prepare=allows_nothing
    ),
    "weights that are not finite": Situation(
        f"quantize {RUN} --scheme=int8 --out=q", prepare=not_finite
    ),
    "blocks of integers": Situation(
        f"quantize {RUN} --scheme=w8a8 --block=16 --out=q", more="--allow=loss:50%"
    ),
    "an adapter of rounded weights": Situation(
        f"config validate --config=c.py {LORA} --config.precision.qat=w8a8"
    ),
    "two roundings of products": Situation(
        "config validate --config=c.py --config.precision.qat=w8a8 --config.precision.products=int8"
    ),
    "a limit of flips without tasks": Situation(f"{INT4} --allow=flips:1%"),
    "a search for codes without a text": Situation(
        f"{INT4} --method=gptq --calibration_tokens=256", more="--allow=loss:50%"
    ),
    "a search for other codes": Situation(
        f"quantize {RUN} --scheme=int8 --method=awq --calibration=train --calibration_tokens=256 "
        "--out=q",
        more="--allow=loss:50%",
    ),
    "a text that rounding to nearest does not read": Situation(
        f"{INT4} --calibration=train --calibration_tokens=256", more="--allow=loss:50%"
    ),
    "a calibration text that is reported": Situation(
        f"{INT4} --method=awq --calibration=texts/*.txt --calibration_tokens=4096",
        more="--allow=loss:50%",
    ),
    "inputs that are not finite": Situation(
        f"{INT4} --method=gptq --calibration=train --calibration_tokens=256",
        more="--allow=loss:50%",
        prepare=overflows,
    ),
    "a search for the codes of an encoder": Situation(
        "quantize --workdir=runs/encoder --scheme=int4 --block=16 --out=q --method=gptq "
        "--calibration=train --calibration_tokens=256",
        ENCODER,
        more="--allow=loss:50%",
    ),
    "an average of adapters": Situation(
        "average --workdir=runs/tuned --newest=2 --out=mean", TUNED
    ),
    "an import of nothing": Situation("import --workdir=new", "cp -r exported model"),
    "a student without a teacher": Situation(
        "config validate --config=c.py --config.objective.name=distill"
    ),
    "a teacher of another vocabulary": Situation(
        f"train {CONFIG} --config.objective.name=distill --config.objective.teacher=runs/a "
        "--config.model.vocab=640"
    ),
    "no place of an adapter": Situation(
        f"config validate --config=c.py {LORA} '--config.tune.at=()'"
    ),
    "leading parts of a quantized base": Situation(
        "config validate --config=c.py --config.tune.name=qlora --config.tune.rank=2 "
        "--config.tune.init=pissa"
    ),
    "an adapter of nothing": Situation(f"train {CONFIG} {LORA}"),
    "an adapter of no layer": Situation(
        f"train {CONFIG} {LORA} --init_from=runs/a --config.tune.at=frobnicate/*"
    ),
    "an adapter that matches no parameter": Situation(
        f"train {CONFIG} {LORA} --init_from=runs/a --config.tune.also=frobnicate/*"
    ),
    "a rank too large": Situation(
        f"train {CONFIG} {LORA} --init_from=runs/a --config.tune.rank=99"
    ),
    "an adapter of experts": Situation(
        f"train {CONFIG} {LORA} --init_from=runs/experts --config.model.family=mixtral "
        "--config.model.experts=2 --config.model.top_k=1 --config.model.hidden=32",
        EXPERTS,
    ),
    "an adapter of other settings": Situation(
        f"train {CONFIG} {LORA} --init_from=runs/tuned --config.tune.rank=1", TUNED
    ),
    "an adapter of another arm": Situation(
        f"train {CONFIG} --config.tune.name=ia3 --init_from=runs/tuned", TUNED
    ),
    "all weights of an adapted run": Situation(f"train {CONFIG} --init_from=runs/tuned", TUNED),
    "an imported adapter of other settings": Situation(
        "import --adapter=peft --init_from=runs/a --workdir=new --config.tune.rank=1", PEFT
    ),
    "a base that is gone": Situation(
        f"train --config=c.py --workdir=runs/tuned {LORA} --config.train.steps=3 "
        "--allow_change=train",
        f"{TUNED}; {MOVED}",
    ),
    "an evaluation on a base that is gone": Situation(
        "eval --workdir=runs/tuned", f"{TUNED}; {MOVED}"
    ),
    "a base that changed": Situation(
        f"train --config=c.py --workdir=runs/tuned {LORA} --config.train.steps=3 "
        "--allow_change=train",
        f"{TUNED}; cp -r runs/a runs/base; {EARLIER}",
    ),
    "a merge of all weights": Situation(f"merge {RUN} --out=merged"),
    "a merge of a bottleneck": Situation("merge --workdir=runs/neck --out=merged", NECK),
    "a merge of a prefix": Situation("merge --workdir=runs/ahead --out=merged", AHEAD),
    "a prefix for transformers": Situation("export --workdir=runs/ahead --out=m", AHEAD),
    "a prefix and a tied embedding for PEFT": Situation(
        "export --workdir=runs/whole --to=peft --out=m", WHOLE
    ),
    "a prefix of another length": Situation(
        f"train {CONFIG} {PREFIX} --config.tune.length=3 --init_from=runs/ahead", AHEAD
    ),
    "training of an imported prefix": Situation(
        "train --workdir=again",
        f"{AHEAD}; {sys.executable} -m jaxlm export --workdir=runs/ahead --to=peft --out=peft "
        f"--quiet >&2; {sys.executable} -m jaxlm import --adapter=peft --init_from=runs/a "
        "--workdir=again --quiet >&2",
    ),
    "a prefix of latent attention": Situation(
        f"train {CONFIG} {PREFIX} --init_from=runs/latent {LATENT}", LATENT_BASE
    ),
    "a prefix of another base": Situation(
        "import --adapter=peft --init_from=runs/gpt2 --workdir=new",
        f"{AHEAD}; {sys.executable} -m jaxlm export --workdir=runs/ahead --to=peft --out=peft "
        f"--quiet >&2; {GPT2}",
    ),
    "a prefix of an encoder": Situation(
        f"config validate --config=c.py {PREFIX} --config.model.family=bert "
        "--config.objective.name=masked"
    ),
    "a prefix without positions": Situation(
        f"config validate --config=c.py {PREFIX} --config.model.family=gpt2 "
        "--config.model.max_positions=33"
    ),
    "a prefix of rows that are split": Situation(
        f"check --config=c.py {PREFIX} --config.mesh.context=2"
    ),
    "quantized weights that are trained": Situation(
        f"train {CONFIG} --config.tune.name=qlora --config.tune.rank=2 --init_from=runs/a "
        "--config.tune.also=*/attention/query/*"
    ),
    "a merge onto a base that is not quantized": Situation(
        "merge --workdir=runs/tuned --out=merged --onto=original", TUNED
    ),
    "all weights for PEFT": Situation(f"export {RUN} --to=peft --out=m"),
    "a bottleneck for PEFT": Situation("export --workdir=runs/neck --to=peft --out=m", NECK),
    "factors of a fused projection for PEFT": Situation(
        "export --workdir=runs/factors --to=peft --out=m", FACTORS
    ),
    "an adapter of PEFT into a file": Situation(
        "export --workdir=runs/tuned --to=peft --out=c.py/m", TUNED
    ),
    "an adapter of PEFT that the library cannot write": Situation(
        "export --workdir=runs/tuned --to=peft --out=m", TUNED, prepare=full_library
    ),
    "an adapter of another base": Situation(
        "import --adapter=peft --init_from=runs/gpt2 --workdir=new", f"{PEFT}; {GPT2}"
    ),
    "an adapter of a run without one": Situation(f"eval {RUN} --adapter=runs/a"),
    "an adapter of another objective": Situation(f"eval {RUN} --adapter=runs/both", BOTH_WAYS),
    "an adapter on another step": Situation(f"eval {RUN} --step=1 --adapter=runs/tuned", TUNED),
    "an adapter on an average": Situation(f"eval {RUN} --weights=ema --adapter=runs/tuned", TUNED),
    "next of an imported adapter": Situation(
        "import --adapter=peft --init_from=runs/a --workdir=new", PEFT, code=0
    ),
}

# Each trains a model, or several.
SLOW = {
    "a tied head that is trained whole",
    "an adapter of PEFT that the library cannot write",
    "an adapter of PEFT into a file",
    "quantized weights that are quantized",
    "quantized weights that no folder has",
    "quantized weights that are averaged",
    "quantized weights to start from",
    "quantized weights to plan",
    "a limit that is no loss",
    "a loss beyond the limit",
    "weights that are not finite",
    "a search for codes without a text",
    "blocks of integers",
    "a search for other codes",
    "a text that rounding to nearest does not read",
    "a calibration text that is reported",
    "inputs that are not finite",
    "a search for the codes of an encoder",
    "an average of adapters",
    "quantized weights that are trained",
    "a merge onto a base that is not quantized",
    "an adapter of nothing",
    "an adapter of no layer",
    "an adapter that matches no parameter",
    "a rank too large",
    "an adapter of experts",
    "an adapter of other settings",
    "an adapter of another arm",
    "all weights of an adapted run",
    "an imported adapter of other settings",
    "a base that is gone",
    "an evaluation on a base that is gone",
    "a base that changed",
    "a merge of a bottleneck",
    "a merge of a prefix",
    "a prefix for transformers",
    "a prefix and a tied embedding for PEFT",
    "a prefix of another length",
    "a prefix of latent attention",
    "training of an imported prefix",
    "a prefix of another base",
    "a prefix of rows that are split",
    "a bottleneck for PEFT",
    "factors of a fused projection for PEFT",
    "an adapter of another base",
    "an adapter on another step",
    "an adapter on an average",
    "next of an imported adapter",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE: dict[str, str] = {
    # By the slow situation "next of an imported adapter", which a run of one test leaves out.
    "cli/importing.py:_import_adapter:1": "tests/house/"
    "test_fix_lines.py::test_each_line_that_is_printed_works_when_it_is_pasted",
    "recipes/scaling/law.py:read:1": "tests/recipes/scaling/"
    "test_scale.py::test_too_few_runs_are_refused_with_lines_that_make_the_missing_ones",
    "recipes/language_model.py:_check_trained:1": "tests/recipes/"
    "test_language_model.py::test_what_an_untrained_model_lacks_is_an_error_with_a_fix",
    "recipes/use/untrained.py:fresh_run:1": "tests/recipes/"
    "test_language_model.py::test_what_an_untrained_model_lacks_is_an_error_with_a_fix",
    "recipes/language_model.py:load:1": "tests/recipes/"
    "test_language_model.py::test_what_is_wrong_is_an_error_with_a_fix",
    "recipes/exchange/adapter_places.py:whole_paths:1": "tests/tune/"
    "test_peft.py::test_an_embedding_of_an_adapter_of_a_tied_base_is_refused",
    "recipes/use/calibrate.py:run:2": "tests/recipes/use/"
    "test_calibrate.py::test_inputs_that_are_not_finite_and_a_full_disk_are_named",
}

# Places that no test reaches yet.
NOT_YET: set[str] = {
    "corpus/comparison.py:_missing:1",
    "recipes/plan/attention_kernels.py:check:1",
    "recipes/train/run.py:_interruptible:1",
    "recipes/use/average.py:_agreed:3",
    "recipes/use/load.py:check_generates:2",
    "training/loop.py:preempted:1",
    "recipes/exchange/export_adapter.py:_unsupported:1",
    "recipes/language_model.py:export:1",
    "recipes/setup.py:taught_run:1",
    "recipes/train/programs.py:__init__:1",
}
