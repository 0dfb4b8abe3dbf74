"""The character tokenizer, and the Hugging Face files that carry the same mapping."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_ppo.data import char_tokenizer as chars
from megatron_ppo.data.char_task import require_char_tokenizer
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.warm_start.tokenizer_files import save_char_tokenizer

# A shared machine pauses a process for longer than Hypothesis' 200 ms.
no_deadline = settings(deadline=None)
texts = st.text(alphabet=chars.ALPHABET, max_size=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_char_tokenizer(path, context_length=256)
    return path


@pytest.fixture(scope="module")
def saved(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_53_of_64_ids_are_used() -> None:
    assert len(chars.vocabulary()) == 53
    assert sorted(chars.vocabulary().values()) == list(range(53))
    assert chars.VOCAB_SIZE == 64


def test_ids_are_those_of_the_models_that_were_trained_with_them() -> None:
    assert (chars.PAD_ID, chars.BOS_ID, chars.EOS_ID) == (0, 1, 2)
    assert list(chars.encode_prompt("35142=")) == [1, 6, 8, 4, 7, 5, 17]
    assert chars.encode_answer("12345") == [4, 5, 6, 7, 8, 2]


@no_deadline
@given(texts)
def test_decoding_undoes_encoding(text: str) -> None:
    assert chars.decode(chars.encode(text)) == text


@no_deadline
@given(texts)
def test_the_saved_tokenizer_encodes_like_ours(saved: Tokenizer, text: str) -> None:
    assert saved.encode(text, add_special_tokens=False).ids == chars.encode(text)
    assert saved.encode(text).ids == list(chars.encode_prompt(text))
    assert saved.decode(chars.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_hidden_or_shown_on_request(saved: Tokenizer) -> None:
    ids = [chars.BOS_ID, *chars.encode_answer("1 2")]
    assert saved.decode(ids) == "1 2"
    assert saved.decode(ids, skip_special_tokens=False) == chars.decode(ids) == "<bos>1 2<eos>"


def test_a_character_outside_the_alphabet_is_refused_by_both(saved: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"\['A'\] of '1A' are not in the alphabet"):
        chars.encode("1A")
    with pytest.raises(Exception, match="Missing"):
        saved.encode("1A")


def test_an_id_that_is_never_produced_is_refused() -> None:
    with pytest.raises(ValueError, match="token id 60 is unknown; ids run from 0 to 52"):
        chars.decode([4, 60])


def test_a_folder_with_our_tokenizer_is_accepted(folder: Path) -> None:
    require_char_tokenizer(folder, task="sort3_5")


def test_a_folder_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a tokenizer\.json"):
        require_char_tokenizer(tmp_path, task="sort3_5")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ConfigError, match=r"needs the character tokenizer \(53 tokens\); .* has 1 tokens"):
        require_char_tokenizer(tmp_path, task="sort3_5")
