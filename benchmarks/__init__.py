"""One script a claim: python -m benchmarks.p5_tiled_info_nce [--tiny]."""
