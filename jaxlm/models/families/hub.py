"""Translation of families to Hugging Face's config.json and tensor names, and back. Free of JAX."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from jaxlm.core.errors import ConfigError, DataError

T = TypeVar("T")
MAX_NESTING = 10_000  # layers; config.json lists their kinds one by one
REQUIRED: Any = object()  # default of an attribute that every config.json must have
# Attributes that do not change what the model computes: training, sampling, traces of tools.
IGNORED_ATTRIBUTES = frozenset(
    """
    architectures auto_map model_type dtype torch_dtype transformers_version _name_or_path
    _attn_implementation _attn_implementation_autoset use_cache cache_implementation bos_token_id
    eos_token_id pad_token_id unk_token_id id2label label2id problem_type finetuning_task
    task_specific_params tokenizer_class prefix output_attentions output_hidden_states
    output_router_logits return_dict return_dict_in_generate torchscript chunk_size_feed_forward
    is_decoder gradient_checkpointing pretraining_tp keys_to_ignore_at_inference initializer_range
    initializer_factor attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop
    attn_pdrop router_jitter_noise use_bfloat16 attention_probs_dropout_prob hidden_dropout_prob
    output_past num_labels _num_labels transformers.js_config unsloth_version unsloth_fixed
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    remove_invalid_values exponential_decay_length_penalty output_scores sep_token_id
    """.split()
)


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One Hugging Face tensor and the parameters of ours that it holds side by side.

    `hf_name` has {i} for the layer and {e} for the expert; with {i}, the paths of `param_path` are
    relative to a layer. Matrices are stored as [ins, outs] (`same`) or [outs, ins] (`transposed`, a
    torch Linear), several parameters concatenated along outs; `by head` is `transposed` with the
    parameters interleaved head by head. An `is_exact` tensor is always written in float32.
    """

    hf_name: str
    param_path: tuple[str, ...]
    layout: Literal["same", "transposed", "by head"] = "same"
    requires: str | None = None  # only in layers with this parameter
    excludes: str | None = None  # only in layers without it
    is_exact: bool = False

    @property
    def is_of_layer(self) -> bool:
        """If every layer has one."""
        return "{i}" in self.hf_name

    @property
    def is_of_expert(self) -> bool:
        """If every expert has one."""
        return "{e}" in self.hf_name


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """One attribute of config.json and the setting that it holds, read and written.

    `default` is transformers' if the attribute is absent, or a function of the settings read
    before. `words` maps the attribute's values to the setting's; the first word of a value is
    written. `value` computes what is written from the family, if the setting may be `auto`.
    """

    name: str
    default: Any = REQUIRED
    kind: type | tuple[type, ...] = int
    least: int = 1
    most: int = 2**31
    words: Mapping[str, Any] | None = None
    value: Callable[[Any], Any] | None = None

    def read(self, attributes: "Attributes", default: Any) -> Any:
        """Return the setting's value; problems are collected in `attributes`."""
        if self.words is not None:
            return attributes.choose(self.name, self.words, default)
        defaults = () if default is REQUIRED else (default,)
        return attributes.get(
            self.name, *defaults, kind=self.kind, least=self.least, most=self.most
        )

    def written(self, value: Any) -> Any:
        """Return the attribute's value."""
        if self.words is None:
            return value
        return next(word for word, meaning in self.words.items() if meaning == value)


def read_settings(
    attributes: "Attributes", table: Mapping[str, ConfigKey], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a config.json by name; `defaults` replace those of the table."""
    settings: dict[str, Any] = {}
    for name, row in table.items():
        default = defaults.get(name, row.default)
        default = default(settings) if callable(default) else default
        settings[name] = row.read(attributes, default)
    return settings


def write_settings(family: Any, table: Mapping[str, ConfigKey]) -> dict[str, Any]:
    """Return the config.json attributes of a family's settings."""
    return {
        row.name: row.written(row.value(family) if row.value else getattr(family, name))
        for name, row in table.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrapperConfig:
    """A multimodal architecture whose text model is one of ours."""

    model_type: str
    attribute: str  # key of config.json that holds the text model's attributes
    defaults: Mapping[str, Any]  # defaults of the text model's attributes
    ignored_attributes: tuple[str, ...]  # keys that do not concern text
    # Prefixes of the text model's tensors, ours and theirs, a pair by version of transformers.
    prefixes: tuple[tuple[str, str], ...]
    other_prefixes: tuple[str, ...]  # prefixes of the other parts' tensors


@dataclasses.dataclass(frozen=True)
class Hub:
    """A transformers architecture: its names in config.json, its tensors, and tensors to ignore."""

    model_type: str
    architecture: str
    mappings: tuple[TensorMapping, ...]
    optional_prefix: str = ""  # prefix that names may lack
    buffer_suffixes: tuple[str, ...] = ()  # suffixes of tensors that can be computed again
    ignored_prefixes: tuple[str, ...] = ()  # prefixes of parts that are not computed
    old_suffixes: tuple[tuple[str, str], ...] = ()  # old suffixes and the present ones
    # Multi-token-prediction layers, not computed: their prefix, and the attribute that counts them.
    mtp_layers: tuple[str, str] | None = None
    wrapper: WrapperConfig | None = None  # multimodal architecture that contains this one

    def wrapper_of(self, raw: Mapping[str, Any]) -> WrapperConfig | None:
        """Return the multimodal architecture if a config.json is of it, else None."""
        is_whole = self.wrapper is not None and raw.get("model_type") == self.wrapper.model_type
        return self.wrapper if is_whole else None

    def mtp_prefixes(self, raw: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the name prefix of each multi-token-prediction layer of a config.json."""
        if self.mtp_layers is None:
            return ()
        name, counted = self.mtp_layers
        depth, count = raw.get("num_hidden_layers"), raw.get(counted)
        if not isinstance(depth, int) or not isinstance(count, int):
            return ()
        numbers = range(depth, depth + min(count, MAX_NESTING))
        return tuple(name.replace("{i}", str(number)) for number in numbers)

    @property
    def head_name(self) -> str:
        """Name of the unembedding, which a tied model may store too."""
        names = {row.param_path: row.hf_name for row in self.mappings}
        return names["unembedding/weight",]


def linears(hf_name: str, **names: str) -> tuple[TensorMapping, ...]:
    """Return the weights and biases of torch Linears: `names` are values of {} and our paths.

    Example:
      >>> [row.hf_name for row in linears("layers.{i}.{}", q_proj="attention/query")]
      ['layers.{i}.q_proj.weight', 'layers.{i}.q_proj.bias']
    """
    return _weights_and_biases(hf_name, names, "weight", "transposed")


def norms(hf_name: str, **names: str) -> tuple[TensorMapping, ...]:
    """Return the scales and biases of norms: `names` are values of {} and our paths."""
    return _weights_and_biases(hf_name, names, "scale", "same")


def _weights_and_biases(
    hf_name: str, names: Mapping[str, str], leaf: str, layout: Literal["same", "transposed"]
) -> tuple[TensorMapping, ...]:
    return tuple(
        row
        for name, path in names.items()
        for row in (
            TensorMapping(f"{hf_name.replace('{}', name)}.weight", (f"{path}/{leaf}",), layout),
            TensorMapping(f"{hf_name.replace('{}', name)}.bias", (f"{path}/bias",)),
        )
    )


def uncomputed(hub: Hub, why: str) -> ConfigError:
    """Return the error of a model that its transformers architecture does not compute."""
    return ConfigError(
        f"{hub.architecture} of transformers does not compute this model",
        where="model",
        why=why,
        fix="keep the model in this format: jaxlm generate, eval and train use it",
    )


class Attributes:
    """A config.json that is read attribute by attribute and records which ones were read.

    Raises:
      DataError: from `check`, with every attribute that is missing, of another type, unknown, or
        has a value that would change what the model computes.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, *, what: str = "a model's config.json"):
        self._raw, self._where, self._what = dict(raw), where, what
        self._read: set[str] = set()
        self._problems: list[str] = []

    def get(
        self,
        name: str,
        *default: Any,
        kind: type | tuple[type, ...] = int,
        least: int = 1,
        most: int = 2**31,
    ) -> Any:
        """Return an attribute's value, or the default if it is absent or null.

        A value of no `kind`, an integer that is not from `least` to `most`, and an absent attribute
        without a default are problems.
        """
        self._read.add(name)
        value = self._raw.get(name)
        is_bool = isinstance(value, bool)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if kind is float and isinstance(value, int) and not is_bool:
            return float(value)
        if value is None:
            if not default:
                self.note(f"{name} is missing")
        elif not isinstance(value, kinds) or (is_bool and bool not in kinds):
            self.note(f"{name} = {value!r:.60} is no {kinds[0].__name__}")
        elif isinstance(value, int) and kind is int and not least <= value <= most:
            self.note(f"{name} = {value!r:.60} is not from {least} to {most:,}")
        else:
            return value
        return default[0] if default else 1

    def has(self, name: str) -> bool:
        """Return if config.json has the attribute, even as null."""
        return name in self._raw

    def expect(self, name: str, *allowed: Any) -> None:
        """Note a problem unless the attribute is absent or has an allowed value."""
        self._read.add(name)
        if name in self._raw and not any(self._raw[name] == value for value in allowed):
            self.reject(name, " or ".join(map(repr, allowed)))

    def choose(self, name: str, meanings: Mapping[str, T], default: str) -> T:
        """Return the meaning of a text attribute."""
        value = self.get(name, default, kind=str)
        if value not in meanings:
            self.reject(name, ", ".join(sorted(meanings)))
        return meanings.get(value, meanings[default])

    def inner(self, name: str) -> "Attributes | None":
        """Return a nested object, or None if it is absent or null; its problems count here."""
        value = self.get(name, None, kind=dict)
        return None if value is None else self._nested(value)

    def split(self, name: str, *parts: str) -> "list[Attributes] | None":
        """Return and remove the objects of an attribute that has exactly these keys; else None."""
        value = self._raw.get(name)
        if not isinstance(value, dict) or value.keys() != set(parts):
            return None
        del self._raw[name]
        return [self._nested(value[part] or {}) for part in parts]

    def _nested(self, value: Mapping[str, Any]) -> "Attributes":
        nested = Attributes(value, self._where)
        nested._problems = self._problems
        return nested

    def reject(self, name: str, computed: str) -> None:
        """Note that jaxlm computes `computed` and not an attribute's value."""
        self.note(f"{name} = {self._raw[name]!r:.60}, and {computed} is what jaxlm computes")

    def note(self, problem: str) -> None:
        """Note a problem."""
        self._problems.append(problem)

    def ignore(self, *names: str) -> None:
        """Mark attributes as read that repeat others or change nothing that is computed."""
        self._read.update(names)

    def note_unused(self, neutral: Iterable[str] = ()) -> None:
        """Note a problem for every attribute that was not read."""
        for name in sorted(self._raw.keys() - self._read - set(neutral)):
            self.note(f"{name} = {self._raw[name]!r:.60} is not known")

    def check(self) -> None:
        """Raise DataError with all problems, unread attributes included."""
        self.note_unused(IGNORED_ATTRIBUTES)
        if self._problems:
            shown, count = self._problems[:5], len(self._problems)
            more = count - len(shown)
            raise DataError(
                f"jaxlm cannot read {count} attribute{'s' if count > 1 else ''} of {self._what}",
                where=self._where,
                why="\n".join(shown) + (f"\nand {more} more" if more else ""),
                fix="import a model without these attributes: jaxlm would compute another function",
            )
