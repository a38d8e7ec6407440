"""Mixtures of experts: layers, a rotary encoder, upcycling and routing metrics."""
