"""WebShop: our client, and the server that runs in WebShop's own interpreter."""
