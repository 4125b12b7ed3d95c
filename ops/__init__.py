"""Bottom layer: errors, units, dtypes, kernels, checksums, and MindSpore compute."""
