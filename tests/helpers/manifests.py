"""Changes of manifests, as other code or older versions would have written them."""

import json
import os
from pathlib import Path


def rewrite_manifest(path: Path, *removed: str, **fields: object) -> None:
    """Write a manifest again without its hashes and the `removed` fields; its time of change stays."""
    status = path.stat()
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in removed}
    kept = {name: value for name, value in kept.items() if name not in ("files", "xxh3_128")}
    path.write_text(json.dumps({**kept, **fields}))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
