import logging

from embeddings.common.log import logger, shown_on_stderr


def test_the_logger_is_named_for_the_library_and_adds_no_handler():
    assert logger.name == "embeddings"
    assert not logger.handlers


def test_a_command_shows_notes_and_warnings_and_leaves_the_logger_as_it_was(capsys, monkeypatch):
    level = logger.level
    with shown_on_stderr():
        logger.info("a note of %d", 1)
        logger.warning("a warning")
        logger.debug("a detail")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with shown_on_stderr():
        logger.info("another rank's note")
        logger.warning("another rank's warning")
    assert capsys.readouterr().err.splitlines() == ["a note of 1", "a warning", "another rank's warning"]
    assert not logger.handlers
    assert (logger.level, logger.getEffectiveLevel()) == (level, logging.WARNING)
