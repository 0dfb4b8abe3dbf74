"""Two checkpoints in torch_dist format compared piece by piece, each found through its own index.

The format keeps every tensor and every object as one piece of a data file; the index says where it lies. Driven by
`run_comparison`, where bytes differ. An object is a pickle, which also keeps which of its strings were one object, so
equal objects may have other lengths, and what is behind them then lies elsewhere. Megatron-Core 0.19.x stores its
common state so; 0.16.x has a file for it.

Invariants: beside what names the save itself, only where a piece lies may differ without a finding; every byte of the
data files belongs to a piece; nothing is imported or called, whatever the files hold.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.telemetry.pickle_text import Inert, read_inert, torch_file_text

INDEX_FILE = ".metadata"
DATA_SUFFIX = ".distcp"

_SAVE_ITSELF = "torch.distributed.checkpoint.metadata.StorageMeta"
"""Holds the path of the run and a random number of the save."""
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
"""Where a piece lies: file, offset and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    file: str
    offset: int
    length: int
    rest: str
    """Everything else that the index says of how it is stored."""


def differing_pieces(first: Path, second: Path) -> Iterator[str]:
    """One line per piece of other content in two checkpoint folders, the index first.

    A piece is equal when its bytes are, or when both are files of `torch.save` that say the same: equal text, and
    tensors of equal bytes. Raises: ValueError for a folder whose index or data files are not of this format.
    """
    texts, pieces = zip(*(_read_index(folder) for folder in (first, second)), strict=True)
    if texts[0] != texts[1] or list(pieces[0]) != list(pieces[1]):
        yield f"{INDEX_FILE} has another content"
        return
    for name, one in pieces[0].items():
        two = pieces[1][name]
        if (one.file, one.rest) != (two.file, two.rest):
            yield f"{name} is stored in another way"
        elif not _hold_the_same(_content(first, one), _content(second, two)):
            yield f"{name} in {one.file} has another content"


def _read_index(folder: Path) -> tuple[str, dict[str, _Piece]]:
    """The index as text, without where pieces lie, and the pieces by name."""
    data = (folder / INDEX_FILE).read_bytes()
    text = repr(read_inert(data, hidden=(_SAVE_ITSELF, _PLACE)))
    places = _state(read_inert(data)).get("storage_data")
    if not isinstance(places, dict):
        raise ValueError(f"{folder / INDEX_FILE} names no stored pieces")
    pieces = {_name(key): _piece(place) for key, place in places.items()}
    if len(pieces) < len(places):
        raise ValueError(f"{folder / INDEX_FILE} names a piece twice")
    _check_cover(folder, pieces)
    return text, pieces


def _state(value: object) -> Mapping[str, object]:
    if not isinstance(value, Inert):
        raise ValueError(f"the index of a checkpoint holds {value!r} where a record belongs")
    return value.state()


def _name(key: object) -> str:
    """As "policy.output_layer.weight at (0, 0)"; objects lie nowhere."""
    state = _state(key)
    offset = state.get("offset")
    if isinstance(offset, Inert):  # a torch.Size, made of one tuple
        offset = offset.arguments[0]
    return f"{state.get('fqn')}" + ("" if offset is None else f" at {offset}")


def _piece(place: object) -> _Piece:
    state = dict(_state(place))
    file, offset, length = (state.pop(key, None) for key in ("relative_path", "offset", "length"))
    if not (isinstance(file, str) and isinstance(offset, int) and isinstance(length, int)):
        raise ValueError(f"the index of a checkpoint says of a piece only {place!r}")
    return _Piece(file=file, offset=offset, length=length, rest=repr(state))


def _check_cover(folder: Path, pieces: Mapping[str, _Piece]) -> None:
    """Raises: ValueError if a byte of a data file belongs to no piece, or to two."""
    ends = {str(path.relative_to(folder)): 0 for path in folder.rglob(f"*{DATA_SUFFIX}")}
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].offset):
        end = ends.get(piece.file)
        if end != piece.offset:
            raise ValueError(
                f"{piece.file}: {name} starts at {piece.offset}, what is before it ends at {end}"
            )
        ends[piece.file] = piece.offset + piece.length
    for file, end in ends.items():
        size = (folder / file).stat().st_size
        if size != end:
            raise ValueError(f"{file} has {size} bytes, its pieces end at {end}")


def _content(folder: Path, piece: _Piece) -> bytes:
    with (folder / piece.file).open("rb") as stream:
        stream.seek(piece.offset)
        return stream.read(piece.length)


def _hold_the_same(first: bytes, second: bytes) -> bool:
    if first == second:
        return True
    try:
        return torch_file_text(io.BytesIO(first)) == torch_file_text(io.BytesIO(second))
    except ValueError:
        return False
