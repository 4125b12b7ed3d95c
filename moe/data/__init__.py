"""Text to tokens to batches: sources, tokenised files, keyed shuffling, cursors."""
