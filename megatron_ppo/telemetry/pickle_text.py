"""What a pickle says, as text, without doing what it says: classes become names, calls records of their arguments.

Two pickles of equal content may have other bytes, because a pickle also keeps which of its strings were one object.
Driven by `run_comparison` and `checkpoint_pieces`. Invariant: nothing is imported or called, whatever the file holds.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

_NO_CONTENT = ("/data.pkl", "/.data/serialization_id")


class Inert:
    """An instance of whatever class the pickle names: remembers what it was made of."""

    label = ""
    hidden = False

    def __new__(cls, *arguments: object) -> Inert:
        made = super().__new__(cls)
        made.parts = [arguments]  # type: ignore[attr-defined]
        return made

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self._keep("state", state)

    def __setitem__(self, key: object, value: object) -> None:
        self._keep(key, value)

    def append(self, value: object) -> None:
        """As a list does."""
        self._keep(value)

    def extend(self, values: object) -> None:
        """As a list does."""
        self._keep(values)

    def add(self, value: object) -> None:
        """As a set does."""
        self._keep(value)

    @property
    def arguments(self) -> tuple[object, ...]:
        """What it was called with."""
        return self.parts[0]  # type: ignore[attr-defined, no-any-return]

    def state(self) -> Mapping[str, object]:
        """Its attributes. Raises: ValueError if the pickle gives it none."""
        for key, *values in self.parts[1:]:  # type: ignore[attr-defined]
            if key == "state" and isinstance(values[0], dict):
                return values[0]
        raise ValueError(f"{self.label} without attributes")

    def _keep(self, *what: object) -> None:
        self.parts.append(what)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return self.label if self.hidden else f"{self.label}{self.parts}"  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(repr(self))

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, hidden: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._hidden = hidden

    def find_class(self, module: str, name: str) -> type[Inert]:
        label = f"{module}.{name}"
        return type(name, (Inert,), {"label": label, "hidden": label in self._hidden})

    def persistent_load(self, persistent_id: object) -> object:
        return ("stored elsewhere", persistent_id)


def read_inert(data: bytes, *, hidden: Collection[str] = ()) -> object:
    """The content of a pickle, with an `Inert` in place of each instance.

    Args:
        hidden: full names of classes whose instances are shown without what they hold.
    Raises: ValueError for what is no pickle.
    """
    try:
        return _Reader(data, hidden).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"not a pickle: {error!r}") from error


def pickle_text(data: bytes) -> str:
    """The content of a pickle as text; equal texts say the same. Raises: as `read_inert`."""
    return repr(read_inert(data))


def torch_file_text(file: Path | BinaryIO) -> tuple[str, dict[str, bytes]]:
    """The content of a file of `torch.save`: its pickle as text, and the bytes of its tensors and all else by name.

    Raises: ValueError for another kind of file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            [pickled] = [name for name in names if name.endswith("/data.pkl")]
            # The identification is a checksum of the other entries, and so of how the pickle says what it says.
            others = {name: archive.read(name) for name in names if not name.endswith(_NO_CONTENT)}
            return pickle_text(archive.read(pickled)), others
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"{file} is no file of torch.save: {error}") from error
