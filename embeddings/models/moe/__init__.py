"""Mixtures of experts: layers, the rotary encoder that has them, upcycling, and what a run reads of the routing."""
