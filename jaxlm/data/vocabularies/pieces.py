"""The pieces of a SentencePiece model as a `tokenizer.json`: the same ids for the same text."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import rust_errors
from jaxlm.data.tokenizer import LARGEST_VOCABULARY, SentencePiece
from jaxlm.data.vocabularies.added import put_in_front

SPACE = SentencePiece.SPACE
LONGEST_PIECE = 1000  # characters; each way to cut a piece in two is looked at
MOST_CHARACTERS = 8_000_000  # of all pieces; the largest vocabularies in use have a fourth of it
# The score of what text never becomes: below any path, for scores are logarithms of probabilities of pieces. Only a character
# without a piece has less, so that text which spells a control piece with one is taken for the piece.
NEVER = -1e4

# Text on which a tokenizer.json is compared with SentencePiece itself; none may become a token of another kind in either.
PROBES = (
    "The quick brown fox, 12345 dogs.",
    "  two  spaces \t tabs\n\n    lines \r\n",
    "def f(x):\n    return {'a': x[0] ** 2}  # caf\u00e9\n",
    "\u6f22\u5b57\u3068\u304b\u306a \u4f60\u597d\uff0c\u4e16\u754c",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u202e\u202c",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u00e9 e\u0301 a\u0327\u0301",
    "\ufb01 \u212b \u00bd \uff21 \u00a0 \u3000 \u2028 \ufeff",
    "\x01\x7f\x1b[31m \u2581 \u2581\u2581x " + "a" * 200 + " " * 50,
)


class Kind(enum.IntEnum):
    """What a piece is, by the numbers of SentencePiece, which GGUF took over."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One piece; its id is its place."""

    text: str
    score: float
    kind: Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """A vocabulary and how text is made ready for it.

    `prefixed` puts a space in front of a text, `squeezed` leaves single spaces between words only, and `charsmap` are
    SentencePiece's compiled rules of normalisation. `begins` and `ends` are the pieces around a document.
    """

    pieces: tuple[Piece, ...]
    algorithm: Literal["bpe", "unigram"]
    prefixed: bool
    squeezed: bool
    charsmap: bytes = b""
    begins: str | None = None
    ends: str | None = None

    @property
    def unknown(self) -> int:
        """The id of what no piece spells."""
        return next(i for i, piece in enumerate(self.pieces) if piece.kind == Kind.UNKNOWN)


def read(model: bytes, where: str) -> Pieces:
    """The pieces of a SentencePiece `.model`.

    Raises:
      DataError: where it is none, or what it does to text cannot be said in a tokenizer.json.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(model)
    except DecodeError as error:
        raise _refused("it is not a SentencePiece model", where, str(error)) from error
    training, rules = proto.trainer_spec, proto.normalizer_spec
    algorithms: dict[int, Literal["bpe", "unigram"]] = {1: "unigram", 2: "bpe"}
    if training.model_type not in algorithms:
        raise _refused("its pieces are neither BPE nor unigram", where)
    if (
        training.treat_whitespace_as_suffix
        or not rules.escape_whitespaces
        or proto.denormalizer_spec.precompiled_charsmap
    ):
        raise _refused("it spells spaces, or text again, in a way of its own", where)
    pieces = tuple(Piece(p.piece, p.score, Kind(p.type)) for p in proto.pieces)
    named = [training.bos_id, training.eos_id]
    begins, ends = (pieces[i].text if 0 <= i < len(pieces) else None for i in named)
    return checked(
        Pieces(
            pieces=pieces,
            algorithm=algorithms[training.model_type],
            prefixed=rules.add_dummy_prefix,
            squeezed=rules.remove_extra_whitespaces,
            charsmap=rules.precompiled_charsmap,
            begins=begins,
            ends=ends,
        ),
        where,
    )


def checked(found: Pieces, where: str) -> Pieces:
    """The same, where a tokenizer can be built of it. Raises DataError."""
    texts = [piece.text for piece in found.pieces]
    if len(texts) > LARGEST_VOCABULARY:
        raise _refused(f"it has {len(texts):,} pieces", where)
    if len(set(texts)) < len(texts):
        raise _refused("two of its pieces are the same", where)
    if not any(piece.kind == Kind.UNKNOWN for piece in found.pieces):
        raise _refused("it has no piece for what is unknown", where)
    if (longest := max(map(len, texts))) > LONGEST_PIECE:
        raise _refused(f"a piece has {longest:,} characters", where)
    if (total := sum(map(len, texts))) > MOST_CHARACTERS:
        raise _refused(f"its pieces have {total:,} characters together", where)
    return found


def as_json(found: Pieces, where: str) -> bytes:
    """The content of a tokenizer.json. Raises DataError where the pieces make none."""
    import tokenizers
    from tokenizers import decoders

    with rust_errors("the pieces of a SentencePiece model make no tokenizer", where):
        built = tokenizers.Tokenizer(_model(found))
        built.normalizer = _normalizer(found)
        spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        built.decoder = decoders.Sequence(
            [*spaces, *([decoders.Strip(" ", 1, 0)] if found.prefixed else [])]
        )
        if found.prefixed and _is_cut(found):  # only what comes first has a space put before it
            from tokenizers import pre_tokenizers

            built.pre_tokenizer = pre_tokenizers.Metaspace(
                replacement=SPACE, prepend_scheme="first", split=False
            )
        for piece in found.pieces:
            if piece.kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED):
                is_special = piece.kind != Kind.USER_DEFINED
                token = tokenizers.AddedToken(piece.text, normalized=False, special=is_special)
                built.add_tokens([token])
        if found.begins is not None:
            put_in_front(built, found.begins)
        return built.to_str().encode()


def _is_cut(found: Pieces) -> bool:
    """Whether text is cut at pieces that the user named, before anything else is done to it."""
    return any(piece.kind == Kind.USER_DEFINED for piece in found.pieces)


def _model(found: Pieces) -> Any:
    from tokenizers import models

    has_bytes = any(piece.kind == Kind.BYTE for piece in found.pieces)
    if found.algorithm == "unigram":
        scores = [
            (piece.text, piece.score if piece.kind == Kind.NORMAL else NEVER)
            for piece in found.pieces
        ]
        return models.Unigram(scores, found.unknown, has_bytes)
    return models.BPE(
        {piece.text: number for number, piece in enumerate(found.pieces)},
        list(merges(found.pieces)),
        unk_token=found.pieces[found.unknown].text,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def merges(pieces: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    """Pairs that make a piece, the best piece first, as SentencePiece merges; each piece by every pair that makes it."""
    ids = {piece.text: i for i, piece in enumerate(pieces) if piece.kind == Kind.NORMAL}
    for text in sorted(ids, key=lambda text: -pieces[ids[text]].score):
        ways = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        yield from sorted(
            ((a, b) for a, b in ways if a in ids and b in ids),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )


def _normalizer(found: Pieces) -> Any:
    import tokenizers
    from tokenizers import normalizers

    steps: list[Any] = []
    if found.charsmap:
        steps.append(normalizers.Precompiled(found.charsmap))
    if found.squeezed:
        steps += [
            normalizers.Replace(tokenizers.Regex(f"^ +|[ {SPACE}]+$"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if found.prefixed and not _is_cut(found):
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def differences(model: bytes, content: bytes, where: str = "tokenizer") -> list[str]:
    """Those of `PROBES` to which a tokenizer.json gives other ids than SentencePiece itself does.

    Raises:
      DataError: where SentencePiece does not take the model.
    """
    import sentencepiece
    import tokenizers

    with rust_errors("a SentencePiece model cannot be used", where):
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
        ours = tokenizers.Tokenizer.from_buffer(content)
        ours.encode_special_tokens = True
        return [
            text
            for text in PROBES
            if theirs.encode(text) != ours.encode(text, add_special_tokens=False).ids
        ]


def _refused(why: str, where: str, detail: str = "") -> DataError:
    return DataError(
        "the pieces of a tokenizer cannot be read",
        where=where,
        why=f"{why}: {detail}"[:300] if detail else why,
        fix="a folder with tokenizer.json, as transformers writes it, is read as it is",
    )
