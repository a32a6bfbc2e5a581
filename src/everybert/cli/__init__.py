"""The command line: one module per command group, no logic of its own."""
