"""Web pages of MiniWoB++: the environment, and how a page is put into words."""
