"""Which rows make up each batch: pure functions of (seed, epoch, step)."""

from embeddings.common.random import KeyedPermutation
from embeddings.data.samplers.base import BatchSampler, BlendedBatchSampler, SourceIdentity
from embeddings.data.samplers.clustered import ClusteredBatchSampler
from embeddings.data.samplers.curriculum import CurriculumBatchSampler
from embeddings.data.samplers.homogeneous import HomogeneousBatchSampler

__all__ = [
    "BatchSampler",
    "BlendedBatchSampler",
    "ClusteredBatchSampler",
    "CurriculumBatchSampler",
    "HomogeneousBatchSampler",
    "KeyedPermutation",
    "SourceIdentity",
]
