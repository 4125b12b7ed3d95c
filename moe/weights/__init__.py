"""Weights as the safetensors world keeps them: start from them, export to them, import them."""
