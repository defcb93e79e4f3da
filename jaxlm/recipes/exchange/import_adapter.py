"""Make a run of a base and a folder of PEFT: step 0 has the adapter, base.json names the base."""

import dataclasses
import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint.hub_folder import DTYPES, Folder
from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice, layout
from jaxlm.core import config, random, tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, DataError, InputMissing, listed
from jaxlm.data import chat_templates, tokenizer_file
from jaxlm.models.families.hub import Attributes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import adapter_places, import_model
from jaxlm.recipes.exchange.adapter_places import (
    IA3,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PREFIX,
    AdapterPlace,
)
from jaxlm.recipes.exchange.import_model import copy_hub_files, keep_template
from jaxlm.recipes.exchange.virtual_tensors import KINDS, VirtualContents
from jaxlm.recipes.train.init_from import as_run
from jaxlm.recipes.use import load
from jaxlm.training.rundir import RunDir
from jaxlm.tune import surgery

# Fields that change nothing that the adapter computes: notes, and rules that the keys repeat.
IGNORED = """
    auto_mapping base_model_name_or_path revision task_type inference_mode peft_version
    fan_in_fan_out init_ia3_weights exclude_modules layers_pattern megatron_config megatron_core
    qalora_group_size runtime_config eva_config
""".split()
# Fields of other functions, which must be off.
OFF = """
    alora_invocation_tokens arrow_config corda_config ensure_weight_tying kasa_config
    layer_replication loftq_config lora_bias lora_ga_config monteclora_config target_parameters
    trainable_token_indices use_bdlora use_qalora velora_config
""".split()
ENDS = {"LORA": (LORA_A, LORA_B, MAGNITUDE), "IA3": (IA3,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The adapter to import, its base, and the new run directory."""

    adapter: Path  # a folder of PEFT
    workdir: Path
    init_from: str  # RUN[@STEP] of the base, or a model of another library
    overrides: Sequence[tuple[str, str]] = ()
    cpu_devices: int | None = None


def import_adapter(options: AdapterOptions, say: Log = lambda _: None) -> dict[str, Any]:
    """Make a run whose step 0 has the adapter of a PEFT folder, for the base of another run.

    Raises CommandError if the run directory is in use, InputMissing if there is no such base, and
    as `read_folder`.
    """
    import_model.check_free(options.workdir, "--workdir", "an import")
    init_from = as_run(options.init_from, options.workdir, options.cpu_devices, say)
    base = load.open_run_ref(init_from, "--init_from", say)
    adapter = read_folder(options.adapter, base, overrides=options.overrides, flag="--init_from")
    flags: dict[str, Any] = {"step": base.step, "cpu_devices": options.cpu_devices}
    opened = load.load_run(
        base.workdir, is_merged=False, adapter=lambda _: adapter, say=say, **flags
    )
    run, params = opened.run, opened.model.own(opened.params)
    answer: dict[str, Any] = {
        "workdir": str(options.workdir),
        "adapter": run.tune.name,
        "parameters": tree.count(params),
        "tensors": len(adapter.contents.arrays),
        "base": base.record(),
    }
    with RunDir(options.workdir) as directory:
        directory.write_json(load.BASE, base.record())
        copy_hub_files(base.workdir, directory)
        if (template := chat_templates.of_folder(options.adapter)) is not None:
            keep_template(template, directory.path, say)
        facts = answer | {"source": options.adapter.name}
        tokenizer = (base.workdir / "tokenizer").read_bytes()
        import_model.write(directory, run, params, tokenizer, facts)
    adapter.log_absent(say)
    return answer


def read_folder(
    path: Path,
    base: load.InitSource,
    *,
    overrides: Sequence[tuple[str, str]] = (),
    flag: str = "--workdir",
) -> "FolderAdapter":
    """Return the adapter of a PEFT folder, for the model of a run.

    Each key of the file and each field of adapter_config.json is read or refused. An adapter of a
    fused projection is copied to each of its parts. If the ranks differ, the smaller ones get
    columns of A as a new adapter has, and zeros in B. Layers without an adapter get a new one,
    which changes nothing.

    Raises:
      ConfigError: if the base has an adapter of its own, or `overrides` change the adapter's
        settings.
      InputMissing: if there is no such folder.
      DataError: if a key, a shape or a field does not fit the base, with the whole list.

    Args:
      path: the folder.
      base: the run and step of the model.
      overrides: settings by path, which replace those of the base.
      flag: the flag that names the base, for errors.
    """
    folder = AdapterFolder(path)
    where = str(path / adapter_places.CONFIG)
    is_virtual = folder.config.get("peft_type") in KINDS
    settings = None if is_virtual else read_settings(folder.config, where)
    load.check_plain(base, flag)
    decoder = base.run.decoder(
        setup.vocabulary(base.run, tokenizer_file.read(base.workdir / "tokenizer").size)
    )
    tensors = layout(decoder, base.run.model.HUB)
    contents = (
        VirtualContents(folder, folder.config, where, decoder, tensors)
        if settings is None
        else Contents(folder, settings, tensors)
    )
    contents.check(folder.base_flag(flag))
    raw = config.to_json(base.run) | {"tune": contents.tune(is_tied=decoder.tied)}
    if settings is None:  # rows as long as the positions allow
        room = max(base.run.model.max_positions - raw["tune"]["length"], 1)
        raw["data"]["sequence"] = min(raw["data"]["sequence"], room)
    run = config.from_json(Run, raw, str(path), overrides=overrides)
    if changes := load.adapter_differences(config.from_json(Run, raw, str(path)), run):
        raise ConfigError(
            "the settings of an imported adapter are those of its folder",
            where=changes[0].path,
            why=listed([*map(str, changes)], 3),
            fix=load.flags_of(changes),
        )
    return FolderAdapter(run=run, contents=contents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderAdapter(load.Adapter):
    """The adapter of a PEFT folder."""

    contents: "Contents | VirtualContents"

    def leaves(self, model: setup.ShardedModel, base: Any) -> Any:
        """Return the leaves of the folder; those that it lacks have the values of a new adapter."""
        change = setup.surgery_of(self.run)
        assert change is not None

        def initial(base: Any) -> Any:
            key = random.key(self.run.seed, "init")
            return model.own(surgery.adapted_params(model.stored, change, base, key))

        with jax.set_mesh(model.mesh):
            params = jax.jit(initial, out_shardings=model.own(model.shardings))(base)
        leaves = self.contents.leaves(tree.leaves(params), self.run.tune)
        return tree.map_with_path(
            lambda path, leaf: jax.device_put(leaves[path].astype(leaf.dtype), leaf.sharding),
            params,
        )

    def log_absent(self, say: Log) -> None:
        """Log the number of layers that have a new adapter."""
        if absent := self.contents.absent:
            say(f"{absent} layers have no adapter in the folder; they get a new one, B = 0")


class AdapterFolder(Folder):
    """A folder of PEFT. Nothing in it is executed, and no pickle is opened.

    Raises InputMissing if there is no folder or one of its two files is missing; DataError if a
    file is damaged, too large, or outside the folder.
    """

    def __init__(self, path: Path):
        self.path = path
        config_file, tensors = adapter_places.CONFIG, adapter_places.TENSORS
        names = [each.name for each in path.iterdir()] if path.is_dir() else []
        if config_file not in names or tensors not in names:
            pickles = [name for name in names if name.endswith(".bin")]
            missing = tensors if config_file in names else config_file
            raise InputMissing(
                f"there is no {missing} in the folder",
                where=f"--adapter={path}",
                why=f"{pickles[0]} may hold code that would be run, and is not opened"
                if pickles
                else f"an adapter of PEFT is a folder with {config_file} and {tensors}",
                fix="save it as safetensors with PEFT: model.save_pretrained(folder)",
            )
        is_cached = path.resolve().parent.name == "snapshots"
        self._root = path.resolve().parent.parent if is_cached else path.resolve()
        self.config = self.read_json(config_file)
        self._files = {key: (tensors, *rest) for key, rest in self._header(tensors).items()}

    def base_flag(self, flag: str) -> str:
        """Return the flag that names the base: the run that the folder names, if it is here."""
        named = self.config.get("base_model_name_or_path")
        base = (
            named
            if isinstance(named, str) and (Path(named) / "checkpoints").is_dir()
            else "runs/base"
        )
        return f"{shlex.quote(f'{flag}={base}')}    # the model that the adapter was trained on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields of adapter_config.json that define the function of an adapter."""

    kind: str
    targets: Any
    saved: list[str]
    layers: Any = None  # layers_to_transform
    inputs: Any = ()  # feedforward_modules
    rank: int = 1
    alpha: float = 1.0
    dropout: float = 0.0
    is_root: bool = False
    is_dora: bool = False
    ranks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alphas: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def scale(self, name: str) -> float:
        """Return the factor of the update of a module."""
        alpha, rank = _of_name(self.alphas, name, self.alpha), _of_name(self.ranks, name, self.rank)
        return alpha / (rank**0.5 if self.is_root else rank)


def read_settings(raw: dict[str, Any], where: str) -> Settings:
    """Return the settings. Raises DataError with each field that is unknown or not supported."""
    fields = Attributes(raw, where, what="an adapter_config.json")
    kind = fields.choose("peft_type", {name: name for name in (*ENDS, *KINDS)}, "LORA")
    fields.ignore(*IGNORED)
    names: dict[str, Any] = {
        "kind": kind,
        "targets": fields.get("target_modules", [], kind=(list, str)),
        "saved": fields.get("modules_to_save", [], kind=list),
    }
    if kind == "IA3":
        names["inputs"] = fields.get("feedforward_modules", [], kind=(list, str))
        if isinstance(names["inputs"], str):
            fields.reject("feedforward_modules", "a list of names")
            names["inputs"] = []
        fields.check()
        return Settings(**names)
    for name in OFF:
        fields.expect(name, None, False, {}, [])
    fields.expect("bias", "none")
    fields.expect("init_lora_weights", True, False, "gaussian", "eva")  # others change the base
    settings = Settings(
        **names,
        rank=fields.get("r", 8),
        alpha=fields.get("lora_alpha", 8.0, kind=float),
        dropout=fields.get("lora_dropout", 0.0, kind=float),
        is_root=fields.get("use_rslora", False, kind=bool),
        is_dora=fields.get("use_dora", False, kind=bool),
        layers=fields.get("layers_to_transform", None, kind=(list, int)),
        ranks=fields.get("rank_pattern", {}, kind=dict),
        alphas=fields.get("alpha_pattern", {}, kind=dict),
    )
    for name, pattern in (("rank_pattern", settings.ranks), ("alpha_pattern", settings.alphas)):
        for key, value in pattern.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not re.fullmatch(r"\^?[\w.]+", key) or not is_number or value <= 0:
                fields.reject(name, "ends of module names with numbers above 0")
                break
    fields.check()
    return settings


def _of_name(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first end of a module's name, or of ^ and its whole name."""
    for key, value in pattern.items():
        if name == key.removeprefix("^") or name.endswith(f".{key}"):
            return value
    return default


class Contents:
    """Tensors of a PEFT folder, and the leaves that they are for.

    Args:
      folder: the folder.
      settings: its settings.
      tensors: tensors of the base.
    """

    def __init__(self, folder: AdapterFolder, settings: Settings, tensors: list[HFTensor]):
        self._folder, self._settings = folder, settings
        self._places = adapter_places.places(tensors)
        self._tensors = tensors
        self._stored = folder.tensors()
        keys = self._stored.keys()
        self._adapted = {
            name: place
            for name, place in self._places.items()
            if any(place.key(end) in keys for end in ENDS[settings.kind])
        }

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every tensor by key."""
        with self._folder.opened() as fetch:
            return {
                key: fetch(key, tuple(slice(0, size) for size in shape))
                for key, (_, shape) in self._stored.items()
            }

    def check(self, fix: str) -> None:
        """Raise DataError with each key that is unknown, missing, or of another shape or dtype.

        `fix` is that of the error.
        """
        expected = self._expected()
        problems = [f"unexpected  {key}" for key in sorted(self._stored.keys() - expected.keys())]
        for key, shape in expected.items():
            if key not in self._stored:
                problems.append(f"missing     {key} {list(shape)}")
                continue
            dtype, stored = self._stored[key]
            if stored != shape:
                problems.append(f"shape       {key}: got {list(stored)}, want {list(shape)}")
            if dtype not in DTYPES:
                problems.append(f"dtype       {key}: got {dtype}, want {', '.join(DTYPES)}")
        problems += adapter_places.not_saved(self._whole, self._settings.saved)
        if not self._adapted and not problems:
            problems = ["missing     a key of an adapted layer"]
        if problems:
            raise DataError(
                f"{len(problems)} tensors of the adapter do not fit the base",
                where=str(self._folder.path / adapter_places.TENSORS),
                why="each key must name a linear layer of the base, and have its shape",
                every=problems,
                fix=fix,
            )

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the keys that the file must have."""
        settings = self._settings
        expected: dict[str, tuple[int, ...]] = {}
        for place in self._named.values():
            outs = sum(part.sizes[1] for part in place.weight.parts)
            if settings.kind == "IA3":
                is_input = self._scales_inputs(place)
                expected[place.key(IA3)] = (1, place.inputs) if is_input else (outs, 1)
                continue
            rank = _of_name(settings.ranks, place.name, settings.rank)
            expected[place.key(LORA_A)] = (rank, place.inputs)
            expected[place.key(LORA_B)] = (outs, rank)
            if settings.is_dora:
                expected[place.key(MAGNITUDE)] = (outs,)
        return expected | {key: each.shape for key, each in self._whole.items()}

    @functools.cached_property
    def _named(self) -> dict[str, AdapterPlace]:
        """Linear maps of the file, and those that a plain list of target_modules names."""
        settings = self._settings
        excluded = self._folder.config.get("exclude_modules")
        if isinstance(settings.targets, str) or settings.layers is not None or excluded:
            return self._adapted
        named = {
            name: place
            for name, place in self._places.items()
            if any(name == each or name.endswith(f".{each}") for each in settings.targets)
        }
        return named | self._adapted

    @functools.cached_property
    def _whole(self) -> dict[str, HFTensor]:
        """Tensors of modules that are saved whole, by key."""
        names = self._settings.saved
        return adapter_places.saved_whole(self._tensors, self._stored.keys(), names, PREFIX)

    def _scales_inputs(self, place: AdapterPlace) -> bool:
        return place.name.endswith(tuple(map(str, self._settings.inputs)))

    @property
    def _parts(self) -> dict[str, list[tuple[AdapterPlace, int]]]:
        """Linear maps of the file and numbers of their parts, by path of our weight."""
        by_path: dict[str, list[tuple[AdapterPlace, int]]] = {}
        for place in self._adapted.values():
            for number, part in enumerate(place.weight.parts):
                by_path.setdefault(part.path, []).append((place, number))
        return by_path

    @property
    def absent(self) -> int:
        """Number of maps without an adapter whose other layers have one."""
        paths = self._parts
        return sum(
            name not in self._adapted and any(part.path in paths for part in place.weight.parts)
            for name, place in self._places.items()
        )

    def tune(self, *, is_tied: bool) -> dict[str, Any]:
        """Return the tune section of the run's config. Raises DataError for a tied embedding."""
        settings, paths = self._settings, self._parts
        every = [part.path for each in self._tensors for part in each.parts]
        whole = adapter_places.whole_paths(
            self._whole,
            is_tied=is_tied,
            folder=self._folder.path,
            fix="merge the adapter with PEFT: model.merge_and_unload().save_pretrained(folder)",
        )
        known: dict[str, Any] = {
            "at": adapter_places.patterns(paths, every),
            "also": whole,
        }
        if settings.kind == "IA3":
            inputs = [
                path
                for path, places in paths.items()
                if all(self._scales_inputs(place) for place, _ in places)
            ]
            return {"name": "ia3", **known, "inputs": adapter_places.patterns(inputs, every)}
        rank = max(self.arrays[place.key(LORA_A)].shape[0] for place in self._adapted.values())
        growth = rank / settings.rank
        return {
            "name": "dora" if settings.is_dora else "lora",
            **known,
            "rank": rank,
            "alpha": settings.alpha * (growth**0.5 if settings.is_root else growth),
            "scale": "root" if settings.is_root else "rank",
            "dropout": settings.dropout,
        }

    def leaves(self, initial: Mapping[str, jax.Array], tune: Any) -> dict[str, np.ndarray]:
        """Return the trained leaves; those that the file lacks keep their initial values."""
        leaves = {path: np.array(leaf, np.float32) for path, leaf in initial.items()}

        def of_layer(part: MappedSlice, name: str = "") -> np.ndarray:
            leaf = leaves[adapter_places.leaf(part, name) if name else part.path]
            return leaf[part.lead] if part.lead else leaf

        adapter_places.write_whole(leaves, self._whole, self.arrays)
        for place in self._adapted.values():
            for number, part in enumerate(place.weight.parts):
                if self._settings.kind == "IA3":
                    factors = self.arrays[place.key(IA3)].reshape(-1)
                    of_layer(part, "ia3")[...] = (
                        factors.reshape(part.shape[: part.ins])
                        if self._scales_inputs(place)
                        else adapter_places.part_of(place.outputs(IA3), number, factors)
                    )
                    continue
                a = self.arrays[place.key(LORA_A)].T
                rank = a.shape[1]
                b = adapter_places.part_of(
                    place.outputs(LORA_B, rank), number, self.arrays[place.key(LORA_B)]
                )
                ratio = np.float32(self._settings.scale(place.name) / tune.factor)
                of_layer(part, "lora_a")[..., :rank] = a.reshape(*part.shape[: part.ins], rank)
                of_layer(part, "lora_b")[:rank] = b * ratio
                if self._settings.is_dora:
                    norms = self.arrays[place.key(MAGNITUDE)]
                    of_layer(part, "magnitude")[...] = adapter_places.part_of(
                        place.outputs(MAGNITUDE), number, norms
                    )
        return leaves
