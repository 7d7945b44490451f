"""The command ``turnkey``."""
