"""One file a library: which functions are operators, and which contract holds for each."""
