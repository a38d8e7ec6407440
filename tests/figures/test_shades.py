import pytest

from embeddings.figures.shades import is_dark, shades

pytest.importorskip("matplotlib")


def test_the_scale_is_white_for_nothing_and_darker_all_the_way():
    colours = shades()
    assert colours(0.0) == (1, 1, 1, 1)
    light = [sum(colours(place / 20)[:3]) for place in range(21)]
    assert light == sorted(light, reverse=True)
    assert len(set(light)) == 21


def test_letters_are_white_on_the_dark_end_alone():
    assert [is_dark(shades()(place)) for place in (0.0, 0.5, 1.0)] == [False, False, True]
    assert is_dark((0.0, 0.0, 1.0))
    assert not is_dark((0.0, 1.0, 0.0))
