"""The languages of a source's records: a small number a row, for work that is done language by language."""

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.data.cache import CachedSource, read_located_records
from embeddings.data.sources import SourceConfig

MAX_LANGUAGES = 1 << 16


def read_languages(config: SourceConfig, cached: CachedSource) -> npt.NDArray[np.uint16]:
    """The language of each row of a source of pairs, numbered by first appearance, (rows,); one pass over the source.

    Languages are told apart by how the field `language` is written.

    Args:
        config: The source.
        cached: Its converted form.

    Raises:
        InputError: If a record has no language, or there are more than 65,536; the message names file and row. Or if
            the source can no longer be read, or is not what was converted.
    """
    code_N = np.empty(len(cached.table), np.uint16)
    codes: dict[str, int] = {}
    for row, (where, record) in enumerate(read_located_records(config, cached)):
        if record.language is None:
            fix = "give every record one, or map it with columns: {language: YOUR_COLUMN}"
            raise InputError(where, "the record has no language", fix)
        code = codes.setdefault(record.language, len(codes))
        if code == MAX_LANGUAGES:
            what = f"language {record.language[:40]!r} is one of more than {MAX_LANGUAGES}"
            raise InputError(where, what, "map language to the column that names the language")
        code_N[row] = code
    return code_N
