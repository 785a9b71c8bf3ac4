"""Models by name from the Hugging Face hub, through the package huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from re import compile as regex

from treadle.config import HUB_PREFIX
from treadle.data.tokenizer import (
    MERGES_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
)
from treadle.errors import CheckpointError
from treadle.files import one_line
from treadle.interop.hf import CONFIG_FILE, SAFETENSORS, TORCH, is_hf

SMALL_FILES = (CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, VOCAB_FILE, MERGES_FILE)

_NAME = regex(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_name(text: str) -> bool:
    """Whether a text can be the name of a model on the hub: `gpt2` or `org/model`."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def named(source: str) -> str:
    """A source, with the hub's prefix where it is no path but could be a name there."""
    return f"{HUB_PREFIX}{source}" if is_name(source) and not Path(source).exists() else source


def download(name: str) -> Path:
    """The directory of a model of the hub, downloaded into the hub's cache with its progress shown.

    Of weights, the safetensors files; PyTorch's only where there are no others. CheckpointError
    without the package, without a network, or for a name that the hub does not know.
    """
    if not is_name(name):
        raise CheckpointError(
            f"{HUB_PREFIX}{one_line(name)}: expected a name such as gpt2 or org/model"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{HUB_PREFIX}{name} needs the package huggingface_hub: pip install 'treadle[hub]'; or "
            "download it by other means and name its directory"
        ) from None
    for weights in (SAFETENSORS, TORCH):
        stem, suffix = Path(weights).stem, Path(weights).suffix
        wanted = [*SMALL_FILES, f"{weights}.index.json", f"{stem}*{suffix}"]
        try:
            # Files in folders are the same model in other formats.
            folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns="*/*"))
        except Exception as error:  # the package has a tree of its own, and its network's
            reason = one_line(str(error).partition("\n")[0] or type(error).__name__)
            raise CheckpointError(
                f"{HUB_PREFIX}{name}: cannot be downloaded ({reason}); check the name and the "
                "network, or download it by other means and name its directory"
            ) from None
        if is_hf(folder):
            break
    return folder
