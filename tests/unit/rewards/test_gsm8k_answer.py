"""The verifier of GSM8K: which place of a solution is looked at, and what counts there."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_ppo.data.plain_number import MAX_DIGITS
from megatron_ppo.protocol.trajectory import Prompt, token_array
from megatron_ppo.rewards.build import build_scorer
from megatron_ppo.rewards.gsm8k import Gsm8kAnswer, final_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so \\boxed{18}", 18),
        ("so \\boxed{18} dollars, not 19.", 18),  # a box counts before everything else
        ("first \\boxed{3}, then \\boxed{4}", 4),  # two answers: the last one
        ("\\boxed{\\frac{1}{2}}", Fraction(1, 2)),
        ("\\boxed{\\text{18 cm}}", 18),
        ("\\boxed {$1,000}", 1000),
        ("#### 5", 5),
        ("it is 7\n#### $1,000\nand 9 more", 1000),
        ("#### 3\n#### 4", 4),
        ("so 10-5 = 5", 5),
        ("the answer is -5.", -5),
        ("the answer is \u22125.", -5),
        ("answer: **-5**", -5),
        ("(-7)", -7),
        ("$-7$", -7),
        ("costs -$5", -5),
        ("10 - 5", 5),  # a difference, whose last number is 5
        ("He has 1,234.", 1234),
        ("it is 12 and 13", 13),
        ("(42)", 42),
        ("\\(42\\)", 42),
        ("42kg", 42),
        ("42%", 42),
        ("costs $0.50.", Fraction(1, 2)),
        ("10 \u00d7 3 = 30 dollars", 30),
    ],
)
def test_final_number_of_a_finished_solution(text: str, value: Fraction | int) -> None:
    assert final_number(text, ended=True) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "there is no answer",
        "18 \\boxed{}",  # an empty box is no answer, whatever stands before it
        "18 \\boxed{3 or 4}",
        "18 \\boxed{3, 4}",
        "18 \\boxed{3} and \\boxed{four}",
        "18 \\boxed{18",
        "18 ####",
        "18 #### 3 or 4",
        "18 #### none",
        "1,23",
        "5\u00b2",
        "2^3",
        "1e3",
        "v1.2.3",
        "18 " + "9" * (MAX_DIGITS + 1),  # too long to be an answer, and no shorter one is taken instead
        "\\boxed{" + "9" * 100_000 + "}",
        "\\boxed{" * 1000,
    ],
)
def test_solution_without_exactly_one_final_number_has_none(text: str) -> None:
    assert final_number(text, ended=True) is None


def test_a_number_at_which_a_response_was_cut_off_does_not_count() -> None:
    assert (
        final_number("the answer is 1", ended=False) is None
    )  # the next token might have been another digit
    assert final_number("#### 1", ended=False) is None
    assert final_number("#### 1\n", ended=False) == 1
    assert final_number("\\boxed{1}", ended=False) == 1


def test_with_needs_mark_a_bare_number_does_not_count() -> None:
    assert final_number("the answer is 5", ended=True, needs_mark=True) is None
    assert final_number("\\boxed{5}", ended=True, needs_mark=True) == 5
    assert final_number("#### 5", ended=True, needs_mark=True) == 5


@settings(deadline=None)
@given(st.text(max_size=80), st.booleans())
def test_every_text_is_judged(text: str, ended: bool) -> None:
    final_number(text, ended=ended)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


EOS = 256


def prompt(answer: str) -> Prompt:
    return Prompt(ordinal=3, token_ids=token_array([1]), text="How many?", answer=answer, metadata={})


@pytest.mark.parametrize(
    ("answer", "response", "ended", "reward"),
    [
        ("18", "It is 18.", True, 1.0),
        ("18", "It is 18.0", True, 1.0),
        ("18", "It is 18", False, 0.0),
        ("18", "It is \\boxed{18}", False, 1.0),
        ("18", "It is 19", True, 0.0),
        ("18", "I do not know", True, 0.0),
        ("1,234", "It is \\boxed{1234}", True, 1.0),
        ("-3", "It is \u22123", True, 1.0),
        ("0.5", "It is \\boxed{\\frac{1}{2}}", True, 1.0),
        ("12", "It is 1<end>2", True, 0.0),  # the end token in the middle is text
    ],
)
def test_reward_compares_numbers(
    folder: Path, answer: str, response: str, ended: bool, reward: float
) -> None:
    scorer = Gsm8kAnswer(tokenizer_dir=str(folder), eos_token_id=EOS)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(response).ids
    assert scorer(prompt(answer), [*ids, EOS] if ended else ids) == reward


def test_token_outside_the_tokenizer_makes_a_response_wrong(folder: Path) -> None:
    """Decoding drops it, which would join the digits around it."""
    scorer = Gsm8kAnswer(tokenizer_dir=str(folder), eos_token_id=EOS)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("12").ids
    assert scorer(prompt("12"), [*ids, EOS]) == 1.0
    assert scorer(prompt("12"), [ids[0], 300, ids[1], EOS]) == 0.0


def test_scorer_refuses_what_cannot_be_scored(folder: Path) -> None:
    scorer = build_scorer(
        "megatron_ppo.rewards.gsm8k.Gsm8kAnswer", {"tokenizer_dir": str(folder), "eos_token_id": EOS}
    )
    with pytest.raises(ValueError, match="prompt 3: an empty response"):
        scorer(prompt("18"), [])
    with pytest.raises(ValueError, match="the right answer must be a number, got 'many'"):
        scorer(prompt("many"), [EOS])
