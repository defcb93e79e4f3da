"""Raw text of installed packages in one folder, for a recipe to clean.

    python scripts/gather_texts.py FOLDER... --out=texts [--gigabytes=1.05]
    jaxlm data run --config=configs/data/clean_stdlib.py --config.source='texts/**/*' --out=clean

Source code, Markdown, HTML and other documents. A FOLDER is a tree such as an environment's
site-packages, Python's library, or /usr/share. Files are linked, or copied if that is impossible;
the folder of each ending has a share of the size. A file is taken once, however many links lead to
it.
"""

import argparse
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ENDINGS = frozenset(
    ".c .cc .cfg .cpp .css .cu .el .go .h .hpp .htm .html .java .js .lua .md .pl .pm .pod .po "
    ".proto .py .pyi .pyx .rb .rs .rst "
    ".sh .tcl .tex .toml .ts .txt .vim .xml .yaml .yml".split()
)
# A .json of an installed package is one value over many lines, where a recipe reads one a line:
# none are taken.
DOCUMENTS = "METADATA", "LICENSE", "README", "COPYING", "NEWS", "changelog", "copyright"


def found(folders: list[Path]) -> Iterator[tuple[Path, str, int]]:
    """Path, ending and bytes of each text below the folders, by name, each file once."""
    seen: set[tuple[int, int]] = set()
    for folder in folders:
        for place, inner, names in os.walk(folder):
            inner.sort()
            for path in (Path(place, name) for name in sorted(names)):
                is_text = path.suffix.lower() in ENDINGS or path.name in DOCUMENTS
                if is_text and path.is_file() and not path.is_symlink():
                    about = path.stat()
                    if about.st_size and (about.st_dev, about.st_ino) not in seen:
                        seen.add((about.st_dev, about.st_ino))
                        yield path, path.suffix.lower().removeprefix(".") or "none", about.st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", required=True, type=Path, help="a new folder")
    parser.add_argument("--gigabytes", type=float, default=1.05, help="to stop after (1.05)")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    files, sizes = Counter[str](), Counter[str]()
    for path, ending, size in found(args.folders):
        target = (
            args.out / ending / f"{files[ending] // 1000:03d}" / f"{files[ending]:06d}-{path.name}"
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # on another file system, or not ours
            shutil.copyfile(path, target)
        files[ending] += 1
        sizes[ending] += size
        if sizes.total() >= args.gigabytes * 1e9:
            break
    for ending, size in sizes.most_common():
        print(f"{ending:<10}{files[ending]:>10,} files{size / 1e6:>10,.1f} MB")
    print(f"{'all':<10}{files.total():>10,} files{sizes.total() / 1e6:>10,.1f} MB")


if __name__ == "__main__":
    main()
