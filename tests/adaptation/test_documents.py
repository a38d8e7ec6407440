"""Files as documents: what is found in a folder, encodings, kinds of files, and files that cannot be read."""

import json
import os
import zipfile
from io import BytesIO

import pytest

from embeddings.adaptation import documents
from embeddings.adaptation.documents import FoundFile, LeftOut, Read, decode, find_files, read_file
from tests.data.rows import write_jsonl, write_rows


def read(path, columns=None):
    return list(read_file(FoundFile(path.name, path, path.stat().st_size), columns or {}))


def text_of(path):
    (found,) = read(path)
    assert isinstance(found, Read), found
    return found.document.text


def cause_of(path):
    (found,) = read(path)
    assert isinstance(found, LeftOut), found
    return found.cause


def test_files_are_found_in_order_and_junk_is_counted(tmp_path):
    for name in ("b/z.md", "b/a.md", "a.txt", ".git/config", "b/node_modules/x.js", ".env", "c.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (tmp_path / "lost.md").symlink_to(tmp_path / "nowhere.md")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.md")
    found, left_out = find_files(tmp_path, [tmp_path / "c.jsonl"])
    assert [file.name for file in found] == ["a.txt", "b/a.md", "b/z.md"]
    assert {(each.file, each.cause) for each in left_out} == {
        (".env", "hidden file"),
        (".git", "folder of generated or hidden files"),
        ("b/node_modules", "folder of generated or hidden files"),
        ("loop", "link to a folder"),
        ("lost.md", "not a file"),
        ("pipe.md", "not a file"),
    }


GERMAN = "Die Straße führt über den Fluß nach Köln. Für größere Mengen gelten höhere Gebühren.\n"
RUSSIAN = "Индекс строится по векторам документов. Запрос кодируется той же моделью.\n"
JAPANESE = "索引は文書のベクトルから作られる。検索は同じモデルで符号化する。\n"
HEBREW = "האינדקס נבנה מהווקטורים של המסמכים.\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *((text, encoding) for text in (GERMAN, RUSSIAN, HEBREW) for encoding in ("utf-8", "utf-8-sig", "utf-16")),
        (GERMAN, "latin-1"),
        (GERMAN, "utf-16-le"),
        (GERMAN, "utf-32"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8-r"),
        (JAPANESE, "shift_jis"),
        ("Les documents sont encodés ; où est passé l'élève ? Ça dépend du café.\n", "cp1252"),
        ("索引由文档的向量构建。查询用同一个模型编码。\n", "gb18030"),
        ("색인은 문서 벡터로 만들어진다. 질의는 같은 모델로 부호화된다.\n", "cp949"),
    ],
)
def test_encodings_are_recognised(text, encoding):
    assert decode(text.encode(encoding)) == text
    assert decode((20 * text).replace("\n", "\r\n").encode(encoding)) == 20 * text


def test_a_damaged_byte_does_not_change_the_encoding_of_utf8():
    data = bytearray((RUSSIAN * 5).encode())
    data[100] = 0xFF
    assert decode(bytes(data)).count("\ufffd") in (1, 2)
    assert decode(bytes(data)).endswith("моделью.\n")
    # Also of a text with few other letters than ASCII.
    data = "“Open the café’s door”, it says.".encode() + b" \xff"
    assert decode(data).startswith("“Open the café’s door”")


def test_a_declared_encoding_is_used():
    text = '<meta charset="iso-8859-2"><p>Żółć gęślą jaźń</p>'
    assert decode(text.encode("iso-8859-2")) == text


@pytest.mark.parametrize(
    ("name", "data", "cause"),
    [
        ("image.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 9, "binary"),
        ("program", b"\x7fELF\2\1\1\0" + b"\0" * 99, "binary"),
        ("noise.md", bytes(range(1, 256)) * 40, "binary"),
        ("nothing.md", b"", "empty"),
        ("blank.txt", b" \n\n ", "empty"),
        ("only.md", b"# A heading\n", "without text"),
        ("data.json", b"{}", "kind of file that is not read (.json)"),
        ("app.min.js", b"function(){return 1};" * 400, "minified or generated code"),
        ("broken.epub", b"PK\3\4 not a zip", "damaged"),
        ("broken.ipynb", b'{"cells": 3}', "damaged"),
        ("table.parquet", b"text", "damaged"),
        ("empty.csv", b"", "damaged"),
    ],
)
def test_files_without_text_have_a_cause(tmp_path, name, data, cause):
    (tmp_path / name).write_bytes(data)
    assert cause_of(tmp_path / name).startswith(cause)


def test_a_large_file_is_left_out_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "large.txt").write_text("word " * (1 << 18))
    assert cause_of(tmp_path / "large.txt") == "larger than 1 MiB"


def test_a_file_without_permission_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("text")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    (found,) = read(tmp_path / "a.md")
    assert found == LeftOut("a.md", "cannot be opened", "Permission denied")


def test_text_in_files_of_unknown_kind_is_read(tmp_path):
    for name in ("README", "notes.xyz", "a.md.bak"):
        (tmp_path / name).write_text("some words")
        assert text_of(tmp_path / name) == "some words"


def test_text_with_directives_is_restructured_text(tmp_path):
    path = tmp_path / "topics.txt"
    text = ".. module:: shop\n\nModels\n======\n\nA *model* is a class.\n\n.. note::\n\n    Each is one table.\n"
    path.write_text(f"{text}\n.. versionadded:: 1.2\n")
    assert text_of(path) == "Models\n\nA model is a class.\n\nEach is one table.\n\n1.2"
    # Substitutions are the tables of a program, and no text.
    path.write_text("".join(f".. |{name}|   unicode:: U+003BA .. GREEK SMALL LETTER KAPPA\n" for name in "abcd"))
    assert cause_of(path) == "without text"
    path.write_text("One, two .. three. See std::move. In C++:\n\n.. a note\n")
    assert text_of(path).startswith("One, two .. three.")


ROWS = [
    {"_id": "x", "title": "First  title", "text": "one\r\ntwo"},
    {"id": 7, "text": "three"},
    {"title": "no text", "text": None},
    {"text": "four"},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_rows_of_tables_are_documents(tmp_path, name):
    write_rows(tmp_path / name, [{"_id": None, "id": None, "title": None, **row} for row in ROWS])
    *found, left_out = read(tmp_path / name)
    texts = [(each.document.text, *(block.trail for block in each.document.blocks)) for each in found]
    assert texts == [("one\ntwo", ("First title",)), ("three", ()), ("four", ())]
    assert left_out == LeftOut(name, "rows without text", "1 of 4 rows")
    assert [each.name for each in found] == ["x", "7", f"{name}#4"]


def test_whole_numbers_that_a_missing_one_made_floats_are_ids(tmp_path):
    write_rows(tmp_path / "rows.parquet", [{"_id": 7.0, "text": "one"}, {"_id": None, "text": "two"}])
    assert [each.name for each in read(tmp_path / "rows.parquet")] == ["7", "rows.parquet#2"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
def test_a_table_of_a_spreadsheet_is_read_in_its_encoding(tmp_path, encoding):
    lines = ["_id;title;text", *(f'{row};"Köln; {row}";"{GERMAN.strip()}"' for row in range(3))]
    (tmp_path / "table.csv").write_bytes("\r\n".join(lines).encode(encoding))
    found = read(tmp_path / "table.csv")
    assert [(each.name, each.document.text) for each in found] == [(str(row), GERMAN.strip()) for row in range(3)]
    assert {each.document.blocks[0].trail for each in found} == {(f"Köln; {row}",) for row in range(3)}


def test_a_damaged_byte_of_a_table_costs_one_letter(tmp_path):
    table = f"text\n{GERMAN}{GERMAN}".encode().replace("ü".encode(), b"\xc3", 1)
    (tmp_path / "table.csv").write_bytes(table)
    first, second = (each.document.text for each in read(tmp_path / "table.csv"))
    assert first.count("\ufffd") == 1
    assert second == GERMAN.strip()


def test_columns_of_a_csv_are_named(tmp_path):
    (tmp_path / "faq.csv").write_text('nr;question;answer\n1;"What?";"This; that"\n', encoding="utf-8")
    (found,) = read(tmp_path / "faq.csv", {"_id": "nr", "title": "question", "text": "answer"})
    assert (found.name, found.document.text, found.document.blocks[0].trail) == ("1", "This; that", ("What?",))
    (left_out,) = read(tmp_path / "faq.csv")
    assert left_out.cause == "without a column 'text'"
    assert "found: nr, question, answer; name it with --columns" in left_out.detail


def test_a_row_of_json_without_the_field_is_a_row_without_text(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"_id": "a"}, {"_id": "b", "text": "one"}, {"_id": "c"}, {"text": "two"}])
    *found, left_out = read(tmp_path / "rows.jsonl")
    assert [each.document.text for each in found] == ["one", "two"]
    assert left_out == LeftOut("rows.jsonl", "rows without text", "2 of 4 rows", 2)


def test_a_named_column_that_a_table_lacks_is_reported_and_its_rows_are_read(tmp_path):
    path = write_jsonl(tmp_path / "faq.jsonl", [{"text": "It is one."}, {"text": "It is two.", "name": "Two"}])
    assert [type(each) for each in read(path, {"title": "name"})] == [Read, Read]
    *rows, missing = read(path, {"title": "nam"})
    assert [row.document.text for row in rows] == ["It is one.", "It is two."]
    assert missing == LeftOut("faq.jsonl", "without a column 'nam'", "its rows are read; found: text, name")


def test_a_damaged_row_ends_a_table_but_not_what_was_read(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"text {row}"} for row in range(3)])
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"text": "cut o')
    *found, left_out = read(tmp_path / "rows.jsonl")
    assert [each.document.text for each in found] == ["text 0", "text 1", "text 2"]
    assert left_out.cause == "damaged"
    assert "rows.jsonl:4: the file ends in the middle of this row" in left_out.detail
    assert left_out.detail.endswith("rows from here on are left out")


def test_a_notebook_is_its_markdown_and_code(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Plot\n", "\n", "A *curve*."]},
        {"cell_type": "code", "source": ["x = 1\n", "# no heading"], "outputs": [{"text": "secret"}]},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert text_of(tmp_path / "a.ipynb") == "Plot\n\nA curve.\n\nx = 1\n# no heading"


def test_an_epub_is_its_chapters_in_order(tmp_path):
    with zipfile.ZipFile(tmp_path / "book.epub", "w") as book:
        book.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:c"><rootfiles><rootfile full-path="text/book.opf"/></rootfiles></container>',
        )
        book.writestr(
            "text/book.opf",
            '<package xmlns="urn:p"><manifest><item id="b" href="two.xhtml"/><item id="a" href="ch%201.xhtml"/>'
            '</manifest><spine><itemref idref="a"/><itemref idref="b"/></spine></package>',
        )
        book.writestr("text/two.xhtml", "<h1>Two</h1><p>second</p>")
        book.writestr("text/ch 1.xhtml", "<h1>One</h1><p>first</p>")
    assert text_of(tmp_path / "book.epub") == "One\n\nfirst\n\nTwo\n\nsecond"


def test_a_missing_library_is_named_for_its_files(tmp_path, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", absent)
    for name, library in (("a.pdf", "pypdf"), ("a.docx", "docx")):
        (tmp_path / name).write_bytes(b"%PDF")
        (left_out,) = read(tmp_path / name)
        assert left_out.cause == f".{name[2:]} needs an optional library"
        assert f"{library} is not installed; run: pip install -e '.[documents]'" in left_out.detail


def pdf_of(pages, outline=()):
    """A PDF of lines of text, and titles in its outline."""
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, NameObject, read_object

    writer, data = PdfWriter(), BytesIO()
    fonts = b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    for lines in pages:
        page, stream = writer.add_blank_page(600, 800), DecodedStreamObject()
        drawn = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
        stream.set_data(f"BT /F1 12 Tf 50 700 Td {drawn} ET".encode())
        page[NameObject("/Resources")] = read_object(BytesIO(fonts), None)
        page[NameObject("/Contents")] = writer._add_object(stream)
    for title in outline:
        writer.add_outline_item(title=title, page_number=0)
    writer.write(data)
    return data.getvalue()


def test_a_pdf_becomes_paragraphs_without_page_headers(tmp_path):
    pytest.importorskip("pypdf")
    pages = [
        [
            "Annual report",
            f"{name} begins with a line of usual length and a hyphen-",
            "ated word that the next line of the page completes.",
            "It ends here.",
            f"A second paragraph starts on the page of {name} and is continued",
            f"Page {page} of 4",
        ]
        for page, name in enumerate(("Alpha", "Beta", "Gamma", "Delta"), 1)
    ]
    (tmp_path / "a.pdf").write_bytes(pdf_of(pages))
    text = text_of(tmp_path / "a.pdf")
    assert text.startswith(
        "Alpha begins with a line of usual length and a hyphenated word that the next line of the page completes."
        " It ends here.\n\nA second paragraph starts on the page of Alpha and is continued Beta begins"
    )
    assert "Annual report" not in text
    assert "Page" not in text
    (tmp_path / "b.pdf").write_bytes(pdf_of([["Before it.", "1.2 Some  Part", "After it."]], ["Some part"]))
    (found,) = read(tmp_path / "b.pdf")
    blocks = [(block.kind, block.trail) for block in found.document.blocks]
    assert blocks == [("prose", ()), ("heading", ("1.2 Some Part",)), ("prose", ("1.2 Some Part",))]
    (tmp_path / "empty.pdf").write_bytes(pdf_of([[]]))
    assert cause_of(tmp_path / "empty.pdf") == "without text"
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 broken")
    assert cause_of(tmp_path / "broken.pdf") == "damaged"


def test_a_pdf_with_half_characters_can_be_written(tmp_path, monkeypatch):
    """Fonts map glyphs to UTF-16, of which pypdf also returns half a pair, and to NUL."""
    pypdf = pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(pdf_of([["A formula: x", "Its end."]]))
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda page: "A formula: \ud835\0 \ud835\udc65\nIts end.")
    assert text_of(tmp_path / "a.pdf").encode().decode() == "A formula: \ufffd \U0001d465 Its end."


def test_a_merged_cell_of_a_word_document_is_one_cell(tmp_path):
    docx = pytest.importorskip("docx")
    written, stored = docx.Document(), BytesIO()
    table = written.add_table(rows=3, cols=3)
    for row in range(3):
        for column in range(3):
            table.cell(row, column).text = f"{row}{column}"
    table.cell(0, 0).merge(table.cell(0, 2)).text = "Prices"
    table.cell(1, 0).merge(table.cell(2, 0)).text = "Both"
    written.save(stored)
    (tmp_path / "a.docx").write_bytes(stored.getvalue())
    assert text_of(tmp_path / "a.docx") == "Prices\nBoth | 11 | 12\nBoth | 21 | 22"


def test_a_word_document_becomes_blocks(tmp_path):
    docx = pytest.importorskip("docx")
    written = docx.Document()
    written.add_heading("Manual", 0)
    written.add_heading("Install", 1)
    written.add_paragraph("Run it.")
    written.add_paragraph("one", style="List Bullet")
    written.add_paragraph("two", style="List Bullet")
    table = written.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "a", "b"
    stored = BytesIO()
    written.save(stored)
    (tmp_path / "a.docx").write_bytes(stored.getvalue())
    (found,) = read(tmp_path / "a.docx")
    assert found.document.text == "Manual\n\nInstall\n\nRun it.\n\n- one\n- two\n\na | b"
    assert {block.trail for block in found.document.blocks if block.kind != "heading"} == {("Manual", "Install")}
