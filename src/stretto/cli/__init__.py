"""The ``stretto`` command: one file a subcommand."""
