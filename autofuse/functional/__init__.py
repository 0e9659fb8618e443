"""The fused operations, one file each, each with its providers and its reference."""
