"""Execute notebooks of colab/ and store what they print.

    python scripts/docs/notebooks.py quickstart own_text

Each is executed in a copy of the committed files, so that the paths that it prints are relative and
nothing is left in the repository. The stored notebook has the digest of the cells that were
executed: a test compares it, so a changed cell needs this script again.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "colab"
TIMEOUT_SECONDS = 3600  # of one cell


def main() -> int:
    """Execute the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", choices=[path.stem for path in paths()])
    for name in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as copy:
            store(FOLDER / f"{name}.ipynb", Path(copy))
    return 0


def paths() -> list[Path]:
    """Return the notebooks in the order of their names."""
    return sorted(FOLDER.glob("*.ipynb"))


def store(path: Path, copy: Path) -> None:
    """Execute a notebook in a copy of the repository and write it with its outputs."""
    from screenshots import screen  # of this folder, which only the script has on its path

    with (
        subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE) as archive,
        tarfile.open(fileobj=archive.stdout, mode="r|") as files,
    ):
        files.extractall(copy, filter="data")
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(copy / "colab")}}
    os.environ["IPYTHONDIR"] = str(copy / ".ipython")
    client = NotebookClient(
        notebook, timeout=TIMEOUT_SECONDS, coalesce_streams=True, resources=place
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        for output in cell.get("outputs", ()):
            if "text" in output:
                text = output["text"].replace(f"{copy}/", "").replace(sys.executable, "python")
                text = text.replace(sys.prefix, ".venv")
                output["text"] = "\n".join(screen(text))  # progress as it was at the end
    notebook.metadata["executed"] = digest(notebook)
    nbformat.write(notebook, path)


def digest(notebook: nbformat.NotebookNode) -> str:
    """Return the SHA-256 of the code of a notebook."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
