"""One kind of file under atheris.

libFuzzer changes its bytes, and keeps those that reach new code.

python -m tests.faults.fuzz.guided KIND FOLDER SECONDS SEED

FOLDER is that of the fixture in test_fuzz.py. Ends with 0 once the seconds are over. Ends with
another code, and the bytes that caused it in FOLDER, if a reader raises an error that is not ours
or takes five seconds, or if this process holds more than a GiB.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["jaxlm.checkpoint", "jaxlm.core", "jaxlm.data"]):
    from tests.faults.fuzz import test_fuzz


def main(kind: str, folder: Path, seconds: str, seed: str) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "sound").write_bytes(test_fuzz.sound_bytes(kind, folder))

    def read(content: bytes) -> None:
        outcome = test_fuzz.outcome_of(test_fuzz.KINDS[kind], folder, content)
        if not isinstance(outcome, int):
            raise AssertionError(outcome)

    limits = (f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=5", "-rss_limit_mb=1024")
    words = [sys.argv[0], *limits, f"-artifact_prefix={folder}/", str(corpus)]
    atheris.Setup(words, read)
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
