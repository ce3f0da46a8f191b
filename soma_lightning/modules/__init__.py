"""LightningModules of the policies."""
