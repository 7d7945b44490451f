"""Questions over a text corpus: the environment, its data and its retrievers."""
