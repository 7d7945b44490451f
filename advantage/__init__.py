"""Turn- and step-level credit over one table of steps."""
