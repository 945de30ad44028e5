"""The ``stretto`` command, with one file per subcommand."""
