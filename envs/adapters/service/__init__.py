"""Customer service of a shop, played by calling tools and talking to a simulated customer."""
