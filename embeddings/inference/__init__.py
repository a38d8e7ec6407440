"""Floor 2: texts to vectors, and the nearest ones of a vector."""
