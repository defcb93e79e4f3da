"""SentencePiece models as a `tokenizer.json` with the same ids."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import library_errors, prepend_token
from jaxlm.data.tokenizer import MAX_VOCABULARY, SentencePiece

SPACE = SentencePiece.SPACE
MAX_PIECE_CHARACTERS = 1000  # characters; every split of a piece in two is tried
MAX_CHARACTERS = 8_000_000  # of all pieces, four times the largest vocabularies in use
# Score of pieces that text never becomes: lower than any path, as scores are log-probabilities.
# Only a character without a piece scores lower, so text that spells a control piece with such a
# character becomes the control piece.
UNREACHABLE_SCORE = -1e4

# Texts on which a tokenizer.json is compared with SentencePiece; no text may become another kind
# of token.
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


class PieceKind(enum.IntEnum):
    """Kind of a piece, numbered as in SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class VocabularyPiece(NamedTuple):
    """One piece; the id is its index."""

    text: str
    score: float
    kind: PieceKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceVocabulary:
    """A vocabulary and the normalization of text.

    `prefixed` puts a space in front of a text, `squeezed` collapses and trims spaces, and
    `charsmap` are SentencePiece's compiled normalization rules. `begins` and `ends` are the pieces
    around a document.
    """

    pieces: tuple[VocabularyPiece, ...]
    algorithm: Literal["bpe", "unigram"]
    prefixed: bool
    squeezed: bool
    charsmap: bytes = b""
    begins: str | None = None
    ends: str | None = None

    @property
    def unknown(self) -> int:
        """Id of the unknown piece."""
        return next(i for i, piece in enumerate(self.pieces) if piece.kind == PieceKind.UNKNOWN)


def read(model: bytes, where: str) -> PieceVocabulary:
    """Return the pieces of a SentencePiece `.model`.

    Raise DataError if it is invalid, or a tokenizer.json cannot express its normalization.
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
        raise _refused("its pieces are not BPE or unigram", where)
    if (
        training.treat_whitespace_as_suffix
        or not rules.escape_whitespaces
        or proto.denormalizer_spec.precompiled_charsmap
    ):
        raise _refused("it encodes spaces or denormalizes text in an unsupported way", where)
    pieces = tuple(VocabularyPiece(p.piece, p.score, PieceKind(p.type)) for p in proto.pieces)
    named = [training.bos_id, training.eos_id]
    begins, ends = (pieces[i].text if 0 <= i < len(pieces) else None for i in named)
    return checked(
        PieceVocabulary(
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


def checked(vocabulary: PieceVocabulary, where: str) -> PieceVocabulary:
    """Return the vocabulary if a tokenizer can be built from it. Raise DataError otherwise."""
    texts = [piece.text for piece in vocabulary.pieces]
    if len(texts) > MAX_VOCABULARY:
        raise _refused(f"it has {len(texts):,} pieces", where)
    if len(set(texts)) < len(texts):
        raise _refused("two of its pieces are the same", where)
    if not any(piece.kind == PieceKind.UNKNOWN for piece in vocabulary.pieces):
        raise _refused("it has no unknown piece", where)
    if (longest := max(map(len, texts))) > MAX_PIECE_CHARACTERS:
        raise _refused(f"a piece has {longest:,} characters", where)
    if (total := sum(map(len, texts))) > MAX_CHARACTERS:
        raise _refused(f"its pieces have {total:,} characters in all", where)
    return vocabulary


def as_json(vocabulary: PieceVocabulary, where: str) -> bytes:
    """Return the content of a tokenizer.json. Raise DataError if the pieces are invalid."""
    import tokenizers
    from tokenizers import decoders

    with library_errors("the pieces of a SentencePiece model are not a valid tokenizer", where):
        built = tokenizers.Tokenizer(_model(vocabulary))
        built.normalizer = _normalizer(vocabulary)
        spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        built.decoder = decoders.Sequence(
            [*spaces, *([decoders.Strip(" ", 1, 0)] if vocabulary.prefixed else [])]
        )
        # only the first part of a text gets a space in front
        if vocabulary.prefixed and _is_cut(vocabulary):
            from tokenizers import pre_tokenizers

            built.pre_tokenizer = pre_tokenizers.Metaspace(
                replacement=SPACE, prepend_scheme="first", split=False
            )
        for piece in vocabulary.pieces:
            if piece.kind in (PieceKind.CONTROL, PieceKind.UNKNOWN, PieceKind.USER_DEFINED):
                is_special = piece.kind != PieceKind.USER_DEFINED
                token = tokenizers.AddedToken(piece.text, normalized=False, special=is_special)
                built.add_tokens([token])
        if vocabulary.begins is not None:
            prepend_token(built, vocabulary.begins)
        return built.to_str().encode()


def _is_cut(vocabulary: PieceVocabulary) -> bool:
    """Return if text is cut at user-defined pieces before normalization."""
    return any(piece.kind == PieceKind.USER_DEFINED for piece in vocabulary.pieces)


def _model(vocabulary: PieceVocabulary) -> Any:
    from tokenizers import models

    has_bytes = any(piece.kind == PieceKind.BYTE for piece in vocabulary.pieces)
    if vocabulary.algorithm == "unigram":
        scores = [
            (piece.text, piece.score if piece.kind == PieceKind.NORMAL else UNREACHABLE_SCORE)
            for piece in vocabulary.pieces
        ]
        return models.Unigram(scores, vocabulary.unknown, has_bytes)
    return models.BPE(
        {piece.text: number for number, piece in enumerate(vocabulary.pieces)},
        list(merges(vocabulary.pieces)),
        unk_token=vocabulary.pieces[vocabulary.unknown].text,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def merges(pieces: Sequence[VocabularyPiece]) -> Iterator[tuple[str, str]]:
    """Yield every pair that makes a piece, best piece first, as SentencePiece merges."""
    ids = {piece.text: i for i, piece in enumerate(pieces) if piece.kind == PieceKind.NORMAL}
    for text in sorted(ids, key=lambda text: -pieces[ids[text]].score):
        ways = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        yield from sorted(
            ((a, b) for a, b in ways if a in ids and b in ids),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )


def _normalizer(vocabulary: PieceVocabulary) -> Any:
    import tokenizers
    from tokenizers import normalizers

    steps: list[Any] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.squeezed:
        for pattern, text in ((f"^ +|[ {SPACE}]+$", ""), (" {2,}", " ")):
            steps.append(normalizers.Replace(tokenizers.Regex(pattern), text))
    if vocabulary.prefixed and not _is_cut(vocabulary):
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def differences(model: bytes, content: bytes, where: str = "tokenizer") -> list[str]:
    """Return the `PROBES` whose ids differ between a tokenizer.json and SentencePiece.

    Raise DataError if SentencePiece rejects the model.
    """
    import sentencepiece
    import tokenizers

    with library_errors("SentencePiece rejects a model", where):
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
        ours = tokenizers.Tokenizer.from_buffer(content)
        ours.encode_special_tokens = True
        pairs = ((theirs.encode(t), ours.encode(t, add_special_tokens=False).ids) for t in PROBES)
        return [text for text, (a, b) in zip(PROBES, pairs, strict=True) if a != b]


def _refused(why: str, where: str, detail: str = "") -> DataError:
    return DataError(
        "jaxlm cannot read the pieces of a tokenizer",
        where=where,
        why=f"{why}: {detail}"[:300] if detail else why,
        fix="use a folder with tokenizer.json, as transformers writes it",
    )
