"""Small documents whose sentences have something in common, and files of their passages."""

import json
import random

SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
VERBS = ("measures", "compares", "stores", "returns", "lowers", "raises", "splits", "joins", "copies", "renames")
PLACES = ("chamber", "garden", "tunnel", "cellar", "harbour", "meadow", "station", "library", "bridge", "furnace")


def word(generator, length=3):
    return "".join(generator.choice(SYLLABLES) for _ in range(length))


def passage_row(number, document, generator, topic, num_sentences=5):
    """A passage whose sentences share some of four rare words, under a heading with one of them and another word."""
    names = [word(generator) for _ in range(4)]
    sentences = []
    for _ in range(num_sentences):
        first, second = generator.sample(names, 2)
        new = " ".join(word(generator) for _ in range(2))
        place = generator.choice(PLACES)
        sentences.append(f"The {first} {generator.choice(VERBS)} the {second} of the {place} near {new}.")
    heading = f"{names[0].title()} {word(generator)}"
    title = f"{topic.title()} > {heading}"
    row = {"_id": f"p{number:06d}", "title": title, "text": " ".join(sentences), "file": document}
    return {**row, "document": document, "position": 0}


def passage_rows(num_documents=60, per_document=5, seed=0):
    """Rows of a file of passages."""
    generator, rows = random.Random(seed), []
    for _ in range(num_documents):
        topic = word(generator)
        for _ in range(per_document):
            rows.append(passage_row(len(rows), f"folder/{topic}.md", generator, topic))
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
