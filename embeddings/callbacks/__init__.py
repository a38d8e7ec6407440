"""Floor 4: what runs beside a method while it trains."""

from embeddings.callbacks.durable_checkpoints import DurableCheckpointIO
from embeddings.callbacks.export_language_model import ExportLanguageModel
from embeddings.callbacks.export_model import ExportModel
from embeddings.callbacks.gradcache import GradCacheCallback
from embeddings.callbacks.preemption import Preemption
from embeddings.callbacks.retrieval_eval import RetrievalEvaluation
from embeddings.callbacks.routing_statistics import RoutingStatistics
from embeddings.callbacks.run_health import RunHealth
from embeddings.callbacks.run_record import RunRecord
from embeddings.callbacks.step_progress import StepProgress
from embeddings.callbacks.throughput import Throughput

__all__ = [
    "DurableCheckpointIO",
    "ExportLanguageModel",
    "ExportModel",
    "GradCacheCallback",
    "Preemption",
    "RetrievalEvaluation",
    "RoutingStatistics",
    "RunHealth",
    "RunRecord",
    "StepProgress",
    "Throughput",
]
