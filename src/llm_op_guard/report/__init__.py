"""Records and renderers of violations."""
