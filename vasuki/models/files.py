"""The place of a model's description: a folder of its own, or in the local cache of the Hugging Face hub."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.base.files import refuse_special

POINTER = b"version https://git-lfs"
IS_POINTER = "is a pointer of Git LFS, not the file: run `git lfs pull` in the model's folder"
DESCRIPTION = (
    "*.json",
    "1_Pooling/config.json",
    "*.jinja",
    "*.txt",
    "*.model",
)  # sizes, tokenizer and defaults, but no weights


def description_folder(model: ModelConfig) -> Path:
    """The folder that holds a model's config.json and tokenizer. From the hub they are fetched, weights are not.

    Raises:
        ModelError: there is neither such a folder nor such a model on the hub, or the hub cannot be reached.
    """
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        if model.path.startswith((".", "/", "~")):
            raise ModelError(f"cannot read model {model.path}: no such folder")
        folder = _from_hub(model.path, model.revision)
    try:
        for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
            if file.exists():  # unlike what a broken link leads to
                refuse_special(file)
    except OSError as error:
        raise ModelError(f"cannot read model {model.path}: {error.filename}: {error.strerror}") from None
    if not (folder / "config.json").is_file():
        raise ModelError(f"cannot read model {model.path}: no config.json in it")
    return folder


def why_no_json(file: Path, error: ValueError) -> str:
    """What a file of a model is, where reading it as JSON raised this error."""
    return f"{file} {IS_POINTER}" if starts_with(file, POINTER) else f"{file} is not valid JSON: {error}"


def starts_with(file: Path, start: bytes) -> bool:
    """Whether a file starts with these bytes. Raises OSError."""
    with file.open("rb") as stream:
        return stream.read(len(start)) == start


@functools.cache  # lengths and shape are read from the same files
def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(DESCRIPTION)))
    except errors.GatedRepoError:
        reason = "the hub wants its terms accepted and a token of the account that did so (HF_TOKEN)"
    except errors.RepositoryNotFoundError:
        reason = "no such folder, and no such model on the hub; if it is private, set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"the hub has no revision '{revision}' of it"
    except errors.HFValidationError:
        reason = "no such folder, and no name that a model on the hub could have"
    except Exception as error:  # whatever may happen on the way to the hub
        reason = f"no such folder, and it cannot be had from {_endpoint()}: {_first_line(error)}"
    raise ModelError(f"cannot read model {name}: {reason}")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
