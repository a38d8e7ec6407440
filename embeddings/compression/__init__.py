"""Floor 3: compression of trained models, layer by layer: pruning and quantisation of weights."""

from embeddings.compression.calibration import CalibrationOptions
from embeddings.compression.compress import Compression, CompressionReport, PruningOptions, QuantizationOptions, Retrain
from embeddings.compression.pruning import Sparsity, prune_by_magnitude, prune_by_sparsegpt, prune_by_wanda
from embeddings.compression.quantization import quantise_by_gptq

__all__ = [
    "CalibrationOptions",
    "Compression",
    "CompressionReport",
    "PruningOptions",
    "QuantizationOptions",
    "Retrain",
    "Sparsity",
    "prune_by_magnitude",
    "prune_by_sparsegpt",
    "prune_by_wanda",
    "quantise_by_gptq",
]
