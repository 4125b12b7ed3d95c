"""The model, its parameters, its data and the training step."""
