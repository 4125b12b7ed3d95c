"""MindSpore stage functions of a MoE Transformer: forward and backward, one stage at a time."""
