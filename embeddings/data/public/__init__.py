"""The public data sets of the recipes: where each lies, how its rows become records, and the job that fetches them."""

from embeddings.data.public.fetch import Hub, fetch_source
from embeddings.data.public.table import KINDS, PublicSource, PublicTable, Stage

__all__ = ["KINDS", "Hub", "PublicSource", "PublicTable", "Stage", "fetch_source"]
