"""Kernels of SomaSpeed: Triton implementations and the plain torch references they are compared with."""
