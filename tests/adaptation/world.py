"""Small documents whose sentences have something in common, and files of their passages."""

import json
import random

SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
VERBS = ("measures", "compares", "stores", "returns", "lowers", "raises", "splits", "joins", "copies", "renames")
PLACES = ("chamber", "garden", "tunnel", "cellar", "harbour", "meadow", "station", "library", "bridge", "furnace")


def word(generator):
    return "".join(generator.choice(SYLLABLES) for _ in range(3))


def passage_rows(num_documents=60, per_document=5):
    """Rows of a file of passages, whose sentences share some of four rare words; the heading has one of them."""
    generator, rows = random.Random(0), []
    for _ in range(num_documents):
        topic = word(generator)
        for _ in range(per_document):
            names, sentences = [word(generator) for _ in range(4)], []
            for _ in range(5):
                first, second = generator.sample(names, 2)
                new = " ".join(word(generator) for _ in range(2))
                place, verb = generator.choice(PLACES), generator.choice(VERBS)
                sentences.append(f"The {first} {verb} the {second} of the {place} near {new}.")
            title = f"{topic.title()} > {names[0].title()} {word(generator)}"
            row = {"_id": f"p{len(rows):06d}", "title": title, "text": " ".join(sentences)}
            rows.append({**row, "file": f"folder/{topic}.md", "document": f"folder/{topic}.md", "position": 0})
    return rows


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
