"""The cold tier: direct I/O, extents, checksums."""
