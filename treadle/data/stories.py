"""The embedded demo corpus: short stories in English and Spanish, written by a small grammar.

A story is one of fifteen plots (somebody wants something, meets an obstacle, gets help, and all
ends well) whose sentences, characters, places and things are drawn at random. Thousands of stories
share a few hundred words and no two are equal, so that a small model learns the language quickly,
and has to generalise to do so. Heroes and friends have names of their own: that makes it much
easier for the model to keep track of who is who.

The notation of the prose below:

    [this|that]   one of the alternatives, each equally likely; they may nest and may be empty
    <macro>       the text of that name, shared between plots
    {pool}        a word of that pool, the same one through a whole story; {pool1}, {pool2} and so
                  on are different words of it
    {role.form}   a form of such a word, or of a character: h is the hero, f the friend, m somebody
                  else, g hero and friend together; {h.He} begins with a capital letter
    {pool:role}   the form f of the word if the role is feminine, as in {color:toy}

A pool is written "name/form/form": "word/form/form; word/form/form; ...". A form named g is the
gender of a noun (mf: either), tags are what an animal can do; both bring the forms of their label.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from treadle.data import stories_en, stories_es
from treadle.errors import ConfigError

MIN_WORDS, MAX_WORDS = 60, 140

T = TypeVar("T")
Forms = dict[str, str]


def generate_stories(language: str, n_stories: int, seed: int = 0) -> str:
    """Return `n_stories` different stories, separated by blank lines and ending in a newline.

    The text depends on the arguments alone, on every machine and Python version, and a smaller
    `n_stories` gives the beginning of the same text. `language` is a key of LANGUAGES, "en" or
    "es". A story is one line of MIN_WORDS to MAX_WORDS words, about 550 characters.

    Raises ConfigError for another language or a negative number.
    """
    if language not in LANGUAGES:
        known = " or ".join(LANGUAGES)
        raise ConfigError(f"[stories] expected the language {known}, got {language!r}; choose one")
    if n_stories < 0:
        raise ConfigError(f"[stories] expected n_stories of 0 or more, got {n_stories}; raise it")
    rng = random.Random(seed)
    seen: dict[str, None] = {}
    while len(seen) < n_stories:
        plot = _pick(_plots(language), rng)
        pieces = _render(plot.text, _cast(language, plot, rng), rng)
        words = "".join(pieces).split()
        if MIN_WORDS <= len(words) <= MAX_WORDS:
            seen.setdefault(" ".join(words))
    return "\n\n".join(seen) + "\n" if seen else ""


# ---- The grammar -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Language:
    """The words and plots of a language, in the notation above."""

    labels: dict[str, Forms]  # what a gender or a tag brings: pronouns, articles, endings, verbs
    names: dict[str, dict[str, str]]  # by role and gender
    pools: dict[str, str]
    macros: dict[str, str]
    plots: tuple[tuple[str, str, str], ...]  # tags wanted of the hero and of the friend; text


@dataclass(frozen=True)
class _Slot:
    role: str
    form: str
    agrees_with: str
    capital: bool


@dataclass(frozen=True)
class _Plot:
    people: dict[str, list[Forms]]  # the animals that each role may be
    words: list[str]  # the other roles
    text: _Text


_Text = tuple["str | _Slot | tuple[_Text, ...]", ...]
_TOKEN = re.compile(r"\{(\w+)\.?(\w*):?(\w*)\}|[\[|\]]|[^\[|\]{]+")


def _pick(options: Sequence[T], rng: random.Random) -> T:
    # Only random() is promised to give the same numbers in every version of Python.
    return options[int(rng.random() * len(options))]


def _cast(language: str, plot: _Plot, rng: random.Random) -> dict[str, Forms]:
    """Draw who and what the roles of a plot are; no animal or word is taken twice."""
    grammar = LANGUAGES[language]
    cast: dict[str, Forms] = {}
    for role, animals in plot.people.items():
        animal = _pick([a for a in animals if all(a[""] != p["kind"] for p in cast.values())], rng)
        gender = _pick(animal["g"], rng)
        person = {"kind": animal[""], "g": gender}
        if role in grammar.names:
            person[""] = _pick(grammar.names[role][gender].split(), rng)
        cast[role] = animal | grammar.labels[gender] | person
    together = "m" if "m" in (cast["h"]["g"], cast["f"]["g"]) else "f"
    for role in plot.words:
        used = [forms for other, forms in cast.items() if _pool(other) == _pool(role)]
        cast[role] = _pick([w for w in _words(language, _pool(role)) if w not in used], rng)
    return cast | {"g": grammar.labels[together]}


def _pool(role: str) -> str:
    return role.rstrip("123")


def _render(text: _Text, cast: dict[str, Forms], rng: random.Random) -> Iterator[str]:
    for part in text:
        if isinstance(part, str):
            yield part
        elif isinstance(part, _Slot):
            feminine = part.agrees_with and cast[part.agrees_with]["g"] == "f"
            word = cast[part.role]["f" if feminine else part.form]
            yield word[0].upper() + word[1:] if part.capital else word
        else:
            yield from _render(_pick(part, rng), cast, rng)


@cache
def _words(language: str, pool: str) -> list[Forms]:
    grammar = LANGUAGES[language]
    key = next(key for key in grammar.pools if key.split("/")[0] == pool)
    words = []
    for row in " ".join(grammar.pools[key].split()).split("; "):
        word, *values = row.split("/")
        forms = {"": word, "a": ("an " if word[0] in "aeiou" else "a ") + word}
        forms |= dict(zip(key.split("/")[1:], values, strict=True))
        for label in (forms.get("g", ""), *forms.get("tags", "").split()):
            forms |= grammar.labels.get(label, {})
        words.append(forms)
    return words


@cache
def _plots(language: str) -> list[_Plot]:
    grammar = LANGUAGES[language]
    plots = []
    for hero, friend, source in grammar.plots:
        while "<" in source:
            source = re.sub(r"<(\w+)>", lambda macro: grammar.macros[macro[1]], source)
        roles = dict.fromkeys(match[1].lower() for match in _TOKEN.finditer(source) if match[1])
        wanted = {"h": hero, "f": friend} | ({"m": ""} if "m" in roles else {})
        people = {role: _animals(language, tags.split()) for role, tags in wanted.items()}
        words = [role for role in roles if role not in people and role != "g"]
        plots.append(_Plot(people, words, _parse(source)))
    return plots


def _animals(language: str, wanted: list[str]) -> list[Forms]:
    """The animals with one of the tags wanted, if any, and none of those that begin with !"""
    able = {tag for tag in wanted if tag[0] != "!"}
    unable = {tag[1:] for tag in wanted if tag[0] == "!"}
    tags = [(animal, set(animal["tags"].split())) for animal in _words(language, "animal")]
    return [animal for animal, own in tags if not own & unable and (not able or own & able)]


def _parse(source: str) -> _Text:
    """Turn brackets into tuples of alternatives and braces into slots."""
    stack: list[list[list[str | _Slot | tuple[_Text, ...]]]] = [[[]]]
    for match in _TOKEN.finditer(source):
        if match[1]:
            role, form = match[1], match[2]
            capital = (form or role)[0].isupper()
            slot = _Slot(role.lower(), form.lower(), match[3], capital)
            stack[-1][-1].append(slot)
        elif match[0] == "[":
            stack.append([[]])
        elif match[0] == "|":
            stack[-1].append([])
        elif match[0] == "]":
            options = tuple(tuple(option) for option in stack.pop())
            stack[-1][-1].append(options)
        else:
            stack[-1][-1].append(match[0])
    return tuple(stack[0][0])


LANGUAGES = {
    prose.LANGUAGE: Language(prose.LABELS, prose.NAMES, prose.POOLS, prose.MACROS, prose.PLOTS)
    for prose in (stories_en, stories_es)
}
