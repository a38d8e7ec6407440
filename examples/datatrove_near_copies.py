"""Remove near-copies from billions of pairs by datatrove: `python examples/datatrove_near_copies.py INPUT OUTPUT`.

MinHash in four stages, each a file-to-file pipeline that skips what is done. `LocalPipelineExecutor` runs them on this
machine; its sibling `SlurmPipelineExecutor` takes the same pipelines. Needs `pip install "datatrove[io]" spacy`.
`python main.py filter --near-duplicates 0.8` compares full texts and needs neither, on one machine.

python examples/datatrove_near_copies.py data/pairs data/pairs_without_copies --tasks 64 --workers 16
"""

from typing import Any

from jsonargparse import auto_cli

BUCKETS, HASHES = 14, 8


def document(_: Any, row: dict[str, Any], path: str, number: int) -> dict[str, Any]:
    """A pair as a document of datatrove: the text that is compared, and the whole record."""
    return {"text": f"{row['query']}\n{row['positive']}", "id": f"{path}/{number}", "metadata": row}


def main(source: str, output: str, work: str = "near_copies", tasks: int = 1, workers: int = 1) -> None:
    """Write the records of a folder of JSON Lines files without near-copies; `work` keeps the stages' files."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.dedup import MinhashDedupSignature as Signature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    # 14 buckets of 8 hashes find half of the pairs at a similarity of 0.68, and 92 % at 0.8.
    config = MinhashConfig(3, BUCKETS, HASHES, hash_config=HashConfig(hash_fc="sha1"))
    reader = JsonlReader(source, adapter=document)
    writer = JsonlWriter(output, adapter=lambda _, kept: kept.metadata, compression=None)
    stages = [
        ([reader, Signature(f"{work}/signatures", config=config)], tasks),
        ([MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)], BUCKETS),
        ([MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)], 1),
        ([reader, MinhashDedupFilter(f"{work}/remove"), writer], tasks),
    ]
    for number, (pipeline, count) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=count, workers=workers, logging_dir=f"{work}/logs/{number}").run()


if __name__ == "__main__":
    auto_cli(main)
