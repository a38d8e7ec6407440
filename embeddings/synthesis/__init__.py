"""Floor 3: training records that a language model writes. The names load their module on first use."""

from typing import TYPE_CHECKING

from embeddings.common.process import lazy_names

if TYPE_CHECKING:
    from embeddings.synthesis.client import ChatClient, EndpointError, Sampling
    from embeddings.synthesis.generate import Plan, regenerate_negatives, synthesize
    from embeddings.synthesis.job import SynthesisReport
    from embeddings.synthesis.prompts import METHODS, PromptOptions, Templates
    from embeddings.synthesis.runner import Budget, Limits

__all__ = [
    "METHODS",
    "Budget",
    "ChatClient",
    "EndpointError",
    "Limits",
    "Plan",
    "PromptOptions",
    "Sampling",
    "SynthesisReport",
    "Templates",
    "regenerate_negatives",
    "synthesize",
]

__getattr__ = lazy_names(__name__)
