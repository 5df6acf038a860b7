"""Units of measurement in results: normalised names, and conversion between units."""

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple, cast

_DEFINITIONS = {
    "m meter": "",
    "g gram": "",
    "s sec second": "",
    "month": "",
    "A ampere amp": "",
    "mole": "",
    "$ dollar usd": "",
    "€ euro eur": "",
    "£": "",
    "° degree deg": "",
    "rad radian": "",
    "% percent": "",
    "gal gallon": "",
    "byte": "",
    "in inch inches": "0.0254 m",
    "ft foot feet": "12 in",
    "yd yard": "3 ft",
    "mi mile": "5280 ft",
    "lb lbs pound": "453.59237 g",
    "oz ounce": "1/16 lb",
    "t tonne": "1000000 g",
    "min minute": "60 s",
    "h hr hrs hour": "60 min",
    "day": "24 h",
    "week": "7 day",
    "yr year": "12 month",
    "decade": "10 yr",
    "century centuries": "100 yr",
    "L l liter": "1/1000 m^3",
    "ha hectare": "10000 m^2",
    "acre": "4840 yd^2",
    "cent": "1/100 $",
    "quart": "1/4 gal",
    "pint": "1/8 gal",
    "cup": "1/16 gal",
    "mph": "1 mi/h",
    "kph": "1 km/h",
    "Hz hertz": "1 /s",
    "N newton": "1 kg m/s^2",
    "J joule": "1 N m",
    "W watt": "1 J/s",
    "Wh": "3600 J",
    "Pa pascal": "1 N/m^2",
    "V volt": "1 W/A",
    "bit": "1/8 byte",
}
"""Names of a unit -> its size in earlier units, which may have a prefix; empty for a base unit."""
_PREFIXES = {
    "n nano": -9,
    "μ micro": -6,
    "m milli": -3,
    "c centi": -2,
    "d deci": -1,
    "k kilo": 3,
    "M mega": 6,
    "G giga": 9,
}
_WITH_PREFIX = re.compile("m|meter|g|gram|s|second|A|ampere|L|l|liter|Hz|hertz|N|newton|J|joule|W|watt|Wh|Pa|V|byte")
_BARE = re.compile("[cmk]?m|ft|in|mi|k?g|lbs?|s|sec|min|h|hrs?|m?[lL]|usd|eur|deg|°")
"""Short names that count as units and not as factors even without a LaTeX command for text."""
_WORD_OF_POWER = (
    (re.compile(r"\b(?:square|sq)\s(\w+)"), r"\1^2"),
    (re.compile(r"\bcubic\s(\w+)"), r"\1^3"),
    (re.compile(r"(\w+)\ssquared\b"), r"\1^2"),
    (re.compile(r"(\w+)\scubed\b"), r"\1^3"),
)


class _Unit(NamedTuple):
    name: str
    """Canonical name."""
    size: Fraction
    """Size in base units."""
    powers: Mapping[str, int]
    """Exponents of the base units."""


UNITS: dict[str, _Unit] = {}
"""Units by each of their names; filled from `_DEFINITIONS`."""


def is_bare(name: str) -> bool:
    """Return whether a name after a number is a unit and not a factor."""
    return bool(_BARE.fullmatch(name)) or len(name) > 3 and _named(name) in UNITS


def ratio_of(unit: str, other: str) -> Fraction | int | None:
    """Return the size of a unit in another one; 1 if the words of one include the words of the other, None if they
    differ in kind."""
    size, powers = measured(unit)
    other_size, other_powers = measured(other)
    if size and other_size:
        return size / other_size if powers == other_powers else None
    fewer, more = sorted((set(unit.split()), set(other.split())), key=len)
    return 1 if fewer <= more and ("/" in fewer) == ("/" in more) else None


def measured(unit: str) -> tuple[Fraction | None, Counter[str]]:
    """Return the size of a unit in base units, None if it is unknown, and their powers: 1000/3600 and m/s for km/h."""
    size = Fraction(1)
    powers = Counter[str]()
    sign = 1
    for word in unit.split():
        base, _, exponent = word.partition("^")
        if word == "/":
            sign = -1
        elif definition := UNITS.get(base):
            power = sign * int(exponent or 1)
            size *= definition.size**power
            for name, number in definition.powers.items():
                powers[name] += number * power
        else:
            return None, powers
    return size, Counter({name: number for name, number in powers.items() if number})


def _named(word: str) -> str:
    """Return the canonical name of a unit; for other words, the singular in lower case."""
    plain = word.casefold().replace("metre", "meter").replace("litre", "liter")
    singular = plain[:-1] if len(plain) > 2 and plain.endswith("s") and not plain.endswith("ss") else plain
    return next((UNITS[name].name for name in (word, plain, singular) if name in UNITS), singular)


def unit_name(named: str) -> str:
    """Return a unit with one name for each of its parts, such as ``km / h``."""
    text = re.sub(r"[{}.]|\s+(?=\^)", "", re.sub(r"\s*/\s*|\s*\bper\s", " / ", named))
    for words, power in _WORD_OF_POWER:
        text = words.sub(power, text)
    parts = [word.partition("^") for word in re.split(r"\s+|(?<!\^)-", text.strip())]
    return " ".join(_named(base) + power + exponent for base, power, exponent in parts)


for _names, _definition in _DEFINITIONS.items():
    _first = _names.split()[0]
    _number = _definition.partition(" ")[0]
    _size, _powers = measured(unit_name(_definition.removeprefix(_number)))
    for _name in _names.split():
        UNITS[_name] = _Unit(_first, cast(Fraction, _size) * Fraction(_number or 1), _powers or {_first: 1})
        for _prefix, _tens in _PREFIXES.items() if _WITH_PREFIX.fullmatch(_name) else ():
            _short, _long = _prefix.split()
            _multiple = (_short if len(_name) < 3 else _long) + _name
            UNITS[_multiple] = UNITS[_name]._replace(
                name=_short + _first, size=UNITS[_name].size * Fraction(10) ** _tens
            )
