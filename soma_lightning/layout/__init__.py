"""How parameters and work are laid out over devices."""
