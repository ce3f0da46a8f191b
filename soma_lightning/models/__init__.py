"""Policies and what they are built from."""
