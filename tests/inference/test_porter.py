import pytest

from embeddings.inference.porter import porter_stem

# Porter 1980, the examples beside each rule, carried through all later steps.
PAPER = """
    caresses caress ponies poni ties ti caress caress cats cat feed feed agreed agre plastered plaster bled bled
    motoring motor sing sing conflated conflat troubled troubl sized size hopping hop tanned tan falling fall
    hissing hiss fizzed fizz failing fail filing file happy happi sky sky relational relat conditional condit
    rational ration valenci valenc hesitanci hesit digitizer digit radicalli radic differentli differ vileli vile
    analogousli analog vietnamization vietnam predication predic operator oper feudalism feudal decisiveness decis
    hopefulness hope callousness callous formaliti formal sensitiviti sensit sensibiliti sensibl triplicate triplic
    formative form formalize formal electriciti electr electrical electr hopeful hope goodness good revival reviv
    allowance allow inference infer airliner airlin gyroscopic gyroscop adjustable adjust defensible defens
    irritant irrit replacement replac adjustment adjust dependent depend adoption adopt homologou homolog
    communism commun activate activ angulariti angular homologous homolog effective effect bowdlerize bowdler
    probate probat rate rate cease ceas controll control roll roll
"""


@pytest.mark.parametrize(("word", "stem"), list(zip(PAPER.split()[::2], PAPER.split()[1::2], strict=True)))
def test_the_papers_examples_stem_as_printed(word: str, stem: str) -> None:
    assert porter_stem(word) == stem


@pytest.mark.parametrize(
    ("word", "stem"),
    [
        *[("possibly", "possibl"), ("topology", "topolog"), ("is", "is"), ("x", "x"), ("", ""), ("yes", "ye")],
        *[
            ("computes", "comput"),
            ("computed", "comput"),
            ("computing", "comput"),
            ("returns", "return"),
            ("123", "123"),
        ],
    ],
)
def test_corrections_short_words_and_the_words_of_code(word: str, stem: str) -> None:
    assert porter_stem(word) == stem
