"""One call of a model, traced on tensors without data."""
