"""What a call of the model is, and what all ranks agree on about it."""
