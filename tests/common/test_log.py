from embeddings.common.log import logger


def test_the_logger_is_named_for_the_library_and_adds_no_handler():
    assert logger.name == "embeddings"
    assert not logger.handlers
