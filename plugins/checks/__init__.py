"""What is checked and reported in the driver, before Ray starts: a ``ConfigError`` names the key to change."""
