"""Where guards are put and taken away again."""
