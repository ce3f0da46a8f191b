"""The strategy for Trainer and Fabric."""
