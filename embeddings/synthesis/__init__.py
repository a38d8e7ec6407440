"""Floor 3: training records that a language model writes. The names load their module on first use."""

from typing import TYPE_CHECKING

from embeddings.common.lazy import lazy_names

if TYPE_CHECKING:
    from embeddings.synthesis.asker import Spending, Traffic
    from embeddings.synthesis.categories import METHODS
    from embeddings.synthesis.client import ChatClient, EndpointError, Sampling
    from embeddings.synthesis.examples import Plan, synthesize
    from embeddings.synthesis.job import SynthesisReport
    from embeddings.synthesis.prompts import Templates
    from embeddings.synthesis.regenerate import regenerate_negatives

__all__ = [
    "METHODS",
    "ChatClient",
    "EndpointError",
    "Plan",
    "Sampling",
    "Spending",
    "SynthesisReport",
    "Templates",
    "Traffic",
    "regenerate_negatives",
    "synthesize",
]

__getattr__ = lazy_names(
    __name__,
    {
        "METHODS": "categories",
        "ChatClient": "client",
        "EndpointError": "client",
        "Plan": "examples",
        "Sampling": "client",
        "Spending": "asker",
        "SynthesisReport": "job",
        "Templates": "prompts",
        "Traffic": "asker",
        "regenerate_negatives": "regenerate",
        "synthesize": "examples",
    },
)
