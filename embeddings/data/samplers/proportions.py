"""The part that each source has of what is drawn."""

from collections.abc import Sequence
from typing import Literal

from embeddings.common.errors import OptionError

Proportions = Literal["size", "uniform", "given"]

# Powers of whole numbers may differ in the last bit between machines; the plan must not.
_DIGITS = 12


def source_parts(
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    proportions: Proportions = "size",
    temperature: float = 1.0,
) -> Sequence[float]:
    """The part of each source, > 0; only their ratios matter.

    Args:
        sizes: Size of each source, each >= 1.
        weights: With proportions `given`, the part of each source, > 0. Elsewhere None, or all equal.
        proportions: `size`: part = size ** temperature; `uniform`: equal parts; `given`: `weights`.
        temperature: The exponent, 0 to 1: 1 for parts as large as the sources, 0 for equal ones. With 0.3, XLM-R's for
            languages, a source a hundredth as large as another has a quarter of the other's part.

    Raises:
        OptionError: If a weight or the temperature is impossible, or cannot take effect.
    Source: Conneau and Lample 2019 (XLM), arXiv:1901.07291, §3.1, which calls the exponent alpha. Differs: sizes are
        counted in whatever the sampler draws, not in sentences.
    """
    given = [1.0] * len(sizes) if weights is None else list(weights)
    if len(given) != len(sizes):
        raise OptionError("weights", given, f"must be one for each of the {len(sizes)} sources", "give as many")
    if not 0 <= temperature <= 1:
        rule = "must be from 0 to 1: it is the exponent of a source's size"
        raise OptionError("sampler.temperature", temperature, rule, "for a root of 3.3 give 0.3")
    if temperature != 1 and proportions != "size":
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("sampler.temperature", temperature, rule, "set the sampler's proportions to size")
    if proportions == "given":
        if not all(0 < weight < float("inf") for weight in given):
            raise OptionError(
                "data.sources[].weight", given, "must be > 0 and finite", "leave out a source without part"
            )
        return given
    if len(set(given)) > 1:
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("data.sources[].weight", given, rule, "set the sampler's proportions to given")
    if proportions == "uniform":
        return [1] * len(sizes)
    return sizes if temperature == 1 else [float(f"{size**temperature:.{_DIGITS}g}") for size in sizes]
