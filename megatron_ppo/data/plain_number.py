"""Reads one number out of a short text, exactly: what counts as the same answer to a word problem.

Driven by the tasks (right answers) and the verifiers (given answers). Invariant: a text is a number only if
nothing else but units stands around it; nothing is evaluated, so neither a sum nor a power is its result.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 60
"""Longer digit strings are no answers, and turning them into numbers would take time that grows as their square."""

_MINUS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\uff0d\ufe63"), "-")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2009\u200a\u202f\u3000"), " ")
_POINTS = {ord("\uff0c"): ",", ord("\uff0e"): ".", ord("\uff0b"): "+", ord("\uff05"): "%"}
_CHARACTERS = {**_MINUS, **_SPACES, **_POINTS}

_CURRENCY = r"(?:\\?\$|[€£¥₹]|USD\b|EUR\b|GBP\b)"
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# Superscripts and vulgar fractions count as word characters, but change the number that they stand at.
_LETTER = r"[^\W\d_\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209c\u2150-\u218b]"
# A unit holds no digit and no sign that would make the text an expression or a list of answers.
_UNIT = rf"(?:\s*(?:\\?%|°[CF]?|{_LETTER}+(?:[ /.-]+{_LETTER}+)*\.?))?"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*{_CURRENCY}?\s*(?P<inner>[+-]?)(?P<number>{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<below>[0-9]+))?\s*{_CURRENCY}?(?P<unit>{_UNIT})\.?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_CHOICE = re.compile(r"\b(?:or|and|to)\b", re.IGNORECASE)
_LATEX_WORDS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_LATEX_SPACES = re.compile(r"\\[,;:! ]|~|\{,\}")


def plain_characters(text: str) -> str:
    """The text with decimal digits of every script, minus signs and spaces as ASCII. Superscripts stay as they are:
    `5²` is not 52.
    """
    return "".join(
        str(unicodedata.decimal(character)) if character.isdecimal() else character
        for character in text.translate(_CHARACTERS)
    )


def parse_number(text: str) -> Fraction | None:
    """The number that `text` is, up to units, currency, thousands separators and LaTeX around it; None if it is none.

    Example: `$1,234.50`, `-3`, `\\frac{1}{2}`, `50\\%` (50, not a half), `18 apples`, `\\text{18 cm}`. Not numbers:
    `1,23`, `1.2.3`, `3 + 4`, `5^2`, `3 or 4`, `1e9`, and more than MAX_DIGITS digits.
    """
    plain = plain_characters(text).strip().strip("*").strip()
    plain = plain.removeprefix("\\(").removesuffix("\\)").removeprefix("$$").removesuffix("$$")
    if plain.startswith("$") and plain.endswith("$") and len(plain) > 1:
        plain = plain[1:-1]
    plain = _LATEX_WORDS.sub(r" \1", _LATEX_SPACES.sub(_separator, plain))
    plain = _FRACTION.sub(r"\1/\2", plain).strip()
    match = _NUMBER.fullmatch(plain)
    if match is None or (match["sign"] and match["inner"]) or _CHOICE.search(match["unit"]):
        return None
    number, below = match["number"].replace(",", ""), match["below"] or "1"
    if len(number) > MAX_DIGITS or len(below) > MAX_DIGITS or not below.strip("0"):
        return None
    value = Fraction(number) / int(below)
    return -value if "-" in (match["sign"], match["inner"]) else value


def _separator(match: re.Match[str]) -> str:
    # `1{,}234` and `1\\,234` separate thousands; elsewhere such a space is a space.
    between_digits = (
        re.compile(r"[0-9]").match(match.string, match.end())
        and match.string[match.start() - 1 : match.start()].isdigit()
    )
    return "," if between_digits else " "
