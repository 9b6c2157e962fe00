"""The `kvc` command: one module per subcommand."""
