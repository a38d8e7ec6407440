"""Floor 4: the methods, one file each."""

from embeddings.modules.base import ContrastiveModule
from embeddings.modules.cde import CDEModule, ContextSettings, FirstStageTraining
from embeddings.modules.distillation import LayerDistillation
from embeddings.modules.masked_lm import MaskedLMModule
from embeddings.modules.mgh_curriculum import MGHCurriculumModule
from embeddings.modules.moe_embed import MoEEmbedModule
from embeddings.modules.nv_embed import NVEmbedModule

__all__ = [
    "CDEModule",
    "ContextSettings",
    "ContrastiveModule",
    "FirstStageTraining",
    "LayerDistillation",
    "MGHCurriculumModule",
    "MaskedLMModule",
    "MoEEmbedModule",
    "NVEmbedModule",
]
