"""Floor 3: training records that a language model writes. The names load their module on first use."""

from typing import TYPE_CHECKING

from embeddings.common.process import lazy_names

if TYPE_CHECKING:
    from embeddings.synthesis.client import ChatClient, EndpointError, Limits, Sampling
    from embeddings.synthesis.generate import Plan, SynthesisReport, regenerate_negatives, synthesize
    from embeddings.synthesis.prompts import METHODS, PromptOptions, Templates

__all__ = [
    "METHODS",
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
