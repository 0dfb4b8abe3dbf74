"""The verifiers, on cases worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_ppo.data import char_tokenizer as chars
from megatron_ppo.data.char_task import char_example
from megatron_ppo.protocol.errors import ConfigError, ScoringError
from megatron_ppo.protocol.trajectory import Prompt, token_array
from megatron_ppo.rewards.build import GuardedScorer, build_scorer
from megatron_ppo.rewards.chunk_match import ChunkMatch
from megatron_ppo.rewards.exact_match import ExactMatch
from megatron_ppo.rewards.final_number import FinalNumber

# A shared machine pauses a process for longer than Hypothesis' 200 ms.
no_deadline = settings(deadline=None)
responses = st.lists(st.integers(0, 63), min_size=1, max_size=40)


def prompt(text: str = "351=", answer: str = "135") -> Prompt:
    return char_example(text, answer).prompt(7)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (chars.encode_answer("135"), 1.0),
        (chars.encode("135"), 0.0),  # no EOS
        (chars.encode_answer("135."), 0.0),  # superfluous dot
        (chars.encode_answer("531"), 0.0),  # descending
        (chars.encode_answer("351="), 0.0),  # the question echoed
        (chars.encode_answer("351=135"), 0.0),
        ([*chars.encode_answer("135"), chars.PAD_ID], 0.0),  # goes on after EOS
        ([chars.EOS_ID], 0.0),
        ([60], 0.0),  # an id outside the tokenizer is wrong, not an error: the model can sample it
    ],
)
def test_exact_match_wants_the_answer_and_eos_and_nothing_else(response: list[int], expected: float) -> None:
    assert ExactMatch()(prompt(), response) == expected


@no_deadline
@given(responses)
def test_exact_match_is_total(response: list[int]) -> None:
    assert ExactMatch()(prompt(), response) == float(response == [4, 6, 8, 2])


LONG = {"text": "qk97=", "answer": "qk97,qk98,qk99,"}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (chars.encode_answer("qk97,qk98,qk99,"), 1.0),
        (chars.encode("qk97,qk98,qk99,"), 3 / 4),  # EOS is the fourth item
        (chars.encode_answer("qk97,qk98 qk99,"), 3 / 4),
        (chars.encode_answer("qk97 qk98 qk99 "), 1 / 4),  # EOS in its place
        (chars.encode_answer("qk97,qk96,qk95,qk94,"), 1 / 5),  # beyond the answer: longer divisor
        (chars.encode_answer("qk97,"), 1 / 4),  # EOS too early is no EOS
        (chars.encode_answer("xqk97,qk98,qk99,"), 0.0),  # an insertion shifts every item
        (chars.encode("qk97=qk97="), 0.0),  # the question echoed
        ([chars.EOS_ID], 0.0),
    ],
)
def test_chunk_match_is_the_share_of_right_items(response: list[int], expected: float) -> None:
    assert ChunkMatch(chunk_tokens=5)(prompt(**LONG), response) == pytest.approx(expected, abs=1e-12)


@no_deadline
@given(responses, st.integers(1, 9))
def test_chunk_match_is_total_and_full_only_for_the_exact_answer(response: list[int], width: int) -> None:
    reward = ChunkMatch(chunk_tokens=width)(prompt(**LONG), response)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (response == chars.encode_answer(LONG["answer"]))


def test_chunks_below_one_token_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be >= 1, got 0"):
        ChunkMatch(chunk_tokens=0)


@pytest.mark.parametrize("scorer", [ExactMatch(), ChunkMatch(chunk_tokens=5)])
def test_what_cannot_be_scored_raises(scorer: ExactMatch | ChunkMatch) -> None:
    with pytest.raises(ValueError, match="prompt 7: an empty response"):
        scorer(prompt(), [])
    bare = Prompt(ordinal=9, token_ids=token_array([1]), text="?", answer="!")
    with pytest.raises(ValueError, match=r"prompt 9 .* it needs 'answer_token_ids'"):
        scorer(bare, [4])


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    return str(folder), tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" -4\n", 1.0),
        ("-4\n", 1.0),
        (" -4<end>", 1.0),
        (" -4 \n", 1.0),
        (" -4\n\n", 1.0),
        (" -4", 0.0),  # unfinished: the next token might have been a digit
        (" 4 - 1 - 7\n", 0.0),  # the question echoed: right if it were evaluated
        (" 4 - 1 - 7 = -4\n", 0.0),
        (" 4\n", 0.0),
        (" --4\n", 0.0),
        (" -04\n", 0.0),
        (" -4.0\n", 0.0),
        (" - 4\n", 0.0),
        (" -4.\n", 0.0),
        ("\n-4\n", 0.0),  # the first line counts
        ("  -4\n", 0.0),
        (" −4\n", 0.0),  # a minus sign that is not a hyphen
        ("<end>", 0.0),
        (" -4<end><end>", 0.0),
    ],
)
def test_final_number_wants_one_integer_on_its_line(
    byte_tokenizer: tuple[str, Tokenizer], text: str, expected: float
) -> None:
    folder, tokenizer = byte_tokenizer
    eos = tokenizer.token_to_id("<end>")
    assert eos is not None
    question = Prompt(ordinal=3, token_ids=token_array([1]), text="4 - 1 - 7 =", answer="-4")
    scorer = FinalNumber(tokenizer_dir=folder, eos_token_id=eos)
    assert scorer(question, tokenizer.encode(text).ids) == expected


def test_digits_of_another_script_are_no_number(byte_tokenizer: tuple[str, Tokenizer]) -> None:
    folder, tokenizer = byte_tokenizer
    question = Prompt(ordinal=3, token_ids=token_array([1]), text="2 + 2 =", answer="4")
    assert FinalNumber(tokenizer_dir=folder, eos_token_id=256)(question, tokenizer.encode(" ٤\n").ids) == 0.0


@no_deadline
@given(response=st.lists(st.integers(0, 256), min_size=1, max_size=12))
def test_final_number_is_total(byte_tokenizer: tuple[str, Tokenizer], response: list[int]) -> None:
    question = Prompt(ordinal=3, token_ids=token_array([1]), text="2 + 2 =", answer="4")
    scorer = FinalNumber(tokenizer_dir=byte_tokenizer[0], eos_token_id=256)
    assert scorer(question, response) in (0.0, 1.0)


def test_final_number_raises_on_what_it_cannot_score(byte_tokenizer: tuple[str, Tokenizer]) -> None:
    scorer = FinalNumber(tokenizer_dir=byte_tokenizer[0], eos_token_id=256)
    question = Prompt(ordinal=3, token_ids=token_array([1]), text="2 + 2 =", answer="four")
    with pytest.raises(ValueError, match="empty response"):
        scorer(question, [])
    with pytest.raises(ValueError, match=r"unknown token ids \[999\]"):
        scorer(question, [999])
    with pytest.raises(ValueError, match="four"):
        scorer(question, [5])


def test_an_unknown_verifier_or_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'megatron_ppo\.rewards\.nothing\.Here' cannot be imported"):
        build_scorer("megatron_ppo.rewards.nothing.Here", {})
    with pytest.raises(ConfigError, match="cannot be imported"):
        build_scorer("ExactMatch", {})
    with pytest.raises(ConfigError, match=r"does not accept \{'width': 3\}"):
        build_scorer("megatron_ppo.rewards.chunk_match.ChunkMatch", {"width": 3})


def test_whatever_a_verifier_in_this_process_raises_is_a_scoring_error_with_the_ordinal() -> None:
    def broken(prompt: Prompt, response: object) -> float:
        raise KeyError("no such item")

    prompt = Prompt(ordinal=7, token_ids=token_array([1]), text="1=", answer="1")
    with pytest.raises(ScoringError, match=r"^scoring of prompt ordinal 7 raised KeyError: 'no such item'$"):
        GuardedScorer(broken)(prompt, [1])
    assert GuardedScorer(lambda prompt, response: 1)(prompt, [1]) == 1.0
