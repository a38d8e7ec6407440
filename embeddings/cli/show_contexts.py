"""`show contextual-shift`: how a contextual model's vectors move between contexts."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embeddings.inference.contextual_shift import ContextualShift
    from embeddings.inference.corpus import Document


def contextual_shift(
    model: str,
    corpus: Path | list[Path],
    output: Path = Path("contextual-shift.png"),
    num_documents: int = 8,
    num_contexts: int = 10,
    context_size: int | None = None,
    seed: int = 0,
) -> None:
    """Draw how the vectors of some documents move as a contextual model reads them in one context after another.

    Printed as a table too: how alike a document's vectors stay, and how near the nearest other document is.

    Args:
        model: The directory of a contextual model.
        corpus: A corpus file, or a folder that `encode` wrote; several as `[A,B]`. The documents are drawn from the
            first, the contexts from each.
        output: The PNG file to write.
        num_documents: How many documents, 2 to 20.
        num_contexts: How many contexts of each corpus, drawn one by one; 2 or more in all.
        context_size: How many documents a context holds; as many as the model takes if left out.
        seed: Seed of the draws.
    """
    from embeddings.common import OptionError
    from embeddings.common.text import one_line
    from embeddings.figures import check_output, draw_contextual_shift
    from embeddings.figures.contextual_shift import MOST_CORPORA, MOST_DOCUMENTS
    from embeddings.figures.run_lines import run_names
    from embeddings.inference import Encoder, choose_context, contextual_shift, require_context_size
    from embeddings.inference.context_choice import draw_documents

    corpora = [corpus] if isinstance(corpus, Path) else corpus
    if not 1 <= len(corpora) <= MOST_CORPORA:
        rule = f"must name from 1 to {MOST_CORPORA} corpora"
        raise OptionError("corpus", list(map(str, corpora)), rule, "give one, or several as [A,B]")
    if not 2 <= num_documents <= MOST_DOCUMENTS:
        rule = f"must be from 2 to {MOST_DOCUMENTS}: more colours cannot be told apart"
        raise OptionError("num_documents", num_documents, rule, "8 is usual")
    if num_contexts * len(corpora) < 2:
        raise OptionError("num_contexts", num_contexts, "must give two contexts or more", "10 is usual")
    check_output(output)
    encoder = Encoder.from_pretrained(model, precision="float32")
    size = require_context_size(encoder, context_size)
    # A small corpus gives some documents twice.
    found = {document.text: document for document in draw_documents(corpora[0], num_documents, seed)}
    documents = [document for text, document in found.items() if text.strip()]
    if len(documents) < 2:
        raise OptionError("corpus", str(corpora[0]), "must hold two documents that differ", "give a larger one")
    contexts = [
        choose_context(encoder, path, size, seed + 1 + draw) for path in corpora for draw in range(num_contexts)
    ]
    shift = contextual_shift(encoder, [document.text for document in documents], contexts)
    names = [name for name in run_names(corpora) for _ in range(num_contexts)]
    title = f"{one_line(Path(model).name, 40)}: {len(documents)} documents in {len(contexts)} contexts"
    subtitle = (
        f"A colour is a document of {names[0]}, a dot its vector behind {size} documents of a corpus. Of these vectors "
        f"{shift.stays_nearest:.1%} are nearest, over all other contexts, to one of their own document."
    )
    draw_contextual_shift(shift, [document.text for document in documents], names, title, subtitle, output)
    print(f"{title}\n{subtitle}\n\n{_table(shift, documents)}\n\nwrote {output}")


def _table(shift: "ContextualShift", documents: "Sequence[Document]") -> str:
    """Each document's cosines."""
    from embeddings.common.text import one_line

    names = ("between contexts", "the least", "with no context", "nearest other")
    lines = ["{:>16}  {:>9}  {:>15}  {:>13}  document".format(*names)]
    rows = zip(documents, shift.own_cosine_NP, shift.alone_cosine_N, shift.other_cosine_N, strict=True)
    for document, own_P, alone, other in rows:
        numbers = f"{own_P.mean():>16.4f}  {own_P.min():>9.4f}  {alone:>15.4f}  {other:>13.4f}"
        lines.append(f"{numbers}  {one_line(document.document_id, 20)}: {one_line(document.text, 50)}")
    return "\n".join(lines)
