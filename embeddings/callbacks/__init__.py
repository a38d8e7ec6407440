"""Floor 4: callbacks of training runs."""

from embeddings.callbacks.checkpoints import DurableCheckpointIO, ExportLanguageModel, ExportModel
from embeddings.callbacks.gpu import GPUTraining
from embeddings.callbacks.gradcache import GradCacheCallback
from embeddings.callbacks.preemption import Preemption
from embeddings.callbacks.progress import StepProgress, Throughput
from embeddings.callbacks.retrieval_eval import RetrievalEvaluation
from embeddings.callbacks.run_health import RoutingStatistics, RunHealth
from embeddings.callbacks.run_record import RunRecord

__all__ = [
    "DurableCheckpointIO",
    "ExportLanguageModel",
    "ExportModel",
    "GPUTraining",
    "GradCacheCallback",
    "Preemption",
    "RetrievalEvaluation",
    "RoutingStatistics",
    "RunHealth",
    "RunRecord",
    "StepProgress",
    "Throughput",
]
