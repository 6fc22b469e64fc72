"""Where NaN and infinities come from: the calls of modules, watched one by one, forward and backward."""
