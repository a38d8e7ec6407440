import logging
import warnings

import pytest

from embeddings.cli.fit import HeldNotes


@pytest.fixture
def written():
    """What Lightning's loggers write."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handlers = {name: Lines() for name in ("lightning.pytorch", "lightning.fabric")}
    for name, handler in handlers.items():
        logging.getLogger(name).addHandler(handler)
    yield lines
    for name, handler in handlers.items():
        assert handler in logging.getLogger(name).handlers
        logging.getLogger(name).removeHandler(handler)


def note(text, level=logging.INFO):
    logging.getLogger("lightning.pytorch.utilities.rank_zero").log(level, text)


def test_notes_of_a_run_that_never_begins_are_dropped(written):
    with HeldNotes().holding():
        note("GPU available")
        logging.getLogger("lightning.fabric.utilities.seed").info("Seed set to 0")
    note("later")
    assert written == ["later"]


def test_notes_come_as_a_run_begins_and_then_at_once(written):
    notes = HeldNotes()
    with notes.holding():
        note("GPU available")
        assert written == []
        notes.setup(None, None, "fit")
        assert written[0] == "GPU available"
        note("Trainer.fit stopped")
        assert written[-1] == "Trainer.fit stopped"


def test_warnings_of_a_run_that_never_begins_are_dropped_and_others_come_as_it_begins(recwarn):
    warnings.simplefilter("always")
    notes, before = HeldNotes(), warnings.showwarning
    with HeldNotes().holding():
        warnings.warn("this trainer is slow", UserWarning, stacklevel=1)
    assert warnings.showwarning is before
    assert len(recwarn) == 0
    with notes.holding():
        warnings.warn("this trainer is slow", UserWarning, stacklevel=1)
        assert len(recwarn) == 0
        notes.setup(None, None, "fit")
        assert [str(warning.message) for warning in recwarn] == ["this trainer is slow"]
    assert warnings.showwarning is before


def test_a_warning_of_lightnings_log_is_not_kept_back(written):
    with HeldNotes().holding():
        note("GPU available")
        note("something is odd", logging.WARNING)
        assert written == ["GPU available", "something is odd"]
