"""How each objective reads rows: in training, and where it is evaluated."""

import functools
import itertools
from collections.abc import Callable, Sequence

from jaxlm.core.errors import ConfigError
from jaxlm.data.corrupt import blanks, fim, masked, pairs, prefix, rows, spans
from jaxlm.data.corrupt.rows import Change, Corruption, Made, Piece, Reading
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.objectives.config import (
    FIM,
    INNER,
    MTP,
    UL2,
    Blank,
    Causal,
    Masked,
    Mixture,
    Objective,
    Paired,
    Prefix,
    Simple,
    Span,
    arms,
    has_ahead,
    has_inner,
)

# Rate and mean length of the spans of the denoisers R (the first two) and X; the seventh, S, is a prefix.
DENOISERS = ((0.15, 3.0), (0.15, 8.0), (0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
SEQUENTIAL = 0.25  # share of a text that the denoiser S predicts
BLANKS = "<|mask|>", "<|sentinel_0|>", "<|sentinel_1|>"  # of GLM: [MASK], [START] and [END]
OF_UL2, OF_MIXTURE = 1, 2  # their draws


def reading(
    objective: Objective, *, is_paired: bool = False
) -> Callable[[Tokenizer, int], Reading]:
    """The function (tokenizer, slots of a row) -> Reading; `is_paired` for a model that reads one row and writes another.

    What an evaluation means: a validation set is read as in training, with draws that never change, and the loss is that of
    what is predicted there; bits per byte are those of the bytes predicted. But `fim` and `mtp` are evaluated as `causal`, on
    documents in their order and by their next tokens: so their bits per byte are those of any left-to-right model. A mixture is evaluated for each
    objective alone: the first that has a weight under the set's name, the others under `NAME.objective`.

    The denoisers of UL2 are drawn evenly, without their mode tokens: no tokenizer reserves any.

    Raises:
      ConfigError: from the function, where the tokenizer lacks what the objective needs, or a row its room.

    Source: of what is evaluated with fim, Bavarian et al. 2022, arXiv:2207.14255, section 4.1; of UL2 Tay et al. 2022,
    arXiv:2205.05131, section 3.1.2.
    """
    return functools.partial(_paired if is_paired else _reading, objective)


def _paired(objective: Objective, tokenizer: Tokenizer, sequence: int) -> Reading:
    """Raises ValueError for an objective that makes no pairs."""
    length = target_length(objective, sequence)
    _check_tokens(objective, tokenizer, "")
    assert isinstance(objective, Paired)
    found = pairs.Pairs(_pairing(objective, tokenizer), length, tokenizer.eos)
    return Reading(found, {"": found})


def target_length(objective: Objective, sequence: int) -> int:
    """Slots of a decoder's row beside an encoder's of `sequence`. Raises ValueError for an objective that makes no pairs."""
    match objective:
        case Span():
            return pairs.length_of_runs(sequence, objective.rate, objective.mean)
        case UL2():
            # The row has one length whatever is drawn for it.
            runs = [pairs.length_of_runs(sequence, *denoiser) for denoiser in DENOISERS]
            return max(*runs, pairs.length_of_end(sequence, SEQUENTIAL))
        case _:
            raise ValueError(f"{objective.name} for an encoder and a decoder")


def _pairing(objective: Paired, tokenizer: Tokenizer) -> Change[pairs.Pair]:
    """What is done with a row that becomes two."""
    sentinels, edges = spans.sentinels(tokenizer), spans.Edges.of(tokenizer)

    def runs(rate: float, mean: float) -> Change[pairs.Pair]:
        return _cutting(
            functools.partial(
                pairs.cut_runs, rate=rate, mean=mean, sentinels=sentinels, edges=edges
            )
        )

    match objective:
        case Span():
            return runs(objective.rate, objective.mean)
        case UL2():
            last = functools.partial(pairs.cut_end, share=SEQUENTIAL, edges=edges)
            return _denoised([*itertools.starmap(runs, DENOISERS), _cutting(last)])


def _cutting(cut: pairs.Cut) -> Change[pairs.Pair]:
    return functools.partial(pairs.cut_all, cut=cut)


def _reading(objective: Objective, tokenizer: Tokenizer, sequence: int) -> Reading:
    if isinstance(objective, Causal | MTP):
        return Reading()
    _check_tokens(objective, tokenizer, "--config.objective.name=causal\n")
    training = _corruption(objective, tokenizer, sequence)
    _check_room(objective, training.room, sequence)
    known = {_evaluated(arm): None for arm in arms(objective)}
    evaluations = {
        f".{arm.name}" if number else "": None
        if arm == Causal()
        else _corruption(arm, tokenizer, sequence)
        for number, arm in enumerate(known)
    }
    return Reading(training, evaluations)


def _evaluated(arm: Simple) -> Simple:
    return Causal() if isinstance(arm, FIM | MTP) else arm


def _corruption(objective: Objective, tokenizer: Tokenizer, sequence: int) -> Corruption:
    change, room = _change(objective, tokenizer, sequence)
    return Corruption(change, room, objective.both_ways, has_inner(objective), has_ahead(objective))


def _change(objective: Objective, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
    """What is done with a row, and the slots that it needs for it."""
    match objective:
        case Causal():
            return rows.causal, 0
        case MTP():
            return rows.further, 0
        case Prefix():
            return prefix.prefixes, 0
        case Masked():
            mask = masked.mark(tokenizer)
            assert mask is not None  # as for the marks below: it was checked
            change = functools.partial(
                masked.masks,
                rate=objective.rate,
                hidden=objective.hidden,
                random=objective.random,
                mask=mask,
                is_text=tokenizer.is_text,
                is_fixed=objective.masking == "static",
                words=masked.Words(tokenizer) if objective.unit == "word" else None,
            )
            return change, 0
        case Span():
            return _spans(objective.rate, objective.mean, tokenizer, sequence)
        case Blank():
            change = functools.partial(
                blanks.blanks,
                rate=objective.rate,
                mean=objective.mean,
                marks=blanks.Marks(*(tokenizer.reserved[name] for name in BLANKS)),
                inner=INNER,
                edges=spans.Edges.of(tokenizer),
            )
            return change, spans.room(sequence, objective.rate, objective.mean)
        case UL2():
            found = [_spans(rate, mean, tokenizer, sequence) for rate, mean in DENOISERS]
            changes, rooms = zip(*found, strict=True)
            last = functools.partial(prefix.prefixes, share=SEQUENTIAL)
            return _denoised([*changes, last]), max(rooms)
        case FIM():
            is_split = objective.level == "character"
            marks = fim.marks(tokenizer)
            assert marks is not None
            change = functools.partial(
                fim.infills,
                rate=objective.rate,
                spm=objective.spm,
                marks=marks,
                tokenizer=tokenizer if is_split else None,
                edges=spans.Edges.of(tokenizer),
            )
            return change, fim.room(sequence, is_split=is_split)
        case Mixture():
            drawn, shares = zip(*objective.parts, strict=True)
            found = [_change(arm, tokenizer, sequence) for arm in drawn]
            changes, rooms = zip(*found, strict=True)
            return _drawn(changes, shares, OF_MIXTURE), max(rooms)


def _spans(
    rate: float, mean: float, tokenizer: Tokenizer, sequence: int
) -> tuple[Change[Piece], int]:
    change = functools.partial(
        spans.spans,
        rate=rate,
        mean=mean,
        sentinels=spans.sentinels(tokenizer),
        edges=spans.Edges.of(tokenizer),
    )
    return change, spans.room(sequence, rate, mean)


def _denoised(changes: Sequence[Change[Made]]) -> Change[Made]:
    """One of the denoisers of UL2, each as often."""
    return _drawn(changes, [1 / len(changes)] * len(changes), OF_UL2)


def _drawn(changes: Sequence[Change[Made]], shares: Sequence[float], number: int) -> Change[Made]:
    return functools.partial(
        rows.mixture, changes=tuple(changes), shares=tuple(shares), number=number
    )


def _lacking(objective: Simple, tokenizer: Tokenizer) -> Sequence[str]:
    """The tokens that an objective writes and this tokenizer has in none of their forms; by our names."""
    match objective:
        case Masked() if masked.mark(tokenizer) is None:
            return masked.FORMS[:1]
        case Blank():
            return [name for name in BLANKS if name not in tokenizer.reserved]
        case FIM() if fim.marks(tokenizer) is None:
            return [name for name in fim.FORMS[0] if name not in tokenizer.reserved]
        case Span() | UL2() if not len(spans.sentinels(tokenizer)):
            return [spans.SENTINEL_FORMS[0].format(0)]
    return []


def _check_tokens(objective: Objective, tokenizer: Tokenizer, other: str) -> None:
    """Raises ConfigError where the tokenizer of a model lacks what the objective writes; `other` is a fix without them."""
    found = itertools.chain.from_iterable(_lacking(arm, tokenizer) for arm in arms(objective))
    if lacking := list(dict.fromkeys(found)):
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        added = " ".join(f"--add_token='{name}'" for name in lacking)
        raise ConfigError(
            f"the tokenizer has not the tokens of the objective {objective.name}",
            where="objective.name",
            why=f"it lacks {lacking[0]}{more}",
            fix=f"{other}import the model again with {added}, and begin from that run",
        )


def _check_room(objective: Objective, room: int, sequence: int) -> None:
    if sequence - room < sequence // 2:
        raise ConfigError(
            f"rows of {sequence} tokens are too short for the objective {objective.name}",
            where="data.sequence",
            why=f"it adds up to {room} tokens to a row, more than half of it",
            fix="--config.data.sequence=256\n--config.objective.name=causal",
        )
