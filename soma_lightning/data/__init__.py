"""Data sets, statistics and data modules."""
