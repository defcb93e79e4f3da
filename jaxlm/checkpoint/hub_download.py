"""A model of the Hugging Face Hub by its name: the files that an import reads, and no others. Free of JAX.

What is fetched lies in the library's own cache, so that a download that broke off goes on, and other programs share it.
"""

import contextlib
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.checkpoint.hub_folder import INDEX, PICKLES, WHOLE, parsed_object
from jaxlm.core.errors import CommandError, InputMissing, JaxlmError, not_installed
from jaxlm.monitor import formatting

PREFIX = "hf:"
ANSWER_SECONDS = 10  # that the hub has to answer a question in
_NAME = re.compile(r"hf:(?P<model>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")

Show = Callable[[str, int, int], None]


class Fetched(NamedTuple):
    """A model's folder, and the name with the commit that it holds."""

    path: Path
    origin: str


def fetched(
    name: str,
    beside: Collection[str],
    *,
    check: Callable[[dict[str, Any], str], object],
    say: Callable[[str], None] = lambda _: None,
    show: Show = lambda what, done, total: None,
) -> Fetched:
    """Fetches the safetensors of `hf:org/name[@revision]`, their index, and the files of `beside`, where the model has them.

    Only files at the top of the model are looked at; pickles and code are never fetched. `check(config, where)` sees
    config.json before anything large is asked for, and raises what is wrong with it. `show(file, done, total)` is told bytes.

    Raises:
      CommandError: where the name is none.
      InputMissing: where the hub cannot be reached, does not know the model or does not give it, or it has no safetensors.
    """
    model = _Model(name, show)
    found = model.listed()
    sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
    wanted = sorted(file for file in sizes if file in beside or _is_ranks(file))
    weights = _weights(name, sizes)
    if "config.json" in sizes:
        config = model.download("config.json", found.sha)
        check(parsed_object(config.read_bytes(), str(config)), str(config))
    if weights == [INDEX]:
        index = parsed_object(model.download(INDEX, found.sha).read_bytes(), INDEX)
        named = index.get("weight_map")
        named = set(named.values()) if isinstance(named, dict) else set()
        weights += sorted(file for file in sizes if file in named and _is_tensors(file))
    files = [*wanted, *weights]
    origin = f"{PREFIX}{model.name}@{found.sha}"
    say(f"{origin}: {len(files)} files, {formatting.size(sum(sizes[file] for file in files))}")
    for number, file in enumerate(files, 1):
        say(f"fetching {file}, {formatting.size(sizes[file])} ({number} of {len(files)})")
        path = model.download(file, found.sha)
    return Fetched(path.parent, origin)


class _Model:
    """A model of the hub, and what the library says about it in our words."""

    def __init__(self, given: str, show: Show):
        match = _NAME.fullmatch(given)
        if match is None:
            raise _misnamed(given)
        try:
            import huggingface_hub
        except ImportError as error:
            raise not_installed(
                "fetching a model by its name", "huggingface_hub", "hub", where=f"--from={given}"
            ) from error
        self.name, self._revision = match["model"], match["revision"]
        self._given, self._show = given, show
        self._hub = huggingface_hub.HfApi(library_name="jaxlm")

    def listed(self) -> Any:
        """The library's ModelInfo: commit and files, with their sizes."""
        with self._asked():
            return self._hub.model_info(
                self.name, revision=self._revision, files_metadata=True, timeout=ANSWER_SECONDS
            )

    def download(self, file: str, commit: str) -> Path:
        """Where the file lies in the cache, fetched if it was not there."""
        with self._asked():
            path = self._hub.hf_hub_download(
                self.name,
                file,
                revision=commit,
                etag_timeout=ANSWER_SECONDS,
                tqdm_class=_silent_bar(file, self._show),
            )
        return Path(path)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library's own, of its HTTP client, of files
            raise _refused(self._given, self.name, self._revision, error) from error


def _silent_bar(file: str, show: Show) -> type:
    """A progress bar for the library, which draws nothing and tells `show`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Told(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"disable": True})
            self.done, self.all = kwargs.get("initial") or 0, kwargs.get("total") or 0

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            show(file, int(self.done), int(self.all))

    return Told


def _is_tensors(file: str) -> bool:
    return file.endswith(".safetensors") and "/" not in file


def _is_ranks(file: str) -> bool:
    return file.endswith(".tiktoken") and "/" not in file


def _weights(name: str, sizes: dict[str, int]) -> list[str]:
    """The index, or the one file of safetensors, as a folder that is read has them."""
    tensors = [file for file in sizes if _is_tensors(file)]
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
        why=f"{', '.join(pickles[:3])} may hold code that would be run, and is not fetched"
        if pickles
        else f"it has {', '.join(sorted(files or sizes)[:5]) or 'no files'}",
        fix=fix,
    )


def _by_hand(what: str, revision: str | None) -> str:
    return f"hf download {what}" + (f" --revision={revision}" if revision else "")


def _misnamed(name: str) -> CommandError:
    return CommandError(
        "this is no name of a model on the Hugging Face Hub",
        where=f"--from={name}",
        why="it is hf:ORG/NAME, and @REVISION behind it where one is wanted",
        fix="look for its name on https://huggingface.co/models",
    )


def _refused(name: str, model: str, revision: str | None, error: Exception) -> JaxlmError:
    """What the library says, in four parts."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return _misnamed(name)
    kept = model.rpartition("/")[2]
    elsewhere = f"where the hub can be reached: {_by_hand(model, revision)} --local-dir={kept}\nhere: --from={kept}"
    why = f"{type(error).__name__}: {(str(error).strip() or 'no more is said').splitlines()[0]}"
    if isinstance(error, errors.GatedRepoError):
        what = f"{model} is only given to those who have accepted its terms"
        why, fix = (
            "the hub does not know you, or that you have accepted them",
            f"accept them on {constants.ENDPOINT}/{model}, then: hf auth login\n{elsewhere}",
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"the hub has no model {model}, or it is private"
        why, fix = (
            f"{constants.ENDPOINT} does not give it",
            f"look for its name on {constants.ENDPOINT}/models; of a private one: hf auth login\n{elsewhere}",
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        what = f"{model} has no revision {revision}"
        fix = f"look for its branches and tags on {constants.ENDPOINT}/{model}/tree/main"
        why = "it is a branch, a tag or a commit"
    else:
        what, fix = f"{model} cannot be fetched from {constants.ENDPOINT}", elsewhere
    return InputMissing(what, where=f"--from={name}", why=why[:300], fix=fix)
