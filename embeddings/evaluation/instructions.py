"""What a model is told before the texts of a task: published tables of instructions, or a file of one's own."""

import hashlib
import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Self

from embeddings.common.errors import InputError, OptionError

# NV-Embed Table 13 and MGH Table 8; each file names its source.
PUBLISHED = {"nv-embed": "instructions_nv_embed.json", "mgh": "instructions_mgh.json"}
_LAYOUT = 'write {"instructions": {"SciFact": "…", "STS": "…"}}'


@dataclass(frozen=True)
class Instructions:
    """Instructions by task.

    Attributes:
        name: Where they are from, with a hash of what they say: two tables of one name are told apart.
        texts: The instruction by a task's name, or by a type of tasks that share one (`STS`).
    """

    name: str
    texts: dict[str, str]

    def of(self, task: str, kind: str) -> str | None:
        """The instruction of a task, or of its type; a later version (`.v2`) has that of the first. None if none."""
        names = (task, re.sub(r"\.v\d+$", "", task), kind)
        return next((self.texts[name] for name in names if name in self.texts), None)

    @classmethod
    def read(cls, source: str) -> Self:
        """A published table by its name, or a JSON file: `{"instructions": {"SciFact": "…", "STS": "…"}}`.

        Raises:
            OptionError: If there is neither a table nor a file of this name.
            InputError: If the file does not hold such an object.
        """
        path = Path(source)
        if source in PUBLISHED:
            content = (resources.files(__package__) / "tables" / PUBLISHED[source]).read_text(encoding="utf-8")
        elif path.is_file():
            content = path.read_bytes().decode("utf-8", "replace")
        else:
            known = ", ".join(PUBLISHED)
            raise OptionError("instructions", source, f"must be a table ({known}) or a JSON file", "name one of them")
        try:
            texts = json.loads(content)["instructions"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(source, "holds no object `instructions`", _LAYOUT) from None
        if not isinstance(texts, dict) or not texts or not all(_is_text(text) for text in texts.values()):
            raise InputError(source, "an instruction is empty or no text", _LAYOUT)
        digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
        return cls(f"{path.stem}-{digest[:8]}", texts)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
