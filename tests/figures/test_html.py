from base64 import b64decode
from html.parser import HTMLParser

from embeddings.figures.html import Html, definitions, element, joined, png_image, table

HOSTILE = '<script>alert("x")</script> & \'"></td>'


class Reader(HTMLParser):
    """The elements, attributes and text of some markup."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_text_stays_text_and_markup_stays_markup():
    page = Reader(element("p", HOSTILE, element("b", "bold"), title=HOSTILE, class_="a"))
    assert page.tags == ["p", "b"]
    assert page.attributes == [("title", HOSTILE), ("class", "a")]
    assert page.text == f"{HOSTILE}bold"


def test_tables_and_lists_escape_what_they_hold():
    page = Reader(
        table([HOSTILE], [[HOSTILE, "2"]]) + definitions([(HOSTILE, HOSTILE)]) + joined([HOSTILE, Html("<i>")])
    )
    assert page.tags == ["table", "thead", "tr", "th", "tbody", "tr", "td", "td", "dl", "dt", "dd", "i"]
    assert page.text == HOSTILE * 2 + "2" + HOSTILE * 3


def test_numbers_are_told_from_words():
    cells = ["1,234", "-0.5", "12.5%", "3 MB", "", "a1", "1.2.3", "NaN"]
    markup = table([], [cells])
    assert [f'<td class="number">{cell}</td>' in markup for cell in cells] == [True] * 4 + [False] * 4


def test_half_a_character_is_no_obstacle():
    assert element("p", "a\udc80b").encode() == b"<p>a?b</p>"


def test_a_picture_lies_in_the_page():
    (image,) = Reader(png_image(b"\x89PNG", HOSTILE)).attributes[:1]
    assert b64decode(image[1].removeprefix("data:image/png;base64,")) == b"\x89PNG"
    assert Reader(png_image(b"", HOSTILE)).attributes[1] == ("alt", HOSTILE)
    assert "</img>" not in png_image(b"", "")
