"""The command ``turnkey``. An error of the user's input is a ``ValueError`` (``ConfigError``) with a whole message."""
