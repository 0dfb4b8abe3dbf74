"""What is a number and what only looks like one; cases worked out by hand."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.data.plain_number import MAX_DIGITS, parse_number

no_deadline = settings(deadline=None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        (" 18. ", 18),
        ("18.0", 18),
        ("007", 7),
        (".5", Fraction(1, 2)),
        ("-3", -3),
        ("- 3", -3),
        ("+3", 3),
        ("\u22123", -3),  # minus sign
        ("\u20133", -3),  # en dash
        ("$18", 18),
        ("\\$18", 18),
        ("-$5", -5),
        ("$-5", -5),
        ("5 USD", 5),
        ("\u20ac5.50", Fraction(11, 2)),
        ("1,234", 1234),
        ("1,234,567.89", Fraction(123456789, 100)),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        ("50%", 50),
        ("50\\%", 50),
        ("1/2", Fraction(1, 2)),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("\\dfrac{6}{4}", Fraction(3, 2)),
        ("18 apples", 18),
        ("18cm", 18),
        ("5 km/h", 5),
        ("18 dollars per hour.", 18),
        ("\\text{18 cm}", 18),
        ("18\\ \\text{eggs}", 18),
        ("$18$", 18),
        ("\\(18\\)", 18),
        ("**18**", 18),
        ("\uff11\uff18", 18),  # full-width digits
        ("\u0663", 3),  # an Arabic-Indic digit
        ("9" * MAX_DIGITS, int("9" * MAX_DIGITS)),
    ],
)
def test_number_is_read_through_units_currency_and_separators(text: str, value: Fraction | int) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "eighteen",
        "1,23",  # neither thousands nor a decimal point
        "1234,5",
        "12,34,567",
        "1 234",
        "1.2.3",
        "--3",
        "-$-3",
        "3 or 4",
        "3 and 4",
        "3, 4",
        "3 4",
        "3 to 4",
        "3 + 4",
        "5^2",
        "5\u00b2",  # superscript
        "12 m^2",
        "2\u00bd",  # vulgar fraction
        "1e9",
        "1e999999999",
        "x = 5",
        "3:30",
        "3/0",
        "1/2/3",
        "9" * (MAX_DIGITS + 1),
        "9" * 100_000,
        "0." + "9" * 100_000,
        "1/" + "9" * 100_000,
        "inf",
        "NaN",
        "\u221e",
        "\\boxed{3}",
        "__import__('os')",
    ],
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert parse_number(text) is None


@no_deadline
@given(st.integers(-(10**20), 10**20))
def test_integers_survive_formatting(value: int) -> None:
    for text in (str(value), f"{value:,}", f"${value:,}", f"{value}.00", f"{value} apples"):
        assert parse_number(text) == value


@no_deadline
@given(st.text(max_size=60))
def test_any_text_is_a_number_or_none(text: str) -> None:
    assert parse_number(text) is None or any(character.isdecimal() for character in text)


@pytest.mark.parametrize(
    "text", ["1 " + "a" * 50_000 + "!", "1" + ",111" * 20_000, "1 " + "a " * 20_000 + "9", " " * 50_000]
)
def test_long_texts_are_refused_in_linear_time(text: str) -> None:
    started = time.process_time()
    assert parse_number(text) is None
    assert time.process_time() - started < 2.0
