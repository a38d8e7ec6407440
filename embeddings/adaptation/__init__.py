"""From one's own documents to better search: passages of documents."""

from embeddings.adaptation.corpus import PassageReport, write_passages
from embeddings.adaptation.passages import Splitter, TokenCounter

__all__ = ["PassageReport", "Splitter", "TokenCounter", "write_passages"]
