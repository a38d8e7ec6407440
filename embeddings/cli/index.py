"""`index`: what `search --index ivf` looks into."""

from pathlib import Path


def index(vectors: Path, num_lists: int | None = None, num_probes: int | None = None, seed: int = 0) -> None:
    """Make the index of an encoded folder's vectors, beside them: inverted lists, for `search --index ivf`.

    Its recall@10 against the exact search is printed, of 200 documents of the folder as queries.

    Args:
        vectors: A folder that `encode` wrote; `ivf.faiss` and `ivf.manifest.json` are added to it, or replaced.
        num_lists: Lists; chosen by the number of vectors if left out.
        num_probes: Lists that are searched for a query; 32 if left out, or all where there are fewer.
        seed: Seed of the sample that the lists are trained on.
    """
    from embeddings.inference import VectorFolder
    from embeddings.mining import build_index, recall_of
    from embeddings.mining.vector_index import INDEX_FILE

    folder = VectorFolder.open(vectors)
    made = build_index(folder, num_lists=num_lists, num_probes=num_probes, seed=seed)
    print(
        f"wrote {folder.path / INDEX_FILE}: {folder.num_documents} vectors in {made.num_lists} lists, "
        f"{made.num_probes} searched for a query; recall@10 {recall_of(made, folder):.3f}"
    )
