import logging

import lightning as L
import pytest

from embeddings.cli.notes import HeldNotes


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
        notes.setup(L.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False), L.LightningModule(), "fit")
        assert written[0] == "GPU available"
        note("Trainer.fit stopped")
        assert written[-1] == "Trainer.fit stopped"


def test_a_warning_is_not_kept_back(written):
    with HeldNotes().holding():
        note("GPU available")
        note("something is odd", logging.WARNING)
        assert written == ["GPU available", "something is odd"]
