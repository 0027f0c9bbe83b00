"""The command line: `kvant run`, `pull`, `list`, `doctor`. What a command does not need it does not import."""
