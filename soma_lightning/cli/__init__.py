"""The soma command and its subcommands."""
