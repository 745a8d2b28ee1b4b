"""What a script sees of a wrapped model: the model itself, and its state as if it were whole."""
