"""Batch samplers: the rows of each batch are a pure function of (seed, epoch, step)."""

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
