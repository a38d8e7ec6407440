"""Judgments are read in two layouts, and every mistake names its row."""

import pytest

from embeddings.common import InputError
from embeddings.evaluation.qrels import read_qrels

QUERIES, DOCUMENTS = {"q1", "q 2"}, {"d1", "d2"}
HEADER = "query-id\tcorpus-id\tscore\n"


def read(tmp_path, content):
    path = tmp_path / "qrels.tsv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_qrels(path, QUERIES, DOCUMENTS)


@pytest.mark.parametrize(
    "content",
    [
        HEADER + "q1\td1\t2\nq1\td2\t0\nq 2\td1\t1\n",
        "q1\td1\t2\nq1\td2\t0\nq 2\td1\t1",
        "q1\t0\td1\t2\nq1\t0\td2\t0\nq 2\t0\td1\t1\n",
        "\ufeff" + HEADER + "q1\td1\t2\r\nq1\td2\t0.0\r\n\r\nq 2\td1\t1\r\n",
        HEADER + "q1\td1\t2\nq1\td1\t2\nq1\td2\t0\nq 2\td1\t1\n",
    ],
    ids=["beir", "no header", "trec", "windows", "twice the same"],
)
def test_every_layout_gives_the_same_grades(content, tmp_path):
    assert read(tmp_path, content) == {"q1": {"d1": 2.0, "d2": 0.0}, "q 2": {"d1": 1.0}}


def test_spaces_separate_where_there_are_no_tabs(tmp_path):
    assert read(tmp_path, "q1 0 d1 3\n") == {"q1": {"d1": 3.0}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + "q1\td1\t1\nq9\td1\t1\n", r"qrels\.tsv:3: no query has the id 'q9'"),
        (HEADER + "q1\td9\t1\n", r"qrels\.tsv:2: no document has the id 'd9'"),
        (HEADER + "q1\td1\n", r"qrels\.tsv:2: has 2 columns; write query-id, corpus-id, score"),
        (HEADER + "q1\td1\tyes\n", r"qrels\.tsv:2: the score must be a number, got 'yes'"),
        (HEADER + "q1\td1\tnan\n", r"qrels\.tsv:2: the score must be a number, got 'nan'"),
        (HEADER + "q1\td1\t1\nq1\td1\t2\n", r"qrels\.tsv:3: 'q1' and 'd1' were judged 1 above, here 2"),
        (HEADER + "q1\td1\t0\nq1\td2\t-1\n", r"qrels\.tsv: no document is relevant to any query"),
        (HEADER, r"qrels\.tsv: holds no judgment"),
        ("", r"qrels\.tsv: holds no judgment"),
        (HEADER.encode() + b"q1\td\xff\t1\n", r"qrels\.tsv:2: is not valid UTF-8"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(content, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)
