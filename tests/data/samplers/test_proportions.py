"""Parts by size, temperature and weight."""

from typing import Any

import pytest

from embeddings.common import OptionError
from embeddings.data.samplers.base import source_parts


def test_parts_are_sizes_equal_or_given() -> None:
    assert list(source_parts([40, 7])) == [40, 7]
    assert list(source_parts([40, 7], [2.0, 2.0])) == [40, 7]
    assert list(source_parts([40, 7], proportions="uniform")) == [1, 1]
    assert list(source_parts([40, 7], [0.5, 3.0], "given")) == [0.5, 3.0]


def test_the_temperature_is_the_exponent_of_the_sizes() -> None:
    assert source_parts([100, 1], temperature=0.5) == pytest.approx([10, 1])
    large, small = source_parts([55_600, 556], temperature=0.3)
    assert large / small == pytest.approx(100**0.3) == pytest.approx(3.981, abs=1e-3)
    assert len(set(source_parts([9, 100, 3], temperature=0.0))) == 1


def test_a_part_is_cut_to_digits_that_every_machine_agrees_on() -> None:
    (part,) = source_parts([123_456_789], temperature=0.3)
    assert part == float(f"{part:.12g}")
    assert part == pytest.approx(123_456_789**0.3, rel=1e-11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 3.3}, r"sampler\.temperature must be from 0 to 1: it is the exponent .*, got 3\.3"),
        ({"temperature": -0.1}, "must be from 0 to 1"),
        ({"temperature": float("nan")}, "must be from 0 to 1"),
        ({"temperature": 0.3, "proportions": "uniform"}, "cannot take effect with proportions 'uniform', got 0.3"),
        ({"temperature": 0.3, "proportions": "given"}, "temperature cannot take effect with proportions 'given'"),
        ({"weights": [1.0, 2.0]}, "weight cannot take effect with proportions 'size'"),
        ({"weights": [1.0]}, "one for each of the 2 sources"),
        ({"weights": [1.0, 0.0], "proportions": "given"}, "must be > 0 and finite"),
    ],
)
def test_what_cannot_be_or_cannot_take_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        source_parts([3, 4], **options)
