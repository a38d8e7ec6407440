"""Examples in rounds: every item is asked once, and what was rejected again, until all are good or tries run out."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from embeddings.common.fileio import text_hash
from embeddings.synthesis.answers import Answer, Parsed, Reason, RejectedAnswer, parse_answer
from embeddings.synthesis.asker import Asker
from embeddings.synthesis.client import Request, make_request
from embeddings.synthesis.journal import Journal
from embeddings.synthesis.validate import Draft, normalised


@dataclass(frozen=True, slots=True)
class Item:
    """One record that is to be.

    Attributes:
        id: Its name, unique in the job.
        file: Name of the file that it goes to.
        prompt: What the model reads.
        read: The record in an answer's JSON; raises `RejectedAnswer`.
        is_unique: Whether its query must differ from those of earlier records of the same file.
    """

    id: str
    file: str
    prompt: str
    read: Callable[[Parsed], Draft]
    is_unique: bool = True

    def request(self, seed: int, attempt: int) -> Request:
        """The request of one attempt, a pure function of the item, the job's seed and the attempt's number."""
        return make_request(f"example/{self.id}/{attempt}", self.prompt, seed)

    def draft(self, answer: Answer) -> Draft:
        """The record in an answer.

        Raises:
            RejectedAnswer: If there is none that may go to the data.
        """
        return self.read(parse_answer(answer))


class Rejection(NamedTuple):
    """An answer that was rejected: whose, at which attempt, and why."""

    id: str
    attempt: int
    reason: Reason
    detail: str


@dataclass
class Outcome:
    """What became of the items.

    Attributes:
        attempts: The attempt whose answer was accepted, by the item's place among all.
        rejections: The answers rejected.
        repairs: Accepted answers that had to be repaired, by what was repaired.
        num_unasked: Items without any answer: the budget kept them from being asked.
    """

    attempts: dict[int, int] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    num_unasked: int = 0

    @property
    def reasons(self) -> Mapping[str, int]:
        """Rejected answers by reason."""
        return Counter(rejection.reason for rejection in self.rejections)


def run_rounds(
    items: Callable[[], Iterable[Item]],
    total: int,
    asker: Asker,
    journal: Journal,
    *,
    seed: int,
    max_attempts: int,
) -> Outcome:
    """Ask for all items, and again for those whose answer is rejected, up to `max_attempts` times each.

    A round is judged when all of its answers are there, in the order of the items. So what is accepted, copies of
    earlier queries included, follows from the answers alone, not from the order in which they came or from kills.

    Args:
        items: The items from the first, anew at each call and always the same.
        total: How many they are.
        asker: Asks.
        journal: Where its answers are.
        seed: Seed of the requests.
        max_attempts: Most answers for one item.

    Memory: a hash of each accepted query, and the rejections.

    Raises:
        InputError: As in `Asker.ask_all`.
        EndpointError: The same.
    """
    outcome, seen = Outcome(), set[tuple[str, int]]()
    for attempt in range(max_attempts):
        left = total - len(outcome.attempts)
        requests = (item.request(seed, attempt) for place, item in enumerate(items()) if place not in outcome.attempts)
        asker.ask_all(requests, left, "examples" if attempt == 0 else f"examples, attempt {attempt + 1}")
        for place, item in enumerate(items()):
            if place in outcome.attempts:
                continue
            answer = journal.get(item.request(seed, attempt).key)
            if answer is None:
                outcome.num_unasked += attempt == 0
                continue
            try:
                draft = item.draft(answer)
                key = (item.file, text_hash(normalised(draft.fields["query"])))
                if item.is_unique and key in seen:
                    raise RejectedAnswer("duplicate_query", draft.fields["query"])
            except RejectedAnswer as rejected:
                outcome.rejections.append(Rejection(item.id, attempt, rejected.reason, rejected.detail))
                continue
            seen.add(key)
            outcome.attempts[place] = attempt
            outcome.repairs.update(set(draft.repairs))
        if asker.exhausted or len(outcome.attempts) == total:
            break
    return outcome
