"""Encode a corpus on a Ray cluster, for billions of documents: `python examples/ray_encode.py MODEL CORPUS OUTPUT`.

Ray Data streams the rows of JSON Lines files (`text` and other fields) to an `Encoder` for each worker, and writes
Parquet files with a column `vector`. Without a cluster Ray starts on this machine. Needs `pip install "ray[data]"`.
`python main.py encode` needs no Ray: it resumes, and the tasks of a SLURM array share its shards.

python examples/ray_encode.py checkpoints/model 'corpus/*.jsonl' vectors --workers 8 --gpus 1
"""

from typing import Any

from jsonargparse import auto_cli

from embeddings.inference import Encoder


class Encode:
    """The model of one worker, which Ray calls with columns of a batch."""

    def __init__(self, model: str) -> None:
        self.encoder = Encoder.from_pretrained(model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"vector": self.encoder.encode_document(list(batch["text"]))}


def main(model: str, corpus: str, output: str, workers: int = 1, gpus: float = 0) -> None:
    """Write the corpus with its vectors to a folder; each of the `workers` has `gpus` GPUs."""
    import ray.data

    pool = ray.data.ActorPoolStrategy(size=workers)
    rows = ray.data.read_json(corpus, lines=True)
    # With a reserved CPU for each, as many workers as CPUs would leave none for reading, and the job would not move.
    options = {"compute": pool, "num_cpus": 0, "num_gpus": gpus, "batch_size": 4096, "zero_copy_batch": False}
    rows.map_batches(Encode, fn_constructor_args=(model,), **options).write_parquet(output)


if __name__ == "__main__":
    auto_cli(main)
