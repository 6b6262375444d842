"""A training's state in one file, and back: whole or not at all, never that of another run."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from mitigate.files import write_atomic


def write_checkpoint(path: Path, identity: str, state: dict[str, Any]) -> None:
    """Store tensors and plain data, whole or not at all; `identity` names the run."""
    stream = io.BytesIO()
    torch.save({"identity": identity} | state, stream)
    write_atomic(path, stream.getvalue())


def read_checkpoint(path: Path, identity: str) -> dict[str, Any] | None:
    """What a run stored, tensors on the CPU; None if the file is missing, damaged or of another run."""
    try:
        stream = io.BytesIO(path.read_bytes())
        with zipfile.ZipFile(stream) as archive:
            if archive.testzip() is not None:  # torch does not look at the checksums that it writes
                return None
        stream.seek(0)
        state = torch.load(stream, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error):
        return None
    return state if isinstance(state, dict) and state.get("identity") == identity else None
