import logging
import sys
import warnings

import datasets
import pytest
import tqdm
import tqdm.auto

from embeddings.common import MissingExtraError
from embeddings.evaluation.mteb_library import load_mteb, quiet


def test_mteb_is_loaded():
    assert load_mteb().__name__ == "mteb"


def test_a_missing_mteb_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(MissingExtraError, match=r"mteb is not installed; run: pip install -e '\.\[eval\]'"):
        load_mteb()


def test_libraries_are_quiet_inside_and_as_they_were_after(capfd):
    def talk():
        logging.getLogger("mteb.somewhere").warning("a line")
        for _ in tqdm.auto.tqdm(range(2), desc="a bar"):
            pass
        datasets.Dataset.from_dict({"a": [1]}).map(lambda row: row)

    with quiet():
        warnings.warn("a warning", stacklevel=1)
        talk()
        assert capfd.readouterr() == ("", "")
        for _ in tqdm.tqdm(range(2), desc="our bar"):
            pass
        assert "our bar" in capfd.readouterr().err
    with quiet(keep_bars=True):
        talk()
        said = capfd.readouterr().err
        assert "a bar" in said
        assert "Map" in said
        assert "a line" not in said
    talk()
    said = capfd.readouterr().err
    assert "a bar" in said
    assert "Map" in said
    with pytest.raises(UserWarning, match="a warning"):
        warnings.warn("a warning", stacklevel=1)
