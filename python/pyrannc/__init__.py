"""Automatic pipeline and data parallelism for unmodified PyTorch models."""
