"""The one logger of the library."""

import logging

logger = logging.getLogger("embeddings")
