"""How a family is written in a folder of Hugging Face: the attributes of its config.json, the names of its tensors. Free of JAX."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from jaxlm.core.errors import ConfigError, DataError

T = TypeVar("T")
MAX_NESTING = 10_000  # layers; their kinds are listed one by one
# What any config.json may say that does not change what the model computes: how it is trained there, how text is drawn
# from it, what the tools that wrote it leave.
IGNORED_ATTRIBUTES = frozenset(
    """
    architectures auto_map model_type dtype torch_dtype transformers_version _name_or_path _attn_implementation
    _attn_implementation_autoset use_cache cache_implementation bos_token_id eos_token_id pad_token_id unk_token_id
    id2label label2id problem_type finetuning_task task_specific_params tokenizer_class prefix
    output_attentions output_hidden_states output_router_logits return_dict return_dict_in_generate torchscript
    chunk_size_feed_forward is_decoder gradient_checkpointing pretraining_tp keys_to_ignore_at_inference
    initializer_range initializer_factor attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop
    attn_pdrop router_jitter_noise use_bfloat16 attention_probs_dropout_prob hidden_dropout_prob output_past num_labels
    _num_labels transformers.js_config unsloth_version unsloth_fixed
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups temperature top_k top_p
    typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    remove_invalid_values exponential_decay_length_penalty output_scores sep_token_id
    """.split()
)


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One tensor of theirs and the leaves of ours that lie side by side in it.

    `theirs` has {i} for the layer and {e} for the expert; with {i}, paths of `ours` are those in a layer. Matrices are
    kept as [ins, outs] where `same`, as [outs, ins] where `transposed` (a torch Linear), and leaves of one row are joined
    along outs; `by head` is `transposed` with the leaves joined head by head. A tensor may have its name only `beside`
    another leaf of the layer, or `without` it. One that `is_exact` is written in float32, whatever the others are in.
    """

    hf_name: str
    param_path: tuple[str, ...]
    layout: Literal["same", "transposed", "by head"] = "same"
    beside: str | None = None
    without: str | None = None
    is_exact: bool = False

    @property
    def is_of_layer(self) -> bool:
        """Whether every layer has one."""
        return "{i}" in self.hf_name

    @property
    def is_of_expert(self) -> bool:
        """Whether every expert has one."""
        return "{e}" in self.hf_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrapperConfig:
    """A larger model, of which an architecture is the part that reads and writes text.

    Its config.json has the attributes of that part in one, `attribute`, without those that are as `absent`; `own` are its
    others, which say nothing of text. `names` are what names of the part's tensors begin with here and there, one pair for
    each version of transformers; `beside` is what those of its other parts begin with.
    """

    model_type: str
    attribute: str
    absent: Mapping[str, Any]
    own: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    beside: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hub:
    """An architecture of transformers: its names in config.json, its tensors, and what files hold beside these.

    `optional` is what names may begin with or not; `buffers` are the ends of names of what can be computed again,
    `others` what the names of parts begin with that this architecture does not compute. `older` are ends of names that
    older files have instead of ours. `ahead` are layers after the last that predict tokens beyond the next, which it does
    not compute either: what their names begin with, and the attribute that counts them. `whole` is a model that has this
    one as a part.
    """

    model_type: str
    architecture: str
    rows: tuple[TensorMapping, ...]
    optional: str = ""
    buffers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    older: tuple[tuple[str, str], ...] = ()
    ahead: tuple[str, str] | None = None
    whole: WrapperConfig | None = None

    def whole_of(self, raw: Mapping[str, Any]) -> WrapperConfig | None:
        """The larger model, where a config.json is of it."""
        is_whole = self.whole is not None and raw.get("model_type") == self.whole.model_type
        return self.whole if is_whole else None

    def layers_ahead(self, raw: Mapping[str, Any]) -> tuple[str, ...]:
        """What the names of each layer `ahead` begin with, by a config.json."""
        if self.ahead is None:
            return ()
        name, counted = self.ahead
        depth, count = raw.get("num_hidden_layers"), raw.get(counted)
        if not isinstance(depth, int) or not isinstance(count, int):
            return ()
        numbers = range(depth, depth + min(count, MAX_NESTING))
        return tuple(name.replace("{i}", str(number)) for number in numbers)

    @property
    def head(self) -> str:
        """The name of the unembedding, which a tied model may store too."""
        return next(row.hf_name for row in self.rows if row.param_path == ("unembedding/weight",))


def linears(hf_name: str, **names: str) -> tuple[TensorMapping, ...]:
    """The weight and the bias of torch Linears: `theirs` with each of their names in {}, and our path."""
    return tuple(
        row
        for name, ours in names.items()
        for row in (
            TensorMapping(
                f"{hf_name.replace('{}', name)}.weight", (f"{ours}/weight",), "transposed"
            ),
            TensorMapping(f"{hf_name.replace('{}', name)}.bias", (f"{ours}/bias",)),
        )
    )


def norms(hf_name: str, **names: str) -> tuple[TensorMapping, ...]:
    """The scale and the bias of norms: `theirs` with each of their names in {}, and our path."""
    return tuple(
        row
        for name, ours in names.items()
        for row in (
            TensorMapping(f"{hf_name.replace('{}', name)}.weight", (f"{ours}/scale",)),
            TensorMapping(f"{hf_name.replace('{}', name)}.bias", (f"{ours}/bias",)),
        )
    )


def uncomputed(hub: Hub, why: str) -> ConfigError:
    """That an architecture of transformers does not compute a model of ours."""
    return ConfigError(
        f"{hub.architecture} of transformers does not compute this model",
        where="model",
        why=why,
        fix="such a model stays here: jaxlm generate, eval and train use it",
    )


class Attributes:
    """A config.json that is read attribute by attribute, so that what nobody read is known.

    Raises:
      DataError: at `finish`, with all of them, where an attribute is missing, of another type, unknown, or has a value
        under which the model would compute something else than ours.
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
        """The value of an attribute; the default where it is absent or null, and a problem where there is none either.

        Integers count something: they are at `least` so much, and at `most`.
        """
        self._read.add(name)
        value = self._raw.get(name)
        if value is None:
            if not default:
                self._problems.append(f"{name} is missing")
                return 1
            return default[0]
        is_truth = isinstance(value, bool)
        wanted = kind if isinstance(kind, tuple) else (kind,)
        if kind is float and isinstance(value, int) and not is_truth:
            return float(value)
        if not isinstance(value, wanted) or (is_truth and bool not in wanted):
            self._problems.append(f"{name} = {value!r:.60} is no {wanted[0].__name__}")
            return default[0] if default else 1
        if isinstance(value, int) and kind is int and not least <= value <= most:
            self._problems.append(f"{name} = {value!r:.60} is not from {least} to {most:,}")
            return default[0] if default else 1
        return value

    def has(self, name: str) -> bool:
        """Whether config.json has the attribute, be it null."""
        return name in self._raw

    def expect(self, name: str, *allowed: Any) -> None:
        """The attribute, where it is there, has one of these values: the only ones that ours computes."""
        self._read.add(name)
        if name in self._raw and not any(self._raw[name] == value for value in allowed):
            self.reject(name, f"{' or '.join(map(repr, allowed))}")

    def choose(self, name: str, meanings: Mapping[str, T], default: str) -> T:
        """What the text of an attribute means to us."""
        value = self.get(name, default, kind=str)
        if value not in meanings:
            self.reject(name, f"{', '.join(sorted(meanings))}")
            return meanings[default]
        return meanings[value]

    def inner(self, name: str) -> "Attributes | None":
        """The attributes of one that holds others; None where it is absent or null. Its problems are ours."""
        value = self.get(name, None, kind=dict)
        if value is None:
            return None
        found = Attributes(value, self._where)
        found._problems = self._problems
        return found

    def reject(self, name: str, computed: str) -> None:
        """Notes that the value of an attribute is none that we compute."""
        self._problems.append(
            f"{name} = {self._raw[name]!r:.60}, and {computed} is what jaxlm computes"
        )

    def note(self, problem: str) -> None:
        """Notes a problem."""
        self._problems.append(problem)

    def split(self, name: str, *parts: str) -> "list[Attributes] | None":
        """The attributes in each part of an attribute that holds these parts, which is read with that; else None."""
        value = self._raw.get(name)
        if not isinstance(value, dict) or value.keys() != set(parts):
            return None
        del self._raw[name]
        found = [Attributes(value[part] or {}, self._where) for part in parts]
        for each in found:
            each._problems = self._problems
        return found

    def ignore(self, *names: str) -> None:
        """Attributes that say again what others say, or nothing that is computed."""
        self._read.update(names)

    def note_unused(self, neutral: Iterable[str] = ()) -> None:
        """Notes every attribute that nobody read."""
        for name in sorted(self._raw.keys() - self._read - set(neutral)):
            self._problems.append(f"{name} = {self._raw[name]!r:.60} is not known")

    def check(self) -> None:
        """Raises DataError with everything that was noted, and every attribute that nobody read."""
        self.note_unused(IGNORED_ATTRIBUTES)
        if self._problems:
            shown = self._problems[:5]
            more = len(self._problems) - len(shown)
            raise DataError(
                f"{len(self._problems)} attributes of {self._what} are not understood",
                where=self._where,
                why="\n".join(shown) + (f"\nand {more} more" if more else ""),
                fix="a model that computes something else would be imported wrongly, so it is not imported",
            )
