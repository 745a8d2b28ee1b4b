"""State of a deployed model, independent of the Plan."""
