"""The configs that are shipped with jaxlm, by name: `quickstart`, `finetune/lora`, `llama_8b`."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# A wheel holds the folder, an editable installation reads that of the checkout.
FOLDER = next(
    (folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()),
    _PACKAGE / "configs",
)


def values(folder: str = "") -> list[str]:
    """Return the values of --config for the shipped configs of a folder of `configs/`.

    They are paths if the working directory has the files, as a checkout does, else names. The
    quickstart comes first: every machine can run it.
    """
    paths = sorted(
        (FOLDER / folder).glob("*.py"), key=lambda path: (path.stem != "quickstart", path)
    )
    return [flag_value(path) for path in paths]


def every_name() -> list[str]:
    """Return the names of all shipped configs."""
    return [_name(path) for path in sorted(FOLDER.rglob("*.py"))]


def is_folder(name: str) -> bool:
    """Return whether there is a folder of shipped configs; `.` is the one of them all."""
    return (FOLDER / name).is_dir() and not Path(name).is_absolute()


def find(name: str) -> Path | None:
    """Return the file of a shipped config; None if no config has the name.

    Hyphens equal underscores. The path of the file in a checkout, `configs/finetune/lora.py`, is a
    name too, so that a command of the manual works wherever jaxlm is installed.
    """
    if name.startswith("configs/") and name.endswith(".py"):
        name = name.removeprefix("configs/").removesuffix(".py")
    known = {each.replace("-", "_"): FOLDER / f"{each}.py" for each in every_name()}
    return known.get(name.replace("-", "_"))


def flag_value(path: str | os.PathLike[str]) -> str:
    """Return the value of --config that names a file.

    It is a path relative to the working directory if the file is below; else the name of a shipped
    config, the same in every installation; else the path.
    """
    relative = os.path.relpath(path)
    if not relative.startswith(".."):
        return relative
    return _name(Path(path)) if Path(path).is_relative_to(FOLDER) else os.fspath(path)


def _name(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()
