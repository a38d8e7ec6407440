"""Floor 3: training records that a language model writes. The names load their module on first use."""

from typing import TYPE_CHECKING

from embeddings.common.process import lazy_names

if TYPE_CHECKING:
    from embeddings.synthesis.client import ChatClient, EndpointError, Sampling
    from embeddings.synthesis.generate import Plan, regenerate_negatives, synthesize
    from embeddings.synthesis.job import SynthesisReport
    from embeddings.synthesis.prompts import METHODS, Templates
    from embeddings.synthesis.runner import Spending, Traffic

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
        "METHODS": "prompts",
        "ChatClient": "client",
        "EndpointError": "client",
        "Plan": "generate",
        "Sampling": "client",
        "Spending": "runner",
        "SynthesisReport": "job",
        "Templates": "prompts",
        "Traffic": "runner",
        "regenerate_negatives": "generate",
        "synthesize": "generate",
    },
)
