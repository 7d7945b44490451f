"""Other people's environments in this package's contract; the registry names them by string, nobody imports them."""
