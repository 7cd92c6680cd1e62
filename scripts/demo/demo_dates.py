"""Dates in many spellings inside texts of skewed length: the data of the demo job, from a seed alone.

An example is a text with one date in it and that date as ISO 8601. The date is drawn from 1900-01-01 to 2099-12-31,
spelled by one of `SPELLINGS`, and set into a carrier sentence with filler sentences around it until a log-normal
target length is reached, so most texts are short and a few are very long.

What a spelling means:

- Slashes with the year last are read as their marker says: (US) is month first, (UK) is day first.
  Dots are always day first. The year first is always year, month, day.
- A year of two digits is read as POSIX `strptime` reads `%y`: 69 to 99 are 1969 to 1999, 00 to 68 are 2000 to 2068.
- Times of day, weekdays and UTC offsets are noise: the date as written is the answer, it is not moved to UTC.
- The day of the year ("1999-062") is left out: it is a table to learn by heart, and a model trained on all the other
  spellings as well had learned a fifth of it when it was done with the rest.

Training and evaluation never share a spelled date. `is_held_out` sends a spelled date, such as "3 Mar 1999", to one
side by its checksum, and the surrounding text has no say in it. So no evaluation row repeats a training row, and no
evaluation row shows a (date, spelling) pair that training has seen in another sentence.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from math import log
from random import Random

FIRST_DATE = date(1900, 1, 1)
LAST_DATE = date(2099, 12, 31)
FIRST_TWO_DIGIT_YEAR, LAST_TWO_DIGIT_YEAR = 1969, 2068
HELD_OUT_SHARE = 16  # one spelled date in sixteen is kept from training

MEDIAN_TEXT_CHARS = 56
TEXT_CHARS_SIGMA = 0.9
MAX_TEXT_CHARS = 900


@dataclass(frozen=True, slots=True)
class Example:
    text: str
    iso: str
    spelled: str  # the date as it stands in the text


# --- Names and numerals ---------------------------------------------------------------------------------------------

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ENGLISH = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
ENGLISH_SHORT = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
GERMAN = (
    *("Januar", "Februar", "März", "April", "Mai", "Juni"),
    *("Juli", "August", "September", "Oktober", "November", "Dezember"),
)
FRENCH = (
    *("janvier", "février", "mars", "avril", "mai", "juin"),
    *("juillet", "août", "septembre", "octobre", "novembre", "décembre"),
)
SPANISH = (
    *("enero", "febrero", "marzo", "abril", "mayo", "junio"),
    *("julio", "agosto", "septiembre", "octubre", "noviembre", "diciembre"),
)
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")

UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ORDINALS = (
    *("zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth"),
    *("nineteenth", "twentieth"),
)


def cardinal(number: int) -> str:
    """English words for 0 to 99: "sixty-two"."""
    if number < 20:
        return UNITS[number]
    tens, unit = divmod(number, 10)
    return f"{TENS[tens]}-{UNITS[unit]}" if unit else TENS[tens]


def ordinal(number: int) -> str:
    """English ordinal words for 1 to 31: "twenty-first"."""
    if number <= 20:
        return ORDINALS[number]
    if number == 30:
        return "thirtieth"
    return f"{TENS[number // 10]}-{ORDINALS[number % 10]}"


def ordinal_figure(number: int) -> str:
    """English ordinal figures for 1 to 31: "3rd", "12th"."""
    suffix = "th" if 11 <= number <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def year_words(year: int, rng: Random) -> str:
    """English words for a year from 1900 to 2099: "nineteen ninety-nine", "two thousand and three"."""
    century, rest = divmod(year, 100)
    if century == 20 and (rest < 10 or rng.random() < 0.4):
        joint = rng.choice((" and ", " "))
        return f"two thousand{joint}{cardinal(rest)}" if rest else "two thousand"
    if rest == 0:
        return f"{cardinal(century)} hundred"
    if rest < 10:
        return f"{cardinal(century)} {rng.choice(('oh', 'hundred and'))} {cardinal(rest)}"
    return f"{cardinal(century)} {cardinal(rest)}"


def has_two_digit_year(day: date) -> bool:
    return FIRST_TWO_DIGIT_YEAR <= day.year <= LAST_TWO_DIGIT_YEAR


def year_figures(day: date, rng: Random, mark: str = "") -> str:
    """Four digits, or now and then `mark` and two digits where the pivot reads them back as the same year."""
    if has_two_digit_year(day) and rng.random() < 0.3:
        return f"{mark}{day.year % 100:02d}"
    return str(day.year)


def figure(number: int, rng: Random) -> str:
    """A day or month with or without its leading zero."""
    return rng.choice((f"{number:02d}", str(number)))


def clock(rng: Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}"


def english_month(day: date, rng: Random) -> str:
    short = ENGLISH_SHORT[day.month - 1]
    if day.month == 9 and rng.random() < 0.4:
        short = "Sept"
    if day.month != 5 and rng.random() < 0.25:
        short += "."
    name = ENGLISH[day.month - 1] if rng.random() < 0.5 else short
    return name.upper() if rng.random() < 0.1 else name


# --- Spellings: date -> str -----------------------------------------------------------------------------------------


def spell_iso(day: date, rng: Random) -> str:
    tail = rng.choice(("", "", f"T{clock(rng)}Z", f" {clock(rng)}"))
    return f"{day.isoformat()}{tail}"


def spell_compact(day: date, rng: Random) -> str:
    return f"{day:%Y%m%d}"


def spell_year_first(day: date, rng: Random) -> str:
    mark = rng.choice("/.")
    return f"{day.year}{mark}{figure(day.month, rng)}{mark}{figure(day.day, rng)}"


def spell_us(day: date, rng: Random) -> str:
    return f"{figure(day.month, rng)}/{figure(day.day, rng)}/{year_figures(day, rng)} (US)"


def spell_uk(day: date, rng: Random) -> str:
    return f"{figure(day.day, rng)}/{figure(day.month, rng)}/{year_figures(day, rng)} (UK)"


def spell_dots(day: date, rng: Random) -> str:
    return f"{figure(day.day, rng)}.{figure(day.month, rng)}.{year_figures(day, rng)}"


def spell_roman(day: date, rng: Random) -> str:
    """ "3.XI.1987", "3-XI-87" """
    mark = rng.choice((".", "-", " "))
    return f"{day.day}{mark}{ROMAN[day.month - 1]}{mark}{year_figures(day, rng)}"


def spell_day_month(day: date, rng: Random) -> str:
    """ "3 Mar 1999", "4th September '07" """
    number = rng.choice((str(day.day), ordinal_figure(day.day)))
    year = year_figures(day, rng, mark="'")
    return f"{number} {english_month(day, rng)} {year}"


def spell_month_day(day: date, rng: Random) -> str:
    """ "May 7, 2001", "Sept 4th '07" """
    if rng.random() < 0.5:
        return f"{english_month(day, rng)} {day.day}, {day.year}"
    year = year_figures(day, rng, mark="'")
    return f"{english_month(day, rng)} {ordinal_figure(day.day)} {year}"


def spell_day_of_month(day: date, rng: Random) -> str:
    """ "the 3rd of March, 1999" """
    return f"the {ordinal_figure(day.day)} of {ENGLISH[day.month - 1]}{rng.choice((',', ''))} {day.year}"


def spell_weekday(day: date, rng: Random) -> str:
    """ "Monday, 7 May 2001", "Mon May 7 2001" """
    name = WEEKDAYS[day.weekday()]
    if rng.random() < 0.5:
        return f"{name}, {day.day} {ENGLISH[day.month - 1]} {day.year}"
    return f"{name[:3]} {ENGLISH_SHORT[day.month - 1]} {day.day} {day.year}"


def spell_stamp(day: date, rng: Random) -> str:
    """ "07MAY2001", "07-MAY-01" """
    mark = rng.choice(("", "-"))
    return f"{day.day:02d}{mark}{ENGLISH_SHORT[day.month - 1].upper()}{mark}{year_figures(day, rng)}"


def spell_mail(day: date, rng: Random) -> str:
    """RFC 2822, section 3.3: "Mon, 07 May 2001 10:22:31 +0200"."""
    offset = f"{rng.choice('+-')}{rng.randrange(12):02d}{rng.choice(('00', '30'))}"
    month = ENGLISH_SHORT[day.month - 1]
    return f"{WEEKDAYS[day.weekday()][:3]}, {day.day:02d} {month} {day.year} {clock(rng)} {offset}"


def spell_log(day: date, rng: Random) -> str:
    """C `asctime`: "Mon May  7 10:22:31 2001"."""
    month = ENGLISH_SHORT[day.month - 1]
    return f"{WEEKDAYS[day.weekday()][:3]} {month} {day.day:2d} {clock(rng)} {day.year}"


def spell_words(day: date, rng: Random) -> str:
    """ "the twenty-first of June two thousand and three" """
    month, number, year = ENGLISH[day.month - 1], ordinal(day.day), year_words(day.year, rng)
    if rng.random() < 0.6:
        return f"the {number} of {month} {year}"
    return f"{month} {number}, {year}"


def spell_german(day: date, rng: Random) -> str:
    return f"{rng.choice(('den ', ''))}{day.day}. {GERMAN[day.month - 1]} {day.year}"


def spell_french(day: date, rng: Random) -> str:
    number = "1er" if day.day == 1 else str(day.day)
    return f"{rng.choice(('le ', ''))}{number} {FRENCH[day.month - 1]} {day.year}"


def spell_spanish(day: date, rng: Random) -> str:
    return f"{rng.choice(('el ', ''))}{day.day} de {SPANISH[day.month - 1]} {rng.choice(('de', 'del'))} {day.year}"


def spell_cjk(day: date, rng: Random) -> str:
    """Chinese and Japanese "2001年5月7日", Korean "2001년 5월 7일"."""
    if rng.random() < 0.6:
        return f"{day.year}年{day.month}月{day.day}日"
    return f"{day.year}년 {day.month}월 {day.day}일"


Spelling = Callable[[date, Random], str]

# The weight is the share of training rows: what is slow to learn, or can be written in many ways, gets more.
# Evaluation draws every spelling equally often.
SPELLINGS: dict[Spelling, float] = {
    spell_iso: 0.5,
    spell_compact: 1.0,
    spell_year_first: 1.5,
    spell_us: 3.0,
    spell_uk: 3.0,
    spell_dots: 1.5,
    spell_roman: 2.0,
    spell_day_month: 1.5,
    spell_month_day: 1.5,
    spell_day_of_month: 0.75,
    spell_weekday: 0.75,
    spell_stamp: 1.0,
    spell_mail: 0.75,
    spell_log: 0.75,
    spell_words: 2.0,
    spell_german: 0.75,
    spell_french: 0.75,
    spell_spanish: 0.75,
    spell_cjk: 1.0,
}


# --- The text around the date ---------------------------------------------------------------------------------------

CARRIERS = (
    "Invoice dated {date}, paid.",
    "Invoice {number}, {date}, {amount}",
    "Signed in {city} on {date}.",
    "Due: {date}",
    "Date: {date}",
    "Received {date} in {city}",
    "Born {date} in {city}.",
    "Postmarked {date}.",
    "valid until {date}",
    "Minutes of the meeting held {date}",
    "Your {thing} left {city} on {date} and is on its way.",
    "{name} joined us on {date}.",
    "{name} wrote from {city}: {date}, and all is well.",
    "Order {number} shipped {date}.",
    "Re: {thing}, {date}",
    "{city}, {date}",
    "Please return the {thing} by {date}.",
    "The {thing} was last seen on {date} near {city}.",
    "Payment of {amount} arrived {date}, thank you.",
    "Lease begins {date}; deposit {amount}.",
    "[{date}] {name} opened ticket {number}",
    "The warranty of the {thing} ends {date}",
)

FILLERS = (
    "The {thing} weighs {small} kg and needs two people to carry it.",
    "Please sign the form and send it back to {city}.",
    "{name} will call you about the {thing}.",
    "Our office in {city} is closed at noon.",
    "The balance of {amount} is still open.",
    "Quote number {number} when you write to us.",
    "You may keep the {thing} if you like it.",
    "See the second page for the terms.",
    "{name} and {name} agreed to share the {thing}.",
    "It came with a manual of {small} pages.",
    "The train from {city} to {city} was late again.",
    "A receipt for {amount} is attached.",
    "Nobody in {city} had seen a {thing} like this one.",
    "We thank you for your patience.",
    "Room {small} was booked for {name}.",
    "The door opens at {hour}.",
    "If the {thing} is damaged, tell {name} at once.",
    "Reference {number}.",
    "The first of our {small} boxes is for {name}.",
    "They march from {city} to {city} every year, rain or shine.",
    "This message was sent to {small} people.",
    "{name} has left the company.",
)

NAMES = (
    *("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Grace", "Hanna", "Ivo", "Jun", "Kofi", "Lena"),
    *("Marta", "Nils", "Olga", "Pavel", "Quinn", "Rosa", "Samir", "Tove", "Uma", "Viktor", "Wanda", "Yara", "Zoe"),
)
CITIES = (
    *("Accra", "Bergen", "Cork", "Dakar", "Essen", "Fez", "Ghent", "Hanoi", "Izmir", "Jaipur", "Kyoto", "Lima"),
    *("Malmo", "Nantes", "Oslo", "Porto", "Quito", "Riga", "Seville", "Turin", "Utrecht", "Vienna", "York", "Zagreb"),
)
THINGS = (
    *("lamp", "bicycle", "piano", "parcel", "desk", "kettle", "camera", "boat", "ladder", "printer", "guitar"),
    *("window", "carpet", "engine", "blue folder", "tent", "mirror", "sewing machine", "clock", "bookcase"),
)


def fill(pattern: str, rng: Random) -> str:
    """A sentence of `CARRIERS` or `FILLERS` with every slot but `{date}` filled."""
    pieces: list[str] = []
    for piece in pattern.replace("}", "{").split("{"):
        match piece:
            case "date":
                pieces.append("{date}")
            case "name":
                pieces.append(rng.choice(NAMES))
            case "city":
                pieces.append(rng.choice(CITIES))
            case "thing":
                pieces.append(rng.choice(THINGS))
            case "number":
                pieces.append(str(rng.randrange(100, 100_000)))
            case "small":
                pieces.append(str(rng.randrange(2, 100)))
            case "amount":
                pieces.append(f"{rng.choice(('EUR ', '$', 'USD '))}{rng.randrange(1, 2000)}.{rng.randrange(100):02d}")
            case "hour":
                pieces.append(f"{rng.randrange(24)}:{rng.randrange(60):02d}")
            case _:
                pieces.append(piece)
    return "".join(pieces)


def surround(spelled: str, target_chars: int, rng: Random) -> str:
    """`spelled` alone if it is about as long as the target, else in a carrier with fillers around it.

    The result is never longer than the target unless the spelled date, or its carrier, already is.
    """
    if target_chars < len(spelled) + 12:
        return spelled
    text = fill(rng.choice(CARRIERS), rng).replace("{date}", spelled)
    while True:
        filler = fill(rng.choice(FILLERS), rng)
        if len(text) + 1 + len(filler) > target_chars:
            return text
        text = f"{text} {filler}" if rng.random() < 0.5 else f"{filler} {text}"


# --- Examples -------------------------------------------------------------------------------------------------------


def is_held_out(spelled: str) -> bool:
    """Whether a spelled date belongs to evaluation; a checksum, so that both sides agree without a shared list."""
    return zlib.crc32(spelled.encode()) % HELD_OUT_SHARE == 0


def draw_example(rng: Random, *, held_out: bool, max_chars: int = MAX_TEXT_CHARS) -> Example:
    """One example of the wanted side; the target length is log-normal, cut at `max_chars`."""
    spellings = tuple(SPELLINGS)
    weights = None if held_out else tuple(SPELLINGS.values())
    span_days = (LAST_DATE - FIRST_DATE).days + 1
    while True:
        day = FIRST_DATE + timedelta(days=rng.randrange(span_days))
        (spelling,) = rng.choices(spellings, weights)
        spelled = spelling(day, rng)
        if is_held_out(spelled) == held_out:
            break
    target_chars = min(max_chars, round(rng.lognormvariate(log(MEDIAN_TEXT_CHARS), TEXT_CHARS_SIGMA)))
    return Example(surround(spelled, target_chars, rng), day.isoformat(), spelled)


def training_examples(seed: int, max_chars: int = MAX_TEXT_CHARS) -> Iterator[Example]:
    """An endless stream; streams of different `max_chars` are independent of each other."""
    rng = Random(f"train/{seed}/{max_chars}")
    while True:
        yield draw_example(rng, held_out=False, max_chars=max_chars)


def evaluation_examples(seed: int) -> Iterator[Example]:
    """An endless stream of examples with distinct texts; its first rows are the demo job's input."""
    rng = Random(f"evaluate/{seed}")
    seen: set[str] = set()
    while True:
        example = draw_example(rng, held_out=True)
        if example.text not in seen:
            seen.add(example.text)
            yield example
