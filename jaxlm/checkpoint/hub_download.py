"""Download of a model from the Hugging Face Hub: the files that an import reads, and no others.

Files are fetched into the library's own cache, so a broken download resumes, and other programs
share it. `huggingface_hub.snapshot_download(allow_patterns=...)` is not used: it reports no bytes
of a single file, and config.json is checked here before anything large is requested. Free of JAX.
"""

import contextlib
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.checkpoint.hub_folder import INDEX, PICKLES, WHOLE, parsed_object
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import CommandError, InputMissing, JaxlmError, not_installed
from jaxlm.monitor import formatting

PREFIX = "hf:"
ANSWER_SECONDS = 10  # timeout of a request to the hub
_NAME = re.compile(r"hf:(?P<model>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


class FetchedModel(NamedTuple):
    """A model's folder, and the name with its commit."""

    path: Path
    origin: str


def fetch_model(
    name: str,
    others: Collection[str],
    *,
    check: Callable[[dict[str, Any], str], object],
    say: Log = lambda _: None,
    show: OnProgress = lambda what, done, total: None,
) -> FetchedModel:
    """Fetch the safetensors files of `hf:org/name[@revision]`, their index, and other files.

    Only files at the top level of the model are considered; pickles and code are never fetched.
    Progress is printed by `say`.

    Args:
      others: names of files to fetch as well, if the model has them.
      check: called as (config, where) with config.json before anything large is fetched; raises
        what is wrong with it.
      show: called as (file, bytes done, bytes in total).

    Raises CommandError if the name is malformed; InputMissing if the hub is unreachable, refuses or
    lacks the model, or the model has no safetensors.
    """
    model = _Model(name, show)
    info = model.listed()
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    extras = sorted(file for file in sizes if file in others or _is_top(file, ".tiktoken"))
    weights = _weights(name, sizes)
    if "config.json" in sizes:
        config = model.download("config.json", info.sha)
        check(parsed_object(config.read_bytes(), str(config)), str(config))
    if weights == [INDEX]:
        index = parsed_object(model.download(INDEX, info.sha).read_bytes(), INDEX)
        shards = index.get("weight_map")
        shards = set(shards.values()) if isinstance(shards, dict) else set()
        top = (file for file in sizes if _is_top(file, ".safetensors"))
        weights += sorted(file for file in top if file in shards)
    files = [*extras, *weights]
    origin = f"{PREFIX}{model.name}@{info.sha}"
    say(f"{origin}: {len(files)} files, {formatting.size(sum(sizes[file] for file in files))}")
    for number, file in enumerate(files, 1):
        say(f"fetching {file}, {formatting.size(sizes[file])} ({number} of {len(files)})")
        path = model.download(file, info.sha)
    return FetchedModel(path.parent, origin)


class _Model:
    """A model of the hub; errors of the library are raised as errors of four parts."""

    def __init__(self, source: str, show: OnProgress):
        match = _NAME.fullmatch(source)
        if match is None:
            raise _misnamed(source)
        try:
            import huggingface_hub
        except ImportError as error:
            what, where = "fetching a model by its name", f"--from={source}"
            raise not_installed(what, "huggingface_hub", "hub", where=where) from error
        self.name, self._revision = match["model"], match["revision"]
        self._given, self._show = source, show
        self._hub = huggingface_hub.HfApi(library_name="jaxlm")

    def listed(self) -> Any:
        """Return the library's ModelInfo: commit, and files with their sizes."""
        with self._asked():
            return self._hub.model_info(
                self.name, revision=self._revision, files_metadata=True, timeout=ANSWER_SECONDS
            )

    def download(self, file: str, commit: str) -> Path:
        """Return the file's path in the cache, after fetching it if it was missing."""
        with self._asked():
            bar, limit = _silent_bar(file, self._show), ANSWER_SECONDS
            path = self._hub.hf_hub_download(
                self.name, file, revision=commit, etag_timeout=limit, tqdm_class=bar
            )
        return Path(path)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the library, of its HTTP client, of the file system
            raise _refused(self._given, self.name, self._revision, error) from error


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


def _is_top(file: str, suffix: str) -> bool:
    """Return True if a file is at the top of the model and ends in `suffix`."""
    return file.endswith(suffix) and "/" not in file


def _weights(name: str, sizes: dict[str, int]) -> list[str]:
    """Return the index, or the one safetensors file, as `hub_folder.Folder` expects them."""
    tensors = [file for file in sizes if _is_top(file, ".safetensors")]
    for file in (INDEX, WHOLE, *(tensors if len(tensors) == 1 else ())):
        if file in sizes:
            return [file]
    pickles = [file for file in sizes if file.endswith(PICKLES)]
    files = [file for file in sizes if file.endswith(".gguf")]
    fix = "the name of a model that is published as safetensors"
    if files:
        model, _, revision = name.removeprefix(PREFIX).partition("@")
        by_hand = _by_hand(f"{model} {shlex.quote(files[0])}", revision)
        fix = f"{by_hand} --local-dir=.    # first\n--from={shlex.quote(files[0])}"
    raise InputMissing(
        "the model has no safetensors",
        where=f"--from={name}",
        why=f"{', '.join(pickles[:3])} may run code when opened, and are not fetched"
        if pickles
        else f"it has {', '.join(sorted(files or sizes)[:5]) or 'no files'}",
        fix=fix,
    )


def _by_hand(what: str, revision: str | None) -> str:
    return f"hf download {what}" + (f" --revision={revision}" if revision else "")


def _misnamed(name: str) -> CommandError:
    return CommandError(
        "the name of a Hugging Face model is malformed",
        where=f"--from={name}",
        why="the form is hf:ORG/NAME, or hf:ORG/NAME@REVISION",
        fix="look for its name on https://huggingface.co/models",
    )


def _refused(name: str, model: str, revision: str | None, error: Exception) -> JaxlmError:
    """Return the error of the library as one with four parts."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return _misnamed(name)
    folder, hub = model.rpartition("/")[2], constants.ENDPOINT
    elsewhere = (
        f"on a machine that reaches the hub: {_by_hand(model, revision)} --local-dir={folder}\n"
        f"here: --from={folder}"
    )
    why = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    if isinstance(error, errors.GatedRepoError):
        what = f"{model} is only given to users who have accepted its terms"
        why = "you are not logged in, or have not accepted the terms"
        fix = f"accept them on {hub}/{model}, then: hf auth login\n{elsewhere}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"the hub has no model {model}, or the model is private"
        why = f"{hub} does not list it"
        fix = f"look for its name on {hub}/models; if private: hf auth login\n{elsewhere}"
    elif isinstance(error, errors.RevisionNotFoundError):
        what = f"{model} has no revision {revision}"
        fix = f"look for its branches and tags on {hub}/{model}/tree/main"
        why = "a revision is a branch, a tag or a commit"
    else:
        what, fix = f"{model} cannot be fetched from {hub}", elsewhere
    return InputMissing(what, where=f"--from={name}", why=why[:300], fix=fix)
