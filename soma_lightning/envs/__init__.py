"""Simulated environments, experts and demonstrations."""
