"""Repositories of the Hugging Face Hub: listing and download of single files. Free of JAX.

Files are fetched into the library's own cache, so a broken download resumes, and other programs
share it. `huggingface_hub.snapshot_download(allow_patterns=...)` is not used: it reports no bytes
of a single file, and small files are checked before anything large is requested.
"""

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.core.callbacks import OnProgress
from jaxlm.core.errors import CommandError, InputMissing, JaxlmError, not_installed

PREFIX = "hf:"
_REPOSITORY = re.compile(r"(?!runs/)[\w.-]+/[\w.-]+")  # runs/NAME is a run in another folder
ANSWER_SECONDS = 10  # timeout of a request to the hub
Kind = Literal["model", "dataset"]


class HubRepository:
    """A model or data set of the hub. Errors of `huggingface_hub` are raised as a JaxlmError."""

    def __init__(
        self,
        name: str,
        revision: str | None,
        kind: Kind,
        where: str,
        show: OnProgress = lambda what, done, total: None,
        flag: Callable[[str], str] = "--from={}".format,
    ):
        """Open no connection yet.

        Args:
          name: ORG/NAME.
          revision: branch, tag or commit; the main branch if None.
          kind: kind of the repository.
          where: setting or flag that names it, for errors.
          show: called as (file, bytes done, bytes in total).
          flag: makes the flag that names a downloaded folder instead of the repository.

        Raises InputMissing if `huggingface_hub` is not installed.
        """
        try:
            import huggingface_hub
        except ImportError as error:
            what = f"fetching a {_WORDS[kind]} by its name"
            raise not_installed(what, "huggingface_hub", "hub", where=where) from error
        self.name, self.revision, self.kind = name, revision, kind
        self._where, self._show, self._flag = where, show, flag
        self._hub = huggingface_hub.HfApi(library_name="jaxlm")

    def info(self) -> Any:
        """Return the library's ModelInfo or DatasetInfo: commit, and files with their sizes."""
        request = self._hub.model_info if self.kind == "model" else self._hub.dataset_info
        with self._errors():
            return request(
                self.name, revision=self.revision, files_metadata=True, timeout=ANSWER_SECONDS
            )

    def download(self, file: str, commit: str) -> Path:
        """Return the file's path in the cache, after fetching it if it was missing."""
        with self._errors():
            path = self._hub.hf_hub_download(
                self.name,
                file,
                repo_type=self.kind,
                revision=commit,
                etag_timeout=ANSWER_SECONDS,
                tqdm_class=_silent_bar(file, self._show),
            )
        return Path(path)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the library, of its HTTP client, of the file system
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> JaxlmError:
        """Return the error of the library as one with four parts."""
        from huggingface_hub import constants, errors

        name, word = self.name, _WORDS[self.kind]
        if isinstance(error, errors.HFValidationError):
            return malformed_name(self.kind, self._where)
        folder, hub = name.rpartition("/")[2], constants.ENDPOINT
        site = hub if self.kind == "model" else f"{hub}/datasets"
        is_model = self.kind == "model"
        command = download_command(name, self.revision, self.kind)
        elsewhere = f"on a machine that reaches the hub: {command} --local-dir={folder}\n"
        elsewhere += f"here: {self._flag(folder)}"
        why = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        if isinstance(error, errors.GatedRepoError):
            what = f"{name} is available only to users who have accepted its terms"
            why = "you are not logged in, or have not accepted the terms"
            fix = f"accept them on {site}/{name}, then: hf auth login\n{elsewhere}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            what = f"the hub has no {word} {name}, or the {word} is private"
            why = f"{hub} does not list it"
            listing = f"{hub}/{'models' if is_model else 'datasets'}"
            fix = f"search for its name on {listing}; if private: hf auth login\n{elsewhere}"
        elif isinstance(error, errors.RevisionNotFoundError):
            what = f"{name} has no revision {self.revision}"
            fix = f"see its branches and tags on {site}/{name}/tree/main"
            why = "a revision is a branch, a tag or a commit"
        else:
            what, fix = f"{name} cannot be fetched from {hub}", elsewhere
            return HubUnreachable(what, where=self._where, why=why[:300], fix=fix)
        return InputMissing(what, where=self._where, why=why[:300], fix=fix)


class HubUnreachable(InputMissing):
    """The hub did not answer, or its answer does not explain the failure."""


_WORDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}


def download_command(name: str, revision: str | None, kind: Kind, file: str = "") -> str:
    """Return the command that downloads a repository, or one of its files, without jaxlm."""
    words = ["hf", "download", name, *([file] if file else [])]
    words += ["--repo-type=dataset"] if kind == "dataset" else []
    words += [f"--revision={revision}"] if revision else []
    return shlex.join(words)


def guessed_name(place: str) -> str | None:
    """Return hf:ORG/NAME for a place ORG/NAME if there is no local folder ORG, and else None."""
    is_name = _REPOSITORY.fullmatch(place) is not None and not Path(place).parent.exists()
    return f"{PREFIX}{place}" if is_name else None


def malformed_name(kind: Kind, where: str) -> CommandError:
    """Return the error of a malformed name."""
    form = "hf:ORG/NAME, or hf:ORG/NAME@REVISION"
    if kind == "dataset":
        form += ", each with :SPLIT or /FILES at its end"
    return CommandError(
        f"the name of a Hugging Face {_WORDS[kind]} is malformed",
        where=where,
        why=f"the form is {form}",
        fix=f"search for its name on https://huggingface.co/{kind}s",
    )


def cache() -> Path:
    """Return the library's cache folder; create it."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _silent_bar(file: str, show: OnProgress) -> type:
    """Return a progress bar class for the library that draws nothing and calls `show`."""
    from huggingface_hub.utils.tqdm import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"disable": True})
            self.done, self.all = kwargs.get("initial") or 0, kwargs.get("total") or 0

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            show(file, int(self.done), int(self.all))

    return SilentBar
