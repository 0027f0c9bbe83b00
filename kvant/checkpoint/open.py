"""One door to every kind of checkpoint: a .gguf file, a Hugging Face folder, or `dummy:` and a config."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvant.errors import ModelNotFoundError, UnsupportedError

if TYPE_CHECKING:
    from kvant.checkpoint.checkpoint import Checkpoint

DUMMY = "dummy:"
GGUF_MAGIC = b"GGUF"


def open_checkpoint(path: str | Path) -> "Checkpoint":
    """Opens what `path` names; tensors are mapped, not read.

    Raises `ModelNotFoundError` where nothing is, `CheckpointError` for a malformed file, `UnsupportedError` for an
    architecture or format that is not built here.
    """
    name = str(path)
    place = Path(name.removeprefix(DUMMY)).expanduser()
    if not place.exists():
        raise ModelNotFoundError(f"there is no file or folder {place}")
    if name.startswith(DUMMY) or place.is_dir():  # readers need numpy, naming a model does not: imported when one is needed
        from kvant.checkpoint import hf_folder

        return hf_folder.open_dummy(place) if name.startswith(DUMMY) else hf_folder.open_folder(place)
    if not is_gguf(place):
        raise UnsupportedError(
            f"{place} is no GGUF file; give a .gguf file, or the folder that holds config.json and safetensors"
        )
    from kvant.checkpoint import gguf_model

    return gguf_model.open_gguf(place)


def is_gguf(path: Path) -> bool:
    """Whether the file is a GGUF by its first bytes, or claims to be one by its name."""
    if path.suffix == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False
