"""Which sources an extension was built of: `setup.py` writes it in, and who loads one beside its sources compares."""

from __future__ import annotations

from os import PathLike


def digest(folder: str | PathLike[str] | None = None) -> str:
    """16 hex digits of what lies in a folder as C++; empty where nothing does. The folder is that of this file."""
    import hashlib  # noqa: PLC0415 - few need it
    from pathlib import Path  # noqa: PLC0415 - few need it

    folder = Path(__file__).parent if folder is None else Path(folder)
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    text = b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)
    return hashlib.sha256(text).hexdigest()[:16] if files else ""
