"""Checkpoints: reading a commit from outside, onto any mesh."""
