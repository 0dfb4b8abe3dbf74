"""Pickles as text: equal contents give equal texts, other contents other ones, and nothing is executed."""

from __future__ import annotations

import collections
import math
import os
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from megatron_ppo.telemetry.pickle_text import pickle_text, read_inert, torch_file_text

CONTENT = {"lr": 0.1, "zero": 0.0, "betas": (0.9, 0.95), "names": ["a", "b"], "what": Fraction(1, 3)}


def copied(text: str) -> str:
    """An equal string that is another object."""
    return "".join(list(text))


def test_which_strings_were_one_object_changes_the_bytes_and_not_the_text() -> None:
    word = "learning_rate"
    one, two = [word, word], [word, copied(word)]
    assert pickle.dumps(one) != pickle.dumps(two)
    assert pickle_text(pickle.dumps(one)) == pickle_text(pickle.dumps(two))


@pytest.mark.parametrize(
    "changed",
    [{"lr": math.nextafter(0.1, 1.0)}, {"zero": -0.0}, {"betas": [0.9, 0.95]}, {"names": ["b", "a"]},
     {"what": Fraction(2, 3)}, {"more": None}],
)  # fmt: skip
def test_another_content_is_another_text(changed: dict[str, object]) -> None:
    assert pickle_text(pickle.dumps(CONTENT)) == pickle_text(pickle.dumps(dict(CONTENT)))
    assert pickle_text(pickle.dumps(CONTENT)) != pickle_text(pickle.dumps({**CONTENT, **changed}))


def test_objects_of_every_kind_are_shown_with_what_they_hold() -> None:
    ordered = collections.OrderedDict(a=1)
    counted = collections.defaultdict(list, {"k": [1]})
    text = pickle_text(pickle.dumps([ordered, counted, collections.deque([5]), Path("a/b")]))
    for part in (
        "collections.OrderedDict",
        "collections.defaultdict",
        "'k'",
        "collections.deque",
        "5",
        "'b'",
    ):
        assert part in text


def test_a_hidden_class_is_named_and_its_content_is_not() -> None:
    texts = {
        repr(read_inert(pickle.dumps([Fraction(n, 7), 1]), hidden=("fractions.Fraction",))) for n in (1, 2)
    }
    assert texts == {"[fractions.Fraction, 1]"}


def test_nothing_that_a_pickle_calls_is_called(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    text = pickle_text(pickle.dumps(Evil()))
    assert "mkdir" in text and str(tmp_path) in text
    assert list(tmp_path.iterdir()) == []


def test_files_of_torch_are_compared_with_their_tensors(tmp_path: Path) -> None:
    def saved(name: str, **content: object) -> tuple[str, dict[str, bytes]]:
        torch.save(content, tmp_path / name)
        return torch_file_text(tmp_path / name)

    word = "learning_rate"
    first = saved("x.pt", weights=torch.tensor([1.0, 2.0]), words=[word, word])
    assert first == saved("x.pt", weights=torch.tensor([1.0, 2.0]), words=[word, copied(word)])
    assert first != saved("x.pt", weights=torch.tensor([1.0, 2.5]), words=[word, word])
    assert first != saved("x.pt", weights=torch.tensor([1.0, 2.0]), words=[word, "b"])


@pytest.mark.parametrize("data", [b"", b"abc", pickle.dumps([1])[:-3]])
def test_what_is_no_pickle_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match="not a pickle"):
        pickle_text(data)
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ValueError, match=r"no file of torch\.save"):
        torch_file_text(tmp_path / "x.pt")
