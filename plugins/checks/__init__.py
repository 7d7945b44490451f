"""What is checked and said in the driver, before Ray starts."""
