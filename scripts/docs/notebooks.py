"""Execute notebooks of colab/ and store what they print.

    python scripts/docs/notebooks.py quickstart own_text
    python scripts/docs/notebooks.py --badges

Each is executed in a copy of the committed files, so that the paths that it prints are relative and
nothing is left in the repository. The stored notebook has the digest of the cells that were
executed: a test compares it, so a changed cell needs this script again.

--badges gives each notebook a badge that opens it in Colab from the repository whose GitHub address
pyproject.toml has as `Repository` under [project.urls]. Without an address there are no badges.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "colab"
TIMEOUT_SECONDS = 3600  # of one cell
COLAB = "https://colab.research.google.com"


def main() -> int:
    """Execute the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", choices=[path.stem for path in paths()])
    parser.add_argument("--badges", action="store_true", help="write the badges of all notebooks")
    args = parser.parse_args()
    if args.badges:
        for path in paths():
            notebook = nbformat.read(path, as_version=4)
            notebook.cells[0].source = with_badge(notebook.cells[0].source, path.name, repository())
            nbformat.write(notebook, path)
    for name in args.notebooks:
        with tempfile.TemporaryDirectory() as copy:
            store(FOLDER / f"{name}.ipynb", Path(copy))
    return 0


def paths() -> list[Path]:
    """Return the notebooks in the order of their names."""
    return sorted(FOLDER.glob("*.ipynb"))


def repository() -> str:
    """Return the address of the repository on GitHub, from pyproject.toml; empty if it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "").rstrip("/").removesuffix(".git")


def with_badge(source: str, name: str, address: str) -> str:
    """Return the first cell of a notebook with the badge that opens it in Colab.

    Args:
      source: the cell, with or without a badge: a title in its first line.
      name: file name of the notebook.
      address: of the repository on GitHub; if empty, the cell has no badge.
    """
    title, *rest = (line for line in source.split("\n") if not line.startswith("[![Open in Colab]"))
    if not address:
        return "\n".join([title, *rest])
    place = f"{COLAB}/github/{address.removeprefix('https://github.com/')}/blob/main/colab/{name}"
    badge = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({place})"
    return "\n".join([title, badge, *rest])


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
