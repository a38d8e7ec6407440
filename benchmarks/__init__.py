"""One script for each claim: `python -m benchmarks.p5_tiled_info_nce [--tiny]`."""
