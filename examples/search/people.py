"""Writes people who never lived: a corpus, and questions that only it can answer.

    python examples/search/people.py    # people.jsonl, people_train.jsonl, people_held_out.jsonl beside it

For examples/search/learn.yaml. No model knows them by heart, and no question that is
trained on is about a person of the held-out questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_PEOPLE, NUM_HELD_OUT = 240, 40
FACTS = ("birthplace", "birth year", "job", "home", "pet")
FIRST = """
    Agnes Boris Clara Dario Edith Felix Greta Hugo Irene Jonas Karla Leon Mabel Nils Olga Pablo Ruth
    Simon Tilda Victor
""".split()
LAST = """
    Archer Bishop Carver Draper Fisher Glover Hunter Keller Lowell Mercer Norton Palmer Quincy
    Ramsey Sutton Thatcher
""".split()
TOWNS = """
    Bergen Cadiz Delft Evora Florence Ghent Hamburg Innsbruck Jena Krakow Lyon Malmo Nantes Odessa
    Porto Riga Split Turin Utrecht Verona
""".split()
JOBS = """
    baker carpenter dentist farmer gardener judge lawyer miner nurse painter pilot plumber sailor
    singer tailor teacher
""".split()
PETS = """
    cat crow dog donkey duck ferret goat goose horse mouse parrot pig rabbit sheep snake turtle
""".split()


def main() -> None:
    """Draw the people, and write the three files."""
    draw = random.Random(0)
    names = draw.sample(
        [f"{first} {last}" for first, last in product(FIRST, LAST)], NUM_PEOPLE
    )
    people = [a_person(name, draw) for name in names]
    write("people", (passage for who in people for passage in passages_of(who)))
    write(
        "people_held_out",
        (row for who in people[:NUM_HELD_OUT] for row in questions_about(who)),
    )
    write(
        "people_train",
        (row for who in people[NUM_HELD_OUT:] for row in questions_about(who)),
    )


def a_person(name: str, draw: random.Random) -> dict[str, str]:
    """Born in one town and living in another."""
    birthplace, home = draw.sample(TOWNS, 2)
    year, job, pet = (
        str(draw.randrange(1900, 1990)),
        draw.choice(JOBS),
        draw.choice(PETS),
    )
    return {
        "name": name,
        "birthplace": birthplace,
        "birth year": year,
        "home": home,
        "job": job,
        "pet": pet,
    }


def passages_of(who: dict[str, str]) -> list[dict[str, str]]:
    """One for each fact, so that the name alone does not find it."""
    return [
        {"title": f"The {fact} of {who['name']}", "text": f"{who[fact]}."}
        for fact in FACTS
    ]


def questions_about(who: dict[str, str]) -> list[dict[str, Any]]:
    """One for each fact."""
    return [
        {"prompt": f"What is the {fact} of {who['name']}?", "answer": [who[fact]]}
        for fact in FACTS
    ]


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """As JSON lines."""
    lines = [json.dumps(row) for row in rows]
    (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
