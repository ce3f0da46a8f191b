"""pi0.5: configuration, network, processor, checkpoints."""
