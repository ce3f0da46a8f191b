"""Optimizers with a fused statistics, clipping and update step."""
