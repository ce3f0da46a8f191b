"""Kernels and reference of one operation family; see the module names."""
