"""Queries that a language model writes for passages: one line a request, after examples or for a kind of search."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import regex

from embeddings.adaptation.candidates import (
    KINDS,
    LEAST_REST,
    Candidate,
    Passage,
    WordStatistics,
    key_of,
    read_passages,
)
from embeddings.adaptation.sentences import is_question, num_words, plain, sentences
from embeddings.common.errors import require_minimum
from embeddings.common.io import text_hash
from embeddings.common.random import derive_seed
from embeddings.common.text import printable, shorten
from embeddings.synthesis.client import ChatClient, Limits, Request, Sampling, check_endpoint, find_model, make_request
from embeddings.synthesis.generate import open_job
from embeddings.synthesis.prompts import NV_EMBED
from embeddings.synthesis.runner import described, unusable_error
from embeddings.synthesis.validate import Answer, RejectedAnswer, normalised, read_tasks

Form = Literal["line", "tasks"]
KIND = "model"
MAX_REQUESTS = 2_000
MAX_ANSWER_TOKENS, TEMPERATURE = 32, 0.7
INSTRUCTION = (
    "Write one line: a short search query that this passage answers, in the language of the passage, without copying "
    "its title or its sentences."
)
# The two steps of NV-Embed's synthesis (arXiv:2405.17428, section 4.3, Tables 15 and 16), for given passages.
TASKS_INSTRUCTION = (
    "These passages are from one collection. Think up kinds of search that people make in such a collection.\n\n"
    "Keep to these rules:\n- A kind is one sentence, such as: Given a fault, find the steps that mend it.\n"
    "- A kind leaves room for many queries, and no two are alike.\n\n"
    "Answer with a JSON list of about {num_tasks} strings, one string a kind. Write nothing before or after the list."
)
TASK_INSTRUCTION = (
    "Kind of search: {task}\n\nWrite one line: a query of this kind, as far as the passage allows, which the passage "
    "answers. The query is {query_type}, has {query_length}, is {clarity}, and takes {difficulty} education to "
    "understand. Write it in the language of the passage, without copying its title or its sentences."
)
_PLACEHOLDERS = NV_EMBED.category("short_long").placeholders
# Lists of kinds of search, passages that each is for, and the maximum tokens of its answer and of a query then. Their
# numbers do not depend on the number of requests, so that more requests do not change the earlier ones.
_NUM_LISTS, _LIST_PASSAGES, _LIST_TOKENS, _TASK_QUERY_TOKENS = 5, 10, 2_048, 64
# Examples of a request, those of a kind from which they are chosen, and the most words of an example's query.
NUM_EXAMPLES, _POOL, _MOST_WORDS = 4, 64, 15
# Characters of an example's passage and of the passage itself in a prompt.
_EXAMPLE_CHARACTERS, _PASSAGE_CHARACTERS = 300, 1_500
# A shorter query may occur in the examples by chance, and fewer words twice in a query.
_LEAST_ECHO = _LEAST_REPEAT = 4


@dataclass(frozen=True)
class QueryModel:
    """A language model that writes queries for training passages, one line a request.

    Args:
        endpoint: Base URL of a server with OpenAI's chat protocol, such as `http://localhost:8000/v1`.
        model: The model's name at the endpoint; None for the only one that it lists.
        max_requests: Maximum passages that the model is asked about; a random sample of this size.
        stream: Whether answers come in parts; False for a server that cannot.
        form: `line` shows examples of the documents' own queries, for models of any size. `tasks` is for strong models:
            first kinds of search in these documents, then a query of a random kind, length, clarity and difficulty.
    """

    endpoint: str
    model: str | None = None
    max_requests: int = MAX_REQUESTS
    stream: bool = True
    form: Form = "line"

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint)
        require_minimum("max_requests", self.max_requests, 1, "leave it out for 2,000")

    @property
    def fields(self) -> dict[str, Any]:
        """What determines the queries, for a manifest. The address may contain a password."""
        return {
            "endpoint": text_hash(self.endpoint),
            "model": self.model,
            "max_requests": self.max_requests,
            "form": self.form,
        }

    def found(self) -> "QueryModel":
        """The same with the model's name; an `InputError` if nothing answers at the endpoint."""
        return replace(self, model=find_model(self.endpoint, self.model))


def written_queries(
    path: Path,
    output: Path,
    model: QueryModel,
    offered: Sequence[Candidate],
    is_held_out: Callable[[str], bool],
    statistics: WordStatistics,
    seed: int,
) -> tuple[list[Candidate], list[str], str]:
    """The usable queries that a model writes for passages, why others are rejected, and a line for the user.

    The model has its name. Each query is good by itself (`WordStatistics.fault`). Examples are chosen of `offered`, the
    queries that passages which are not held out offer by themselves. The answers are saved beside the output, in
    `OUTPUT.work`, in a folder of each model; a request that has one is not sent again.
    """
    assert model.model is not None
    has_tasks = model.form == "tasks"
    max_tokens = _TASK_QUERY_TOKENS if has_tasks else MAX_ANSWER_TOKENS
    sampling = Sampling(model.model, TEMPERATURE, max_tokens, extra_body={"stop": ["\n"]}, stream=model.stream)
    folder = answer_folder(output, sampling)
    passages = _chosen(path, is_held_out, max(model.max_requests, _NUM_LISTS * _LIST_PASSAGES), seed)
    tasks, num_tokens = _brainstormed(passages, output, model, seed) if has_tasks else ([], 0)
    passages, examples = passages[: model.max_requests], Examples(() if has_tasks else offered, seed)
    requests = [_request(each, examples, tasks, statistics, seed) for each in passages]
    candidates, causes, more_tokens = _answered(folder, model, sampling, requests, "queries")
    num_tokens += more_tokens
    kinds = f" by {len(tasks)} kinds of search" if has_tasks else ""
    asked = f"{sampling.model}: {len(requests)} passages asked about{kinds}, {num_tokens} tokens"
    note = f"{asked}; the answers are in {folder.parent.name}, and its queries are for training only"
    return candidates, causes, note


def _answered(
    folder: Path, model: QueryModel, sampling: Sampling, requests: Sequence[Request], title: str
) -> tuple[list[Any], list[str], int]:
    """What usable answers say, why others are rejected, and the tokens of all; an `InputError` if all are unusable."""
    found, causes, shown = list[Any](), list[str](), list[str]()
    client = ChatClient(model.endpoint, sampling, Limits(max_attempts=1))
    with open_job(folder, {"kind": "model queries"}, {}, client) as job:
        hint = f"name a stronger model, or leave out --endpoint (the answers are in {folder})"
        job.runner.hint = hint
        job.runner.run(lambda: enumerate(requests), len(requests), title)
        answers = [job.runner.journal.get(request.key) for request in requests]
    num_tokens = 0
    for request, answer in zip(requests, answers, strict=True):
        assert answer is not None
        num_tokens += (answer.prompt_tokens or 0) + (answer.completion_tokens or 0)
        try:
            found.append(request.read(request.parse(answer)))
        except RejectedAnswer as error:
            causes.append(error.cause)
            shown.append(described(error.cause, answer.content or error.detail))
    if causes and not found:
        raise unusable_error(sampling, f"all {len(causes)}", shown, hint)
    return found, causes, num_tokens


def _brainstormed(passages: Sequence[Passage], output: Path, model: QueryModel, seed: int) -> tuple[list[str], int]:
    """The different kinds of search that a model thinks up for lists of passages, and the tokens that they took."""
    assert model.model is not None
    sampling = Sampling(model.model, 1.0, _LIST_TOKENS, stream=model.stream)
    instruction, requests = TASKS_INSTRUCTION.format(num_tasks=NV_EMBED.tasks_per_list // 2), list[Request]()
    for number in range(_NUM_LISTS):
        if own := passages[number : _NUM_LISTS * _LIST_PASSAGES : _NUM_LISTS]:
            texts = (shorten(f"{each.title}\n{each.text}", _EXAMPLE_CHARACTERS) for each in own)
            prompt = "\n\n".join([*(f"Passage: {text}" for text in texts), instruction])
            requests.append(make_request(f"tasks/{number}", prompt, seed, read_tasks))
    lists, _, num_tokens = _answered(answer_folder(output, sampling), model, sampling, requests, "kinds of search")
    tasks = dict[str, str]()
    for task in chain.from_iterable(lists):
        tasks.setdefault(normalised(task), task)
    return [*tasks.values()], num_tokens


def answer_folder(output: Path, sampling: Sampling) -> Path:
    """The folder of the answers that a model gives for an output."""
    path = output.expanduser().resolve()
    name = regex.sub(r"[^\w.-]+", "-", sampling.model)[-60:].lstrip(".-")
    return path.with_name(f"{path.name}.work") / f"{name}-{text_hash(repr(sampling.fields)) % 2**32:08x}"


def _chosen(path: Path, is_held_out: Callable[[str], bool], limit: int, seed: int) -> list[Passage]:
    """A random sample of the passages that are long enough; a larger one contains a smaller one."""
    passages = read_passages(path, "choosing from")
    asked = (each for each in passages if not is_held_out(each.document) and num_words(each.text) >= LEAST_REST)
    return heapq.nsmallest(limit, asked, key=lambda passage: derive_seed(seed, KIND, passage.id))


# Short words, most of them function words, and the characters of scripts without spaces tell languages apart.
_SHORT = regex.compile(r"\b\p{L}{1,3}\b|[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")


def _short_words(text: str) -> set[str]:
    return set(_SHORT.findall(text.casefold()))


class Examples:
    """Queries that passages offer, of which the prompts show those most like the passage in their language."""

    def __init__(self, offered: Sequence[Candidate], seed: int) -> None:
        short = [each for each in offered if num_words(each.query) <= _MOST_WORDS]
        self._pool: list[tuple[set[str], Candidate]] = []
        for kind in KINDS:
            of_kind = (each for each in short if each.kind == kind)
            drawn = heapq.nsmallest(
                _POOL, of_kind, key=lambda each: derive_seed(seed, "example", each.passage, each.query)
            )
            self._pool += [(_short_words(each.text), each) for each in drawn]

    def of(self, passage: Passage) -> list[Candidate]:
        """At most four examples of other passages, of different kinds where they are as alike; the best is last."""
        own = _short_words(passage.text)
        likeness = [
            (2 * len(own & other) / max(1, len(own) + len(other)), each)
            for other, each in self._pool
            if each.passage != passage.id
        ]
        likeness.sort(key=lambda item: -item[0])
        alike = [each for score, each in likeness if score >= likeness[0][0] / 2]
        first: dict[str, Candidate] = {}
        for each in alike:
            first.setdefault(each.kind, each)
        others = [each for each in alike if each is not first[each.kind]]
        return [*first.values(), *others][:NUM_EXAMPLES][::-1]


def prompt_of(text: str, instruction: str = INSTRUCTION) -> str:
    return f"Passage: {text}\n\n{instruction}"


def _request(
    passage: Passage, examples: Examples, tasks: Sequence[str], statistics: WordStatistics, seed: int
) -> Request:
    """A request for a query of one of the `tasks` if there are any."""
    instruction, chosen = INSTRUCTION, examples.of(passage)
    if tasks:
        choices = {"task": tasks, **_PLACEHOLDERS}
        drawn = {name: each[derive_seed(seed, name, passage.id) % len(each)] for name, each in choices.items()}
        instruction = TASK_INSTRUCTION.format(**drawn)
    read = partial(read_query, passage=passage, instruction=instruction, examples=chosen, statistics=statistics)
    # As an earlier conversation: chat models of any size then answer in the same form.
    shown = [(prompt_of(shorten(each.positive, _EXAMPLE_CHARACTERS)), each.query) for each in chosen]
    prompt = prompt_of(shorten(f"{passage.title}\n{passage.text}", _PASSAGE_CHARACTERS), instruction)
    return make_request(f"query/{passage.id}", prompt, seed, read, parse=read_line, examples=shown)


_WORD = regex.compile(r"\w+")
_REFUSAL = regex.compile(
    r"(?:i['’]?m|i am|we['’]re|we are) (?:very |so |really )?sorry\b|sorry[,.!]|i apologi[sz]e\b|my apologies\b"
    r"|as an? (?:ai|artificial intelligence|(?:large )?language model)\b|i['’]?m (?:just |only )?an ai\b"
    r"|(?:i|we) (?:can ?not|can['’]t|am not able to|am unable to|won['’]t|will not|do not|don['’]t) "
    r"(?:help|assist|provide|generate|create|answer|fulfil|comply|write|do that|give|have (?:enough|access|any))"
    r"|es tut mir leid\b|lo siento\b|(?:je suis )?désolée?\b|mi dispiace\b|(?:sinto muito|desculpe)\b|извините\b"
    r"|к сожалению\b|抱歉|对不起|很抱歉|申し訳|죄송",
    regex.IGNORECASE,
)
_LABEL = regex.compile(
    r"(?:(?:sure|okay|ok|certainly|here|is|are|['’]s|a|an|one|the|possible|good|short|suitable|search|user|example"
    r"|line)[\s,.!]+|here['’]s\s+)*(?:query|question|q|answer)\s*\d*\s*[:：]\s*",
    regex.IGNORECASE,
)
_NUMBERING = regex.compile(r"(?:\(?\d{1,2}\s*[.):]|[-*•#>]+)\s+")
_QUOTES = frozenset(('""', "''", "“”", "„“", "„”", "‘’", "«»", "»«", "「」", "『』", "``", "**", "__"))


def cleaned(line: str) -> str:
    """A line of an answer without numbering, a label such as "Query:", markup, and quotes around it."""
    query, before = plain(line), None
    while query != before:
        before = query
        for pattern in (_NUMBERING, _LABEL):
            match = pattern.match(query)
            query = query[match.end() :] if match else query
        if len(query) > 1 and query[0] + query[-1] in _QUOTES:
            query = query[1:-1].strip()
    return query


def read_line(answer: Answer) -> str:
    """The first line of an answer with a query, cleaned; `RejectedAnswer` for a refusal or a line that is cut off."""
    if answer.refused is not None or answer.finish_reason == "content_filter":
        raise RejectedAnswer("refused", answer.refused or "the endpoint's filter")
    found = ((line, cleaned(line)) for line in (answer.content or "").splitlines(keepends=True))
    line, query = next(((line, query) for line, query in found if query), ("", ""))
    if not query:
        raise RejectedAnswer("empty_answer")
    if _REFUSAL.match(query):
        raise RejectedAnswer("refused", query)
    if answer.finish_reason == "length" and line == line.rstrip("\r\n"):
        raise RejectedAnswer("cut_off", query)
    if printable(query) != query:
        raise RejectedAnswer("unusable_text", query)
    return query


def read_query(
    query: str,
    passage: Passage,
    examples: Sequence[Candidate],
    statistics: WordStatistics,
    instruction: str = INSTRUCTION,
) -> Candidate:
    """A query as a candidate; `RejectedAnswer` for an echo of the prompt and for a poor query (the detail says why)."""
    key, known = key_of(query), [key_of(each.query) for each in examples]
    shown = key_of(" ".join([instruction, *(each.positive for each in examples)]))
    is_shown = num_words(query) >= _LEAST_ECHO and any(key in text for text in (shown, *known))
    # A copy of the passage is rejected as such.
    is_shown = is_shown and key not in key_of(f"{passage.title} {passage.text}")
    opening = key_of(instruction)[:40]
    if key in known or is_shown or opening in key or key.startswith("passage:"):
        raise RejectedAnswer("echoed_prompt", query)
    candidate = passage.candidate(query, KIND)
    if fault := statistics.fault(candidate, passage) or _form_fault(query):
        raise RejectedAnswer("poor_query", fault)
    return candidate


def _form_fault(query: str) -> str | None:
    """Why a text is no query by its form, as answers of weak models often are not, or None."""
    parts = sentences(query)
    if len(parts) > 1 and not is_question(query[parts[-1].start : parts[-1].stop]):
        return "several sentences"
    tokens = _WORD.findall(key_of(query))
    runs = [tuple(tokens[start : start + _LEAST_REPEAT]) for start in range(len(tokens) - _LEAST_REPEAT + 1)]
    return "repeats itself" if len(set(runs)) < len(runs) else None
