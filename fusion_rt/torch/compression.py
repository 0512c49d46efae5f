"""Horovod's module of compressors, for scripts that import from it."""

from fusion_rt.torch.core.compressors import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    compression_stats,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "compression_stats"]
