"""Floor 3: training records that a language model writes."""
