"""Batch samplers: the rows of each batch are a pure function of (seed, epoch, step)."""
