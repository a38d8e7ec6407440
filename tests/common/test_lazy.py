import pytest

import embeddings.common
from embeddings.common.lazy import lazy_names


def test_a_name_is_loaded_from_its_module_on_first_use():
    from embeddings.common.types import TokenBatch

    assert lazy_names("embeddings.common", {"TokenBatch": "types"})("TokenBatch") is TokenBatch


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lazy_names("embeddings.common", {})("nothing")


def test_every_public_name_can_be_had():
    assert len(embeddings.common.__all__) == 18
    assert all(getattr(embeddings.common, name) is not None for name in embeddings.common.__all__)
