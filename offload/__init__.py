"""Blocks, tiers, schedule, pipeline and the streamed optimizer."""
